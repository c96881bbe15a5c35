"""The dialect of Anthropic's Messages API."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from agentrl.agent_loop import AnswerForm
from agentrl.errors import shorten
from agentrl.gateway.dialect import (
    BadRequest,
    ChatRequest,
    Dialect,
    Event,
    Finish,
    Json,
    Reply,
    ReplyAnswer,
    StreamingReply,
    ToolSchema,
)
from agentrl.gateway.fields import (
    arguments,
    image,
    is_given,
    pieces,
    positive_int,
    refuse,
    refuse_unknown,
    settings,
    stop_texts,
    take,
    take_optional,
)
from agentrl.gateway.forms import forced_call, schema_form, tool_schema
from agentrl.message import Content, ContentPart, Message, TextPart, ToolCall

STOP_REASONS: Mapping[Finish, str] = {
    "stop": "end_turn",
    "stop_text": "stop_sequence",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
READ = (
    *("model", "messages", "max_tokens", "system", "tools", "tool_choice", "stop_sequences", "stream"),
    *("temperature", "top_p", "top_k", "mcp_servers", "container", "output_format", "output_config"),
    *("thread", "thinking", "context_management", "compaction"),
)
IGNORED = (
    *("metadata", "service_tier", "inference_geo", "cache_control", "betas", "speed", "diagnostics", "billing_policy"),
    *("user_profile_id", "workspace_id", "fallbacks", "fallback_credit_token"),
)
"""Fields without an effect on the answer."""
SINGLE = "disable_parallel_tool_use"
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""A line that Claude Code writes before its system prompt; it contains a hash that differs in every request."""
SIGNATURE = "agentrl"
"""Placeholder for the vendor's signature of a thought; signatures in requests are not checked."""
SAMPLING = {"temperature": (0.0, 1.0), "top_p": (0.0, 1.0), "top_k": (0.0, 1_000_000.0)}
"""Sampling settings with their bounds."""
NO_THREADS = "thread_unsupported_request"
"""The vendor's error code of a server that does not store histories; its tool runner then sends whole histories."""
EMPTY_BLOCKS: Mapping[str, Json] = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class AnthropicMessages(Dialect):
    """``POST /v1/messages``."""

    name = "anthropic"
    path = "/v1/messages"
    count_route = "/messages/count_tokens"
    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def read(self, body: Mapping[str, Any], stored: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """Read a request; this dialect does not use `stored`."""
        if not is_given(body, "max_tokens"):
            raise BadRequest("max_tokens is missing", field="max_tokens")
        if body["max_tokens"] == 0:
            text = "max_tokens of 0: the engine caches prompts by itself, and no request warms its cache up"
            raise BadRequest(text, field="max_tokens", code="unsupported", is_offer=True)
        return self.read_count(body, stored)

    def read_count(self, body: Mapping[str, Any], stored: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """Read a request to count tokens, where ``max_tokens`` is optional."""
        refuse_unknown(body, (*READ, *IGNORED))
        refuse(body, ("mcp_servers", "container"), "the policy cannot use them")
        refuse(body, ("compaction",), "histories are not summarized here")
        if body.get("thread"):
            raise BadRequest(
                "thread: histories are not stored here; send them whole", field="thread", code=NO_THREADS, is_offer=True
            )
        tools, forced = _tools(body)
        config = take_optional(body, "output_config", dict, {})
        refuse_unknown(config, ("format", "effort", "task_budget"), "output_config")
        path = "output_config.format" if is_given(config, "format") else "output_format"
        form = config["format"] if is_given(config, "format") else take_optional(body, "output_format", dict, {})
        messages = _TurnReader().read(take(body, "messages", list))
        return ChatRequest(
            model=take(body, "model", str),
            messages=[*_system(body), *messages],
            tools=tools,
            max_tokens=positive_int(body, "max_tokens"),
            stop=stop_texts(body.get("stop_sequences"), "stop_sequences"),
            stream=take_optional(body, "stream", bool, False),
            settings=settings(body, SAMPLING) | _efforts(body, config),
            form=forced or schema_form(take({path: form}, path, dict), path),
            form_field="tool_choice" if forced else path,
            single_call=take_optional(take_optional(body, "tool_choice", dict, {}), SINGLE, bool, False, "tool_choice"),
        )

    def write(self, request: ChatRequest, reply: Reply) -> Json:
        """Write a reply that is not streamed."""
        answer = reply.answer
        return {
            **self._head(reply),
            "content": _blocks(answer),
            "stop_reason": STOP_REASONS[answer.finish],
            "stop_sequence": answer.stop_text,
            "usage": {**_usage(reply), "output_tokens": reply.answer_tokens},
        }

    async def events(self, request: ChatRequest, streaming: StreamingReply) -> AsyncIterator[Event]:
        """Write a reply block by block."""
        head = streaming.head
        message = {**self._head(head), "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**message, "usage": {**_usage(head), "output_tokens": 0}})
        yield _event("ping")
        open_kind, index = None, -1
        async for kind, piece in streaming.parts():
            if kind != open_kind:
                for event in _block_end(open_kind, index):
                    yield event
                open_kind, index = kind, index + 1
                yield _event("content_block_start", index=index, content_block=EMPTY_BLOCKS[kind])
            yield _event("content_block_delta", index=index, delta=_delta(kind, piece))
        for event in _block_end(open_kind, index):
            yield event
        reply, answer = streaming.reply, streaming.reply.answer
        for at, call in enumerate(answer.calls, start=index + 1):
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield _event("content_block_start", index=at, content_block=block)
            for piece in pieces(json.dumps(dict(call.arguments))):
                delta = {"type": "input_json_delta", "partial_json": piece}
                yield _event("content_block_delta", index=at, delta=delta)
            yield _event("content_block_stop", index=at)
        ended = {"stop_reason": STOP_REASONS[answer.finish], "stop_sequence": answer.stop_text}
        yield _event("message_delta", delta=ended, usage={**_usage(reply), "output_tokens": reply.answer_tokens})
        yield _event("message_stop")

    def error(self, status: int, message: str, *, field: str | None = None, code: str | None = None) -> Json:
        """Write an error; the format has no key for the field, so the message names it."""
        kind = "api_error" if status >= 500 else "invalid_request_error"
        error: Json = {"type": ERROR_TYPES.get(status, kind), "message": message}
        if code == NO_THREADS:
            error["details"] = {"error_code": code, "unsupported": [field]}
        return {"type": "error", "error": error}

    def reply_id(self, reply: Reply) -> str:
        """Return the id with its prefix."""
        return f"msg_{reply.id}"

    def _head(self, reply: Reply) -> Json:
        return {"id": self.reply_id(reply), "type": "message", "role": "assistant", "model": reply.model}


def _event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind, **data}


def _usage(reply: Reply) -> Json:
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_read_input_tokens": reply.cached_tokens,
        "cache_creation_input_tokens": 0,
    }


def _blocks(answer: ReplyAnswer) -> list[Json]:
    blocks: list[Json] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    calls = [{"type": "tool_use", "id": c.id, "name": c.name, "input": dict(c.arguments)} for c in answer.calls]
    return blocks + calls


def _delta(kind: str, piece: str) -> Json:
    if kind == "reasoning":
        return {"type": "thinking_delta", "thinking": piece}
    return {"type": "text_delta", "text": piece}


def _block_end(kind: str | None, index: int) -> Iterator[Event]:
    if kind == "reasoning":
        yield _event("content_block_delta", index=index, delta={"type": "signature_delta", "signature": SIGNATURE})
    if kind is not None:
        yield _event("content_block_stop", index=index)


def _efforts(body: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the client's settings for effort, thinking and context management."""
    efforts = {"output_config.effort": take_optional(config, "effort", str, "", "output_config")}
    if is_given(config, "task_budget"):
        efforts["output_config.task_budget"] = json.dumps(take(config, "task_budget", dict, "output_config"))
    for name in ("thinking", "context_management"):
        if is_given(body, name):
            efforts[name] = json.dumps(take(body, name, dict))
    return {name: value for name, value in efforts.items() if value}


def _system(body: Mapping[str, Any]) -> list[Message]:
    """Return the system prompt without the line for the vendor's billing, so that turns share their prompt."""
    content = body.get("system")
    if not content:
        return []
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadRequest("system must be text or a list of blocks", field="system")
    texts = []
    for index, block in enumerate(content):
        where = f"system.{index}"
        if not isinstance(block, dict) or block.get("type") != "text":
            raise BadRequest(f"{where}.type must be text", field=f"{where}.type", code="unsupported")
        texts.append(BILLING.sub("", take(block, "text", str, where)))
    text = "\n".join(filter(None, texts))
    return [Message(role="system", content=text)] if text else []


def _tools(body: Mapping[str, Any]) -> tuple[Sequence[ToolSchema], AnswerForm | None]:
    """Return the offered tools (none if the request forbids calls) and the form of a forced call."""
    tools = []
    for index, tool in enumerate(take_optional(body, "tools", list, [])):
        where = f"tools.{index}"
        if not isinstance(tool, dict):
            raise BadRequest(f"{where} must be an object", field=where)
        if tool.get("type") not in (None, "custom"):
            raise BadRequest(
                f"{where}.type must be custom: tools are described by a name and input_schema: got {tool['type']!r}",
                field=f"{where}.type",
                code="unsupported",
            )
        take(tool, "input_schema", dict, where)
        tools.append(tool_schema(tool, where, parameters="input_schema"))
    choice = take_optional(body, "tool_choice", dict, {})
    kind = take_optional(choice, "type", str, "auto", "tool_choice")
    return [] if kind == "none" else tools, forced_call(kind, choice.get("name"), tools, "tool_choice")


class _TurnReader:
    """Reader of turns that keeps the names of calls for their results."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def read(self, turns: Sequence[Any]) -> Sequence[Message]:
        if not turns:
            raise BadRequest("messages must contain at least one message", field="messages")
        messages: list[Message] = []
        for index, turn in enumerate(turns):
            path = f"messages.{index}"
            if not isinstance(turn, dict):
                raise BadRequest(f"{path} must be an object", field=path)
            role = turn.get("role")
            if role == "user":
                messages += self._user(turn, path)
            elif role == "assistant":
                messages.append(self._assistant(turn, path))
            elif role == "system":
                messages.append(Message(role="system", content=_content(_block_list(turn, path))))
            else:
                raise BadRequest(f"{path}.role must be user or assistant: got {role!r}", field=f"{path}.role")
        if not messages:
            raise BadRequest("messages must contain at least one block", field="messages")
        if messages[-1].role == "assistant":
            raise BadRequest(
                "messages ends with an assistant turn: prefilled answers are not supported", field="messages"
            )
        return messages

    def _user(self, turn: Mapping[str, Any], path: str) -> Iterator[Message]:
        rest = []
        for where, block in _block_list(turn, path):
            if block.get("type") != "tool_result":
                rest.append((where, block))
                continue
            call_id = take(block, "tool_use_id", str, where)
            content = _content(_block_list(block, where)) if is_given(block, "content") else ""
            if take_optional(block, "is_error", bool, False, where):
                content = f"Error: {content}" if isinstance(content, str) else (TextPart(text="Error:"), *content)
            yield Message(role="tool", content=content, tool_call_id=call_id, name=self._names.get(call_id))
        if rest:
            yield Message(role="user", content=_content(rest))

    def _assistant(self, turn: Mapping[str, Any], path: str) -> Message:
        calls, texts, thoughts = [], [], []
        for where, block in _block_list(turn, path):
            kind = block.get("type")
            if kind == "text":
                texts.append(take(block, "text", str, where))
            elif kind == "thinking":
                thoughts.append(take(block, "thinking", str, where))
            elif kind == "tool_use":
                call_id, name = take(block, "id", str, where), take(block, "name", str, where)
                self._names[call_id] = name
                read = arguments(block.get("input"), f"{where}.input")
                calls.append(ToolCall(name=name, arguments=read, id=call_id))
            elif kind != "redacted_thinking":
                raise BadRequest(
                    f"{where}.type must be text, thinking or tool_use: got {kind!r}",
                    field=f"{where}.type",
                    code="unsupported",
                )
        reasoning = "\n".join(thoughts) if thoughts else None
        return Message(role="assistant", content="".join(texts), tool_calls=tuple(calls), reasoning=reasoning)


def _block_list(turn: Mapping[str, Any], path: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the blocks of a turn's content, each with its path; a text becomes one block."""
    content, where = turn.get("content"), f"{path}.content"
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be text or a list of blocks", field=where)
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise BadRequest(f"{where}.{index} must be an object", field=f"{where}.{index}")
    return [(f"{where}.{index}", block) for index, block in enumerate(content)]


def _content(blocks: Sequence[tuple[str, Mapping[str, Any]]]) -> Content:
    parts = [part for where, block in blocks for part in _parts(block, where)]
    if all(isinstance(part, TextPart) for part in parts):
        return "\n".join(part.text for part in parts if isinstance(part, TextPart) and part.text)
    return tuple(parts)


def _parts(block: Mapping[str, Any], path: str) -> Sequence[ContentPart]:
    kind = block.get("type")
    if kind == "text":
        return [TextPart(text=take(block, "text", str, path))]
    if kind == "image":
        source, where = take(block, "source", dict, path), f"{path}.source"
        if source.get("type") != "base64":
            raise BadRequest(
                f"{where}.type must be base64: URLs are not fetched", field=f"{where}.type", code="unsupported"
            )
        return [image(take(source, "data", str, where), take(source, "media_type", str, where), f"{where}.data")]
    if kind == "document":
        return [*_labels(block, ("title", "context"), path), *_document(take(block, "source", dict, path), path)]
    if kind == "search_result":
        found = [part for where, one in _block_list(block, path) for part in _parts(one, where)]
        return [*_labels(block, ("title", "source"), path), *found]
    if kind == "tool_reference":  # the tool itself is among the request's tools
        return [TextPart(text=f"Tool: {take(block, 'tool_name', str, path)}")]
    expected = "text, image, document, search_result or tool_reference"
    raise BadRequest(f"{path}.type must be {expected}: got {kind!r}", field=f"{path}.type", code="unsupported")


def _labels(block: Mapping[str, Any], names: Sequence[str], path: str) -> Sequence[TextPart]:
    """Return the texts that describe a document or a search result; citations of it cannot be requested."""
    if take_optional(take_optional(block, "citations", dict, {}, path), "enabled", bool, False, f"{path}.citations"):
        raise BadRequest(
            f"{path}.citations is not supported here: the policy does not cite",
            field=f"{path}.citations",
            code="unsupported",
        )
    return [TextPart(text=text) for name in names if (text := take_optional(block, name, str, "", path))]


def _document(source: Mapping[str, Any], path: str) -> Sequence[ContentPart]:
    """Return the parts of a document that is text, or a list of blocks."""
    where, kind = f"{path}.source", source.get("type")
    if kind == "text":
        return [TextPart(text=take(source, "data", str, where))]
    if kind == "content":
        return [part for place, one in _block_list(source, where) for part in _parts(one, place)]
    why = {
        "base64": f"the policy cannot read {shorten(source.get('media_type'))}: send the document's text",
        "url": "URLs are not fetched",
        "file": "files are not stored here: send the document's text",
    }.get(str(kind), f"got {shorten(kind)}")
    raise BadRequest(f"{where}.type must be text or content: {why}", field=f"{where}.type", code="unsupported")
