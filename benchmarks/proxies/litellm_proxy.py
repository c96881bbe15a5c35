"""litellm's proxy with its defaults in front of a server; run in its own environment (`make bench-peers`).

python litellm_proxy.py UPSTREAM SESSIONS
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from pathlib import Path

from uvicorn_proxy import serve


def main() -> None:
    """Serve, and print the address and key of each session."""
    upstream, sessions = sys.argv[1], int(sys.argv[2])
    params = {"model": "hosted_vllm/policy", "api_base": f"{upstream}/v1", "api_key": "none"}
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps({"model_list": [{"model_name": "policy", "litellm_params": params}]}))
        os.environ["CONFIG_FILE_PATH"] = str(path)
        from litellm.proxy.proxy_server import app  # type: ignore[import-not-found]

        serve(app, listener, [f"http://127.0.0.1:{listener.getsockname()[1]}"] * sessions)


if __name__ == "__main__":
    main()
