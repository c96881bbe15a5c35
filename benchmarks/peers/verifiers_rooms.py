"""The episodes of the comparison as a taskset and a harness of verifiers 0.4.

The harness plays in the process of the rollouts, which verifiers permits: a process per episode, as in its own
harnesses, would cost more. Its model calls go through verifiers' interception server, as they must.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import aiohttp
import verifiers.v1 as vf  # type: ignore[import-not-found]
from verifiers.v1.runtimes import ProgramResult  # type: ignore[import-not-found]
from work import FOUND, QUESTION, TOOLS, look

__all__ = ["RoomsHarness", "RoomsTaskset"]


class RoomsConfig(vf.TasksetConfig):  # type: ignore[misc]
    """Settings of the tasks."""

    episodes: int = 1


class RoomsTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """One room."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def found(self, trace: Any) -> float:
        """Return 1 for the right last answer."""
        return float(trace.branches[-1].messages[-1].content == FOUND)


class RoomsTaskset(vf.Taskset[RoomsTask, RoomsConfig]):  # type: ignore[misc]
    """Tasks with one room each."""

    def load(self) -> Iterable[RoomsTask]:
        """Make the tasks."""
        for number in range(self.config.episodes):
            yield RoomsTask(vf.TaskData(name=str(number), prompt=QUESTION.format(number)), self.config.task)


class RoomsHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Loop that asks the model and calls the tool."""

    EXECUTES_CODE = NEEDS_CONTAINER = False
    _http: aiohttp.ClientSession | None = None

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        """Play one episode."""
        if RoomsHarness._http is None:
            timeout = aiohttp.ClientTimeout(total=None)
            RoomsHarness._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        messages: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        while True:
            body = {"model": ctx.model, "messages": messages, "tools": TOOLS}
            async with self._http.post(f"{endpoint}/chat/completions", json=body, headers=headers) as answer:
                answer.raise_for_status()
                message = (await answer.json())["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return ProgramResult(exit_code=0, stdout="", stderr="")
            for call in message["tool_calls"]:
                text = look(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
