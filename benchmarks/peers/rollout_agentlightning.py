"""agent-lightning's side of the rollout comparison: its runners, store and LLM proxy, whose spans have the tokens.

The agent is the loop of the bare client. There is one runner per concurrent episode, all in this process, without a
tracer of their own, which would cost more.

python rollout_agentlightning.py URL FOLDER
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import nullcontext
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"

import aiohttp
from agentlightning.litagent import LitAgent  # type: ignore[import-not-found]
from agentlightning.llm_proxy import LLMProxy  # type: ignore[import-not-found]
from agentlightning.runner import LitAgentRunner  # type: ignore[import-not-found]
from agentlightning.store.memory import InMemoryLightningStore  # type: ignore[import-not-found]
from agentlightning.tracer.dummy import DummyTracer  # type: ignore[import-not-found]
from side import Play, serve
from work import FOUND, QUESTION, TOOLS, look


class NoTracer(DummyTracer):  # type: ignore[misc]
    """Tracer that records nothing."""

    def trace_context(self, name: str | None = None, **_: Any) -> Any:
        """Return an empty context."""
        return nullcontext()

    def get_last_trace(self) -> list[Any]:
        """Return no spans."""
        return []


class Agent(LitAgent[int]):  # type: ignore[misc]
    """Loop that asks the model and calls the tool."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = 0
        timeout = aiohttp.ClientTimeout(total=None)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def training_rollout_async(self, task: int, resources: Any, rollout: Any) -> float:
        """Play one episode."""
        llm = resources["policy"]
        url = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION.format(task)}]
        while True:
            body = {"model": llm.model, "messages": messages, "tools": TOOLS}
            async with self._http.post(f"{url}/chat/completions", json=body) as answer:
                answer.raise_for_status()
                message = (await answer.json())["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                self.ended += message["content"] == FOUND
                return 1.0
            for call in message["tool_calls"]:
                text = look(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


async def make(url: str, _folder: str) -> Play:
    """Start the proxy."""
    logging.disable(logging.WARNING)
    store = InMemoryLightningStore(thread_safe=True)
    params = {"model": "hosted_vllm/policy", "api_base": f"{url}/v1", "api_key": "none"}
    proxy = LLMProxy(model_list=[{"model_name": "policy", "litellm_params": params}], store=store, launch_mode="thread")
    await proxy.start()
    await store.add_resources({"policy": proxy.as_resource(model="policy")})
    agent = Agent()
    runners: list[Any] = []

    async def play(episodes: int, at_once: int) -> int:
        agent.ended = 0
        while len(runners) < at_once:
            runner = LitAgentRunner(NoTracer())
            runner.init(agent)
            runner.init_worker(len(runners), store)
            runners.append(runner)
        numbers = iter(range(episodes))

        async def play_some(runner: Any) -> None:
            for number in numbers:
                await runner.step(number, mode="train")

        await asyncio.gather(*(play_some(runner) for runner in runners[:at_once]))
        return agent.ended

    return play


if __name__ == "__main__":
    serve(make)
