"""Serves an environment with openreward's own server, in its environment: prints the port."""

import asyncio
import os
import socket

os.environ.setdefault("OTEL_SDK_DISABLED", "true")

import uvicorn
from openreward.environments import Environment, ImageBlock, Server, TextBlock, ToolOutput, terminal, tool
from pydantic import BaseModel

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class Number(BaseModel, extra="forbid"):
    number: int


class Counter(Environment):
    """Count up to the number of the task."""

    @classmethod
    def list_splits(cls):
        return ["train", "test"]

    @classmethod
    def list_tasks(cls, split):
        return [{"goal": goal} for goal in (range(1, 6) if split == "train" else range(6, 8))]

    def __init__(self, task_spec, secrets={}):  # noqa: B006
        super().__init__(task_spec)
        self.goal, self.count = task_spec["goal"], 0

    async def setup(self):
        await asyncio.sleep(0.05)

    def get_prompt(self):
        return [TextBlock(text=f"Count to {self.goal}.")]

    @tool
    async def add(self, params: Number) -> ToolOutput:
        """Add a number to the count."""
        self.count += params.number
        done = self.count >= self.goal
        return ToolOutput(
            blocks=[TextBlock(text=f"The count is {self.count}. " + "x" * 5000 + "\n: no comment\n")],
            reward=float(self.count == self.goal) if done else None,
            finished=done,
        )

    @tool
    async def fail(self) -> ToolOutput:
        """Fail."""
        raise ValueError("ouch")


class Answer(BaseModel, extra="forbid"):
    answer: str


class Quiz(Environment):
    """Answer in words."""

    @classmethod
    def list_splits(cls):
        return ["questions"]

    @classmethod
    def list_tasks(cls, split):
        return [{}]

    def get_prompt(self):
        return [TextBlock(text="Which colour is it?"), ImageBlock(data=PIXEL, mimeType="image/png")]

    @terminal
    @tool
    async def answer(self, params: Answer) -> ToolOutput:
        """Answer."""
        return ToolOutput(blocks=[TextBlock(text="Thank you.")], reward=float("red" in params.answer), finished=True)


listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
application = Server([Counter, Quiz]).app
uvicorn.Server(uvicorn.Config(application, log_level="error")).run(sockets=[listening])
