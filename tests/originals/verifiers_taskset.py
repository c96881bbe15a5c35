"""A taskset of `verifiers.v1` with its own harness: sums, with a calculator that the harness runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class SumData(vf.TaskData):
    """A sum."""

    answer: int


class SumTask(vf.Task[SumData]):
    """Pays 1 for the right answer, and 0.5 more for a call of the calculator."""

    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        """Whether the last answer has the sum."""
        return float(str(task.answer) in str(trace.branches[-1].messages[-1].content))

    @vf.reward(weight=0.5)
    async def called(self, trace: vf.Trace) -> float:
        """Whether the calculator was called."""
        return float(any(message.role == "tool" for message in trace.branches[-1].messages))

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Fail for one task."""
        if self.data.answer == 9:
            raise OSError("the disk of the task is full")


class SumConfig(vf.TasksetConfig):
    """How many sums there are."""

    size: int = 20


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    """Sums of consecutive numbers."""

    def load(self) -> Iterator[SumTask]:
        """Build the sums."""
        for number in range(self.config.size):
            prompt = f"What is {number} plus {number + 1}?"
            data = SumData(prompt=prompt, system_prompt="Answer with a number.", answer=2 * number + 1)
            yield SumTask(data, self.config.task)


class SumHarness(vf.Harness[vf.HarnessConfig]):
    """A chat loop in this process, which runs the calculator."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        """Answer calls until there are none."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with httpx.AsyncClient(base_url=endpoint, headers={"Authorization": f"Bearer {secret}"}) as client:
            while True:
                body = {"model": ctx.model, "messages": messages, "tools": [ADD]}
                reply = await client.post("/chat/completions", json=body, timeout=60)
                if reply.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=reply.text)
                message = reply.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    numbers = json.loads(call["function"]["arguments"])
                    content = str(numbers["a"] + numbers["b"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


__all__ = ["SumHarness", "SumTaskset"]
