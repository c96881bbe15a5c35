"""The dialect of OpenAI's Responses API.

A request holds items instead of messages: an answer of the policy is a reasoning item, a message item and one item per
call. The dialect joins them into one message.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.agent_loop import AnswerForm
from agentrl.errors import shorten
from agentrl.gateway.chat_completions import PARALLEL, SAMPLING
from agentrl.gateway.custom_tools import CUSTOM_FIELDS, call_events, call_item, custom_call, custom_tool_schema
from agentrl.gateway.dialect import (
    BadRequest,
    ChatRequest,
    Event,
    Json,
    OpenAIDialect,
    Reply,
    ReplyAnswer,
    StreamingReply,
    ToolSchema,
    logprob_rows,
)
from agentrl.gateway.fields import (
    arguments,
    check_top_logprobs,
    image_of_url,
    is_given,
    positive_int,
    refuse,
    refuse_unknown,
    settings,
    take,
    take_optional,
)
from agentrl.gateway.forms import allowed_calls, chosen_tool, forced_call, required_form, schema_form, tool_schema
from agentrl.message import Content, ContentPart, Message, TextPart, ToolCall, system

LABELS = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier")
"""Texts without an effect on the answer."""
READ = (
    *("model", "input", "instructions", "previous_response_id", "store", "conversation", "prompt", "metadata"),
    *("tools", "tool_choice", "parallel_tool_calls", "max_tool_calls", "max_output_tokens", "temperature", "top_p"),
    *("stream", "stream_options", "text", "reasoning", "include", "truncation", "background", "top_logprobs"),
    *("client_metadata", "prompt_cache_options", "context_management", "background_options", "moderation"),
    *("access_programs", "image"),
)
TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")
CALLER_FIELDS = ("defer_loading", "async", "allowed_callers", "output_schema")
"""Fields of tools that say when and how they may be called."""
VERBOSITIES = ("low", "medium", "high")
LOGPROBS = "message.output_text.logprobs"
"""Value of ``include`` that requests log-probabilities."""

KINDS = {"reasoning": "reasoning", "message": "text"}
"""Parts of an answer by the type of their item."""
NO_ITEM: Json = {"type": "none"}
EMPTY = ReplyAnswer(text="", finish="stop")


class Responses(OpenAIDialect):
    """``POST /v1/responses``."""

    name = "responses"
    path = "/v1/responses"
    count_route = "/responses/input_tokens"

    def read(self, body: Mapping[str, Any], stored: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """Read a request.

        Its `extra` holds ``store``, True if the client may refer to the reply later, and ``history``: the messages
        without instructions. Both ``history`` and the answer are stored under the reply's id.
        """
        refuse_unknown(body, (*READ, *LABELS))
        _check_settings(body)
        tools, forced = _tools(body)
        text = take_optional(body, "text", dict, {})
        schema = schema_form(take_optional(text, "format", dict, {}, "text"), "text.format")
        history = _history(body, stored)
        instructions = take_optional(body, "instructions", str, "")
        sampling = settings(body, SAMPLING)
        store = take_optional(body, "store", bool, True)
        return ChatRequest(
            model=take(body, "model", str),
            messages=[system(instructions), *history] if instructions else history,
            tools=[] if chosen_tool(body.get("tool_choice"))[0] == "none" else tools,
            max_tokens=positive_int(body, "max_output_tokens"),
            stream=take_optional(body, "stream", bool, False),
            settings=sampling | _efforts(body),
            form=required_form(forced, schema, "text.format"),
            form_field="tool_choice" if forced else "text.format",
            single_call=not take_optional(body, PARALLEL, bool, True),
            logprobs=LOGPROBS in take_optional(body, "include", list, []),
            text_tools=[tool["name"] for tool in take_optional(body, "tools", list, []) if tool["type"] == "custom"],
            extra={
                "store": store,
                "history": history,
                "echo": {**_echo(body, tools), **{name: sampling.get(name) for name in SAMPLING}, "store": store},
            },
        )

    def read_count(self, body: Mapping[str, Any], stored: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """Read a request to count tokens, where ``model`` is optional."""
        return self.read(body if is_given(body, "model") else {**body, "model": ""}, stored)

    def write_count(self, tokens: int) -> Json:
        """Write the number of tokens of a prompt."""
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def write(self, request: ChatRequest, reply: Reply) -> Json:
        """Write a reply that is not streamed."""
        cut = reply.answer.finish == "length"
        status = "incomplete" if cut else "completed"
        return {
            "id": self.reply_id(reply),
            "object": "response",
            "created_at": reply.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": reply.model,
            "output": _output(request, reply, status),
            **request.extra["echo"],
            "usage": _usage(reply),
        }

    async def events(self, request: ChatRequest, streaming: StreamingReply) -> AsyncIterator[Event]:
        """Write a reply as numbered events: the initial response, the events of each item, the final response."""
        numbers = itertools.count()
        async for kind, data in self._events(request, streaming):
            yield kind, {"type": kind, "sequence_number": next(numbers), **data}

    async def _events(self, request: ChatRequest, streaming: StreamingReply) -> AsyncIterator[tuple[str, Json]]:
        initial = {
            **self.write(request, replace(streaming.head, answers=[EMPTY])),
            "status": "in_progress",
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        yield "response.created", {"response": initial}
        yield "response.in_progress", {"response": initial}
        index, item = -1, NO_ITEM
        async for kind, piece in streaming.parts():
            if kind != KINDS.get(item["type"]):
                for event in _part_end(item, index):
                    yield event
                index, item = index + 1, _part_item(kind, streaming.head)
                for event in _part_begin(item, index):
                    yield event
            item["content"][0]["text"] += piece
            yield _part_delta(item, index, piece)
        response = self.write(request, streaming.reply)
        for event in _part_end(NO_ITEM if item is NO_ITEM else response["output"][index], index):
            yield event
        for later in range(index + 1, len(response["output"])):
            for event in _item_events(response["output"][later], later):
                yield event
        yield f"response.{response['status']}", {"response": response}

    def reply_id(self, reply: Reply) -> str:
        """Return the id with its prefix."""
        return f"resp_{reply.id}"


def reply_referred_to(body: Mapping[str, Any]) -> str | None:
    """Return the id of a stored reply to which a request refers; ``None`` if it refers to none."""
    if isinstance(previous := body.get("previous_response_id"), str):
        return previous
    items = body.get("input")
    for item in items if isinstance(items, list) else []:
        if isinstance(item, dict) and item.get("type") == "item_reference" and "_" in str(item.get("id")):
            return f"resp_{str(item['id']).split('_')[1]}"
    return None


def _unsupported_error(field: str, value: Any, why: str) -> BadRequest:
    return BadRequest(f"{field} is not supported here: {why}; got {shorten(value)}", field=field, code="unsupported")


def _check_settings(body: Mapping[str, Any]) -> None:
    refuse(body, ("conversation",), "send the items, or previous_response_id")
    refuse(body, ("prompt",), "prompts are not stored here: send instructions and input")
    refuse(body, ("background", "background_options"), "wait for the reply, or stream it")
    refuse(body, ("moderation", "access_programs", "image"), "the policy has no such feature")
    refuse(body, ("max_tool_calls",), "the number of calls cannot be limited")
    check_top_logprobs(body)
    if body.get("truncation") not in (None, "disabled"):
        raise _unsupported_error("truncation", body["truncation"], "histories are not shortened")
    for value in take_optional(body, "include", list, []):
        if value not in ("reasoning.encrypted_content", LOGPROBS):
            raise _unsupported_error(
                "include", value, f"expected {LOGPROBS}, or reasoning.encrypted_content, which stays empty"
            )
    options = take_optional(body, "stream_options", dict, {})
    refuse_unknown(options, ("include_obfuscation",), "stream_options")
    take_optional(options, "include_obfuscation", bool, False, "stream_options")
    for name in LABELS:
        take_optional(body, name, str, "")
    take_optional(body, "client_metadata", dict, {})  # Codex's own: ids of its session and its turn
    take_optional(body, "prompt_cache_options", dict, {})
    for name, value in take_optional(body, "metadata", dict, {}).items():
        if not isinstance(value, str):
            raise BadRequest(f"metadata.{name} must be text: got {shorten(value)}", field=f"metadata.{name}")
    refuse_unknown(take_optional(body, "text", dict, {}), ("format", "verbosity"), "text")
    reasoning = take_optional(body, "reasoning", dict, {})
    refuse_unknown(reasoning, ("effort", "summary", "generate_summary", "context", "mode"), "reasoning")
    for name in reasoning:
        take_optional(reasoning, name, str, "", "reasoning")
    if reasoning.get("mode") not in (None, "standard"):
        raise _unsupported_error("reasoning.mode", reasoning["mode"], "expected standard")


def _efforts(body: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the client's settings for reasoning, verbosity and context management."""
    text, reasoning = take_optional(body, "text", dict, {}), take_optional(body, "reasoning", dict, {})
    efforts = {f"reasoning.{name}": reasoning.get(name) for name in ("effort", "context")}
    efforts["text.verbosity"] = text.get("verbosity")
    if edits := take_optional(body, "context_management", list, []):
        efforts["context_management"] = json.dumps(edits)
    if efforts["text.verbosity"] not in (None, *VERBOSITIES):
        raise BadRequest(
            f"text.verbosity must be low, medium or high: got {shorten(text['verbosity'])}", field="text.verbosity"
        )
    return {name: value for name, value in efforts.items() if value is not None}


def _tools(body: Mapping[str, Any]) -> tuple[Sequence[ToolSchema], AnswerForm | None]:
    """Return the tools of a request, even if it forbids calls, and the form of a forced or restricted call."""
    tools = []
    for path, tool in _objects(take_optional(body, "tools", list, []), "tools"):
        if tool.get("type") not in ("function", "custom"):
            raise _unsupported_error(f"{path}.type", tool.get("type"), "expected function or custom")
        is_custom = tool["type"] == "custom"
        refuse_unknown(tool, (*(CUSTOM_FIELDS if is_custom else TOOL_FIELDS), *CALLER_FIELDS), path)
        _check_callers(tool, path)
        tools.append(custom_tool_schema(tool, path) if is_custom else tool_schema(tool, path))
    kind, name = chosen_tool(body.get("tool_choice"))
    if kind == "allowed_tools":
        return tools, allowed_calls(body["tool_choice"], "tool_choice", tools, lambda tool, _: tool)
    return tools, forced_call(kind, name, tools, "tool_choice")


def _check_callers(tool: Json, path: str) -> None:
    """Refuse a tool that the policy could not call at once and directly; ``output_schema`` is only for programs."""
    for name in ("defer_loading", "async"):
        if take_optional(tool, name, bool, False, path):
            raise _unsupported_error(f"{path}.{name}", True, "the policy calls tools at once")
    if "direct" not in take_optional(tool, "allowed_callers", list, ["direct"], path):
        raise _unsupported_error(f"{path}.allowed_callers", tool["allowed_callers"], "the policy calls tools directly")
    take_optional(tool, "output_schema", dict, {}, path)


def _echo(body: Mapping[str, Any], tools: Sequence[ToolSchema]) -> Json:
    """Return the request's settings, with the defaults of missing ones, which the vendor repeats in the response."""
    text = take_optional(body, "text", dict, {})
    reasoning = take_optional(body, "reasoning", dict, {})
    return {
        "instructions": body.get("instructions"),
        "previous_response_id": body.get("previous_response_id"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": None,
        "metadata": take_optional(body, "metadata", dict, {}),
        "parallel_tool_calls": take_optional(body, "parallel_tool_calls", bool, True),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [
            sent if sent["type"] == "custom" else {"type": "function", **tool["function"], "strict": False}
            for sent, tool in zip(take_optional(body, "tools", list, []), tools, strict=True)
        ],
        "text": {
            "format": take_optional(text, "format", dict, {"type": "text"}),
            "verbosity": take_optional(text, "verbosity", str, "medium"),
        },
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "background": False,
        "service_tier": "default",
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": body.get("user"),
    }


def _history(body: Mapping[str, Any], stored: Mapping[str, Sequence[Message]]) -> Sequence[Message]:
    """Return the messages of an earlier reply and of the input, without instructions."""
    earlier: Sequence[Message] = ()
    if is_given(body, "previous_response_id"):
        name = take(body, "previous_response_id", str)
        if name not in stored:
            raise BadRequest(
                f"previous_response_id: no reply {shorten(name)} is stored in this session",
                field="previous_response_id",
                status=404,
                code="previous_response_not_found",
            )
        earlier = stored[name]
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    history = _Items(earlier, stored).read([] if items is None and earlier else items)
    if not history:
        raise BadRequest("input must contain at least one item", field="input")
    return history


class _Items:
    """Reader of items that keeps the names of calls for their results."""

    def __init__(self, earlier: Sequence[Message], stored: Mapping[str, Sequence[Message]]) -> None:
        self._messages = list(earlier)
        self._stored = stored
        self._names = {call.id: call.name for message in earlier for call in message.tool_calls}
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def read(self, items: Any) -> Sequence[Message]:
        for path, item in _objects(items, "input", "text or a list of items"):
            self._read_one(item, path)
        self._end_answer()
        return self._messages

    def _read_one(self, item: Json, path: str) -> None:
        kind = item.get("type")
        if kind is None:
            kind = "item_reference" if "id" in item and "role" not in item else "message"
        if kind == "message":
            self._message(item, path)
        elif kind == "function_call":
            self._call(item, path)
        elif kind == "custom_tool_call":
            self._add_call(custom_call(item, path))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._result(item, path)
        elif kind == "reasoning":
            self._begin_answer()
            self._reasoning.append(_reasoning(item, path))
        elif kind == "item_reference":
            self._reference(take(item, "id", str, path), path)
        else:
            expected = "message, reasoning, or function_call and custom_tool_call with their outputs"
            raise _unsupported_error(f"{path}.type", kind, f"expected {expected}")

    def _reference(self, name: str, path: str) -> None:
        """Read a reference to an item of a stored reply; see `_output` for the ids."""
        kind, reply, number = (*name.split("_"), "")[:3] if "_" in name else ("", "", "")
        answer = self._stored.get(f"resp_{reply}", [None])[-1]
        calls = {str(index): call for index, call in enumerate(answer.tool_calls)} if answer else {}
        if answer is not None and kind == "msg":
            self._begin_answer()
            self._texts.append(answer.text)
        elif answer is not None and kind == "rs":
            self._begin_answer()
            self._reasoning.append(answer.reasoning or "")
        elif kind in ("fc", "ctc") and number in calls:
            self._add_call(calls[number])
        else:
            where = f"{path}.id"
            text = f"{where}: no item {shorten(name)} is stored in this session; send the item itself"
            raise BadRequest(text, field=where, status=404, code="item_not_found")

    def _message(self, item: Json, path: str) -> None:
        role, where = item.get("role"), f"{path}.content"
        if role == "assistant":
            self._begin_answer()
            self._texts.append(_text(item.get("content"), where))
        elif role in ("system", "developer"):
            self._append(Message(role="system", content=_text(item.get("content"), where)))
        elif role == "user":
            self._append(Message(role="user", content=_content(item.get("content"), where)))
        else:
            raise BadRequest(
                f"{path}.role must be user, assistant, system or developer: got {shorten(role)}",
                field=f"{path}.role",
            )

    def _call(self, item: Json, path: str) -> None:
        call = ToolCall(
            name=take(item, "name", str, path),
            arguments=arguments(item.get("arguments"), f"{path}.arguments"),
            id=take(item, "call_id", str, path),
        )
        self._add_call(call)

    def _add_call(self, call: ToolCall) -> None:
        self._names[call.id] = call.name
        self._calls.append(call)

    def _result(self, item: Json, path: str) -> None:
        call_id = take(item, "call_id", str, path)
        if call_id not in self._names:
            where = f"{path}.call_id"
            raise BadRequest(f"{where}: no earlier call has the id {shorten(call_id)}", field=where)
        content = _content(item["output"], f"{path}.output") if is_given(item, "output") else ""
        self._append(Message(role="tool", content=content, tool_call_id=call_id, name=self._names[call_id]))

    def _append(self, message: Message) -> None:
        self._end_answer()
        self._messages.append(message)

    def _begin_answer(self) -> None:
        """End the previous answer, unless this item may still belong to it.

        An item after a text begins another answer. An item after a call does not: the call's result would come first.
        """
        if self._texts and not self._calls:
            self._end_answer()

    def _end_answer(self) -> None:
        reasoning = "\n\n".join(text for text in self._reasoning if text)
        if self._texts or self._calls or reasoning:
            content, calls = "".join(self._texts), tuple(self._calls)
            message = Message(role="assistant", content=content, tool_calls=calls, reasoning=reasoning or None)
            self._messages.append(message)
        self._reasoning, self._texts, self._calls = [], [], []


def _objects(value: Any, path: str, kind: str = "a list") -> Iterator[tuple[str, Json]]:
    """Yield the objects of a list, each with its path."""
    if not isinstance(value, list):
        raise BadRequest(f"{path} must be {kind}: got {shorten(value)}", field=path)
    for index, row in enumerate(value):
        where = f"{path}.{index}"
        if not isinstance(row, dict):
            raise BadRequest(f"{where} must be an object: got {shorten(row)}", field=where)
        yield where, row


def _reasoning(item: Json, path: str) -> str:
    """Return the thinking of an item, or its summary if it has no content."""
    for name in ("content", "summary"):
        if parts := take_optional(item, name, list, [], path):
            return "\n\n".join(take(part, "text", str, where) for where, part in _objects(parts, f"{path}.{name}"))
    return ""


def _content(value: Any, path: str) -> Content:
    if isinstance(value, str):
        return value
    parts = [_part(part, where) for where, part in _objects(value, path, "text or a list of parts")]
    if all(isinstance(part, TextPart) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, TextPart))
    return tuple(parts)


def _text(value: Any, path: str) -> str:
    content = _content(value, path)
    if not isinstance(content, str):
        raise _unsupported_error(path, value, "only user messages and results of calls may contain images")
    return content


def _part(part: Json, path: str) -> ContentPart:
    kind = part.get("type")
    if kind in ("input_text", "output_text"):
        return TextPart(text=take(part, "text", str, path))
    if kind == "refusal":
        return TextPart(text=take(part, "refusal", str, path))
    if kind == "input_image":
        return image_of_url(take(part, "image_url", str, path), f"{path}.image_url")
    raise _unsupported_error(f"{path}.type", kind, "expected text or an image")


def _part_item(kind: str, reply: Reply, text: str = "") -> Json:
    """Return the item that holds an answer's thinking or text."""
    if kind == "reasoning":
        thinking = {"type": "reasoning_text", "text": text}
        return {
            "id": f"rs_{reply.id}",
            "type": "reasoning",
            "summary": [],
            "content": [thinking],
            "status": "completed",
        }
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    message = {"type": "message", "role": "assistant", "content": [part], "status": "completed"}
    return {"id": f"msg_{reply.id}", **message}


def _output(request: ChatRequest, reply: Reply, status: str) -> Sequence[Json]:
    """Return the items of an answer; the last has the status of the response."""
    answer, items = reply.answer, []
    if answer.reasoning:
        items.append(_part_item("reasoning", reply, answer.reasoning))
    if answer.text or not answer.calls:
        items.append(_part_item("text", reply, answer.text))
        items[-1]["content"][0]["logprobs"] = logprob_rows(answer)
    for index, call in enumerate(answer.calls):
        items.append(call_item(call, reply.id, index, is_custom=call.name in request.text_tools))
    return [*items[:-1], {**items[-1], "status": status}]


def _usage(reply: Reply) -> Json:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": reply.answer_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.answer_tokens,
    }


def _item_events(item: Json, index: int) -> Iterator[tuple[str, Json]]:
    """Yield the events of a complete item."""
    if item["type"] not in ("message", "reasoning"):
        yield from call_events(item, index)
        return
    yield from _part_begin(item, index)
    if text := item["content"][0]["text"]:
        yield _part_delta(item, index, text)
    yield from _part_end(item, index)


def _part_begin(item: Json, index: int) -> Iterator[tuple[str, Json]]:
    """Yield the events that open a message or thinking item; its content has one part."""
    added = {**item, "status": "in_progress", "content": []}
    yield "response.output_item.added", {"output_index": index, "item": added}
    yield "response.content_part.added", {**_location(item, index), "part": {**item["content"][0], "text": ""}}


def _part_delta(item: Json, index: int, piece: str) -> tuple[str, Json]:
    part = item["content"][0]
    return f"response.{part['type']}.delta", {**_location(item, index), "delta": piece, **_logprobs(part)}


def _part_end(item: Json, index: int) -> Iterator[tuple[str, Json]]:
    """Yield the events that close a message or thinking item."""
    if item is NO_ITEM:
        return
    part = item["content"][0]
    yield f"response.{part['type']}.done", {**_location(item, index), "text": part["text"], **_logprobs(part)}
    yield "response.content_part.done", {**_location(item, index), "part": part}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _location(item: Json, index: int) -> Json:
    return {"item_id": item["id"], "output_index": index, "content_index": 0}


def _logprobs(part: Json) -> Json:
    """Return the field for log-probabilities in events of a text; only the last event has values."""
    return {"logprobs": part["logprobs"]} if "logprobs" in part else {}
