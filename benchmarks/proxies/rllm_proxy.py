"""rLLM's model gateway in front of a server, with traces in memory; run in its own environment (`make bench-peers`).

python rllm_proxy.py UPSTREAM SESSIONS
"""

from __future__ import annotations

import socket
import sys

from rllm_model_gateway.models import GatewayConfig, WorkerConfig  # type: ignore[import-not-found]
from rllm_model_gateway.server import create_app  # type: ignore[import-not-found]
from uvicorn_proxy import serve


def main() -> None:
    """Serve, and print the address and key of each session."""
    upstream, sessions = sys.argv[1], int(sys.argv[2])
    config = GatewayConfig(store_worker="memory", workers=[WorkerConfig(url=f"{upstream}/v1", model_name="policy")])
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serve(create_app(config), listener, [f"{url}/sessions/{number}" for number in range(sessions)])


if __name__ == "__main__":
    main()
