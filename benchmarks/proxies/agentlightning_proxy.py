"""agent-lightning's LLM proxy with its defaults in front of a server; run in its own environment (`make bench-peers`).

python agentlightning_proxy.py UPSTREAM SESSIONS
"""

from __future__ import annotations

import asyncio
import json
import sys

from agentlightning.llm_proxy import LLMProxy  # type: ignore[import-not-found]
from agentlightning.store.memory import InMemoryLightningStore  # type: ignore[import-not-found]


async def main() -> None:
    """Serve, and print the address and key of each session."""
    upstream, sessions = sys.argv[1], int(sys.argv[2])
    store = InMemoryLightningStore(thread_safe=True)
    params = {"model": "hosted_vllm/policy", "api_base": f"{upstream}/v1", "api_key": "none"}
    proxy = LLMProxy(model_list=[{"model_name": "policy", "litellm_params": params}], store=store, launch_mode="thread")
    await proxy.start()
    addresses = []
    for _ in range(sessions):
        rollout = await store.start_rollout(input={})
        llm = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id, model="policy")
        addresses.append([llm.endpoint, "none"])
    print("READY " + json.dumps(addresses), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
