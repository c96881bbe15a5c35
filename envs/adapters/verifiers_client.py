"""Client that replaces the model in an environment of `verifiers`, and messages as text."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from .verifiers_data import EXTRA

Messages: TypeAlias = Sequence[Any]


@functools.cache
def client_type() -> Any:
    """Return the class of a verifiers client whose answers come from a queue."""
    types = EXTRA.load("verifiers.types")

    class PolicyClient(EXTRA.load("verifiers.clients").Client):  # type: ignore[misc]
        def __init__(self, prompts: asyncio.Queue[Messages], answers: asyncio.Queue[str]) -> None:
            super().__init__(None)
            self.prompts, self.answers = prompts, answers

        async def get_response(self, prompt: Messages, model: str, *_args: Any, **_options: Any) -> Any:
            await self.prompts.put(prompt)
            answer = await self.answers.get()
            calls = [types.ToolCall(id=f"call-{i}", **call) for i, call in enumerate(read_calls(answer))]
            message = types.ResponseMessage(
                content=None if calls else answer,
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return types.Response(id="", created=0, model=model, message=message)

    PolicyClient.__abstractmethods__ = frozenset()  # these build requests, which this client never sends
    return PolicyClient


def read_calls(answer: str) -> list[dict[str, str]]:
    """Return the tool calls of an answer, with their arguments as JSON; none if the answer is not only calls.

    >>> read_calls('{"name": "add", "arguments": {"a": 1}}'), read_calls('{"name": "add"'), read_calls("[1]")
    ([{'name': 'add', 'arguments': '{"a": 1}'}], [], [])
    """
    try:
        read = json.loads(answer)
    except ValueError:
        return []
    calls = read if isinstance(read, list) else [read]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return []
    return [{"name": call["name"], "arguments": json.dumps(call.get("arguments") or {})} for call in calls]


def tool_lines(environment: Any) -> str:
    """Describe the tools and how to call them; empty without tools."""
    tools = getattr(environment, "tool_defs", None) or ()
    lines = [f"- {tool.name}: {tool.description.strip()} Parameters: {json.dumps(tool.parameters)}" for tool in tools]
    how = 'A call is a JSON object and nothing else: {"name": "…", "arguments": {…}}'
    return "\n".join(["\n\nYou can call these tools:", *lines, how]) if lines else ""


def content_of(message: Any) -> str:
    """Return the text of a message, without other parts."""
    content = field_of(message, "content")
    if isinstance(content, list):
        return "".join(str(field_of(part, "text") or "") for part in content)
    return str(content or "")


def field_of(message: Any, name: str) -> Any:
    """Return a field of a message, which is a dictionary or an object."""
    return message.get(name) if isinstance(message, dict) else getattr(message, name, None)
