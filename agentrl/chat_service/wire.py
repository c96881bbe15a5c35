"""The chat format of OpenAI-compatible services: requests out, answers in; no I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import EngineError, UsageError
from agentrl.message import Content, ImagePart, Message, TextPart, ToolCall
from agentrl.policy import ChatAnswer, SamplingParams, StopReason

_STOP_REASONS = {"stop": StopReason.STOP, "tool_calls": StopReason.STOP, "length": StopReason.LENGTH}


def encode_request(
    model: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
) -> dict[str, Any]:
    """The body of a request to ``/chat/completions``.

    Raises:
        UsageError: a setting that such services do not have.
    """
    for name in ("stop_token_ids", "top_k", "min_p"):
        if value := getattr(params, name):
            raise UsageError(f"an OpenAI-compatible service takes no {name}", got=value, expected="none")
    body: dict[str, Any] = {
        "model": model,
        "messages": [_encode_message(message) for message in messages],
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_tokens": params.max_tokens,
    }
    if tools:
        body["tools"] = [dict(tool) for tool in tools]
    if params.seed is not None:
        body["seed"] = params.seed
    return body


def _encode_message(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": _encode_content(message.content)}
    if message.tool_calls:
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    return body


def _encode_content(content: Content) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_encode_part(part) for part in content]


def _encode_part(part: TextPart | ImagePart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": {"url": part.data_url}}


def decode_answer(text: str) -> ChatAnswer:
    """The answer in the body of a successful response.

    Raises:
        EngineError: the body is not a chat completion.
    """
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise EngineError(
            "the service answered something that is not JSON",
            got=repr(text[:200]),
            hint="check that the url is the base address of the API, up to and with /v1",
        ) from error
    try:
        choice = body["choices"][0]
        said, finish = choice["message"], choice.get("finish_reason")
        usage = body.get("usage") or {}
        calls, problems = _decode_calls(said.get("tool_calls") or [])
        return ChatAnswer(
            message=Message(
                role="assistant",
                content=said.get("content") or "",
                tool_calls=calls,
                reasoning=said.get("reasoning_content") or said.get("reasoning"),
            ),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            answer_tokens=int(usage.get("completion_tokens") or 0),
            stop_reason=_STOP_REASONS.get(finish, StopReason.STOP),
            problems=problems,
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise EngineError("the service's answer is not a chat completion", got=repr(text[:200])) from error


def _decode_calls(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    calls: list[ToolCall] = []
    problems: list[str] = []
    for row in rows:
        name, written = row["function"]["name"], row["function"].get("arguments") or "{}"
        try:
            arguments = json.loads(written)
        except json.JSONDecodeError as error:
            problems.append(f"the arguments of the call of {name} are not JSON: {error}")
            continue
        except RecursionError:
            problems.append(f"the arguments of the call of {name} are nested too deeply")
            continue
        if isinstance(arguments, dict):
            calls.append(ToolCall(name=name, arguments=arguments, id=row.get("id") or ""))
        else:
            problems.append(f"the arguments of the call of {name} are not a JSON object: {written[:100]}")
    return tuple(calls), tuple(problems)


def error_message(text: str) -> str:
    """What the service says about an error: the message in its JSON, or the start of the text."""
    try:
        error = json.loads(text)["error"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return text[:200]
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)[:500]
