"""Requests and answers of the Responses dialect, for its tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from agentrl.gateway.dialect import ChatRequest, Reply, ReplyAnswer
from agentrl.gateway.responses import Responses
from agentrl.message import Message, ToolCall

DIALECT = Responses()
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

DIALECT = Responses()
NO_REPLIES: Mapping[str, Sequence[Message]] = {}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "Say it.", "parameters": PARAMETERS, "strict": False}
CALLS = (
    ToolCall(name="weather", arguments={"city": "Zürich", "days": [1, 2]}, id="call_a"),
    ToolCall(name="weather", arguments={}, id="call_b"),
)
TEXT = ReplyAnswer(text="It rains in Zürich. " * 5, finish="stop", tokens=30)


def read(stored: Mapping[str, Sequence[Message]] = NO_REPLIES, **fields: Any) -> ChatRequest:
    return DIALECT.read({"model": "policy", "input": "Hi", **fields}, stored)


def reply(answer: ReplyAnswer, name: str = "7f") -> Reply:
    return Reply(id=name, created=1700000000, model="policy", answers=[answer], prompt_tokens=11, cached_tokens=4)


def call_item(call_id: str, city: str = "Rome") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": json.dumps({"city": city})}


def result_item(call_id: str, output: Any = "rain") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def assistant(text: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=text, tool_calls=calls, reasoning=reasoning)
