"""The dialect of OpenAI's Chat Completions API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from agentrl.agent_loop import AnswerForm
from agentrl.errors import shorten
from agentrl.gateway.custom_tools import CUSTOM, CUSTOM_FIELDS, custom_tool_schema, nested_custom_call
from agentrl.gateway.dialect import (
    TEXT_ARGUMENT,
    BadRequest,
    ChatRequest,
    Event,
    Finish,
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
    participant,
    pieces,
    positive_int,
    refuse,
    refuse_unknown,
    settings,
    stop_texts,
    take,
    take_optional,
)
from agentrl.gateway.forms import allowed_calls, chosen_tool, forced_call, required_form, schema_form, tool_schema
from agentrl.message import Content, ContentPart, Message, TextPart, ToolCall

FINISH: Mapping[Finish, str] = {"stop": "stop", "stop_text": "stop", "length": "length", "tool_calls": "tool_calls"}
CALL_TEXTS = {"function": "arguments", CUSTOM: "input"}
"""Names of the texts of calls, by the type of the tool."""
DELTAS = {"reasoning": "reasoning_content", "text": "content"}
MAX_ANSWERS = 128
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
)
"""Fields without an effect on the answer."""
READ = (
    *(
        "model",
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "max_tokens",
        "max_completion_tokens",
        "stop",
    ),
    *("n", "stream", "stream_options", "temperature", "top_p", "response_format", "reasoning_effort", "verbosity"),
    *("functions", "function_call", "logprobs", "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty"),
    *("seed", "modalities", "audio", "prediction", "web_search_options", "moderation"),
)
THINKING_SETTINGS = ("reasoning", "thinking", "enable_thinking", "include_reasoning", "chat_template_kwargs")
"""Other services' fields that switch the thinking on or off; the run decides."""
TEMPLATE_SETTINGS = ("enable_thinking", "thinking", "preserve_thinking", "clear_thinking", "reasoning_effort")
"""Variables of chat templates in ``chat_template_kwargs`` that do the same."""
TOKENS = ("return_token_ids", "return_prompt_token_ids", "prompt_logprobs")
DEFAULTS: Mapping[str, object] = {
    "repetition_penalty": 1,
    "length_penalty": 1,
    "best_of": 1,
    "use_beam_search": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "echo": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "transforms": [],
}
"""Fields of inference servers and OpenRouter of which only the default has no effect on the answer."""
ROUTING = ("usage", "provider", "route", "models", "priority", "cache_salt", "request_id")
"""Fields of OpenRouter and inference servers that choose or report who answers."""
OTHER_SERVICES = (*THINKING_SETTINGS, *TOKENS, *DEFAULTS, *ROUTING, "top_k", "min_p")
"""Fields of other services that clients send to each server."""
THOUGHTS = ("reasoning", "thinking", "reasoning_content")
"""Types of parts of an answer that hold its thinking."""
PARALLEL = "parallel_tool_calls"
SAMPLING = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0)}
"""Sampling settings of both OpenAI dialects, with their bounds."""
OTHER_SAMPLING = {"top_k": (-1.0, 1_000_000.0), "min_p": (0.0, 1.0)}
"""Sampling settings of inference servers, with their bounds."""


class ChatCompletions(OpenAIDialect):
    """``POST /v1/chat/completions``."""

    name = "chat"
    path = "/v1/chat/completions"

    def read(self, body: Mapping[str, Any], stored: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """Read a request; this dialect does not use `stored`."""
        refuse_unknown(body, (*READ, *IGNORED, *OTHER_SERVICES))
        refuse(body, ("functions", "function_call"), "use tools and tool_choice")
        check_top_logprobs(body)
        sampling_why = "the run sets the sampling of its policy"
        penalties = ("presence_penalty", "frequency_penalty")
        refuse(body, ("logit_bias", *penalties), sampling_why)
        for name, default in DEFAULTS.items():
            if is_given(body, name) and body[name] != default:
                only = f"{name} is accepted only with its default, {json.dumps(default)}"
                raise BadRequest(f"{only}: got {shorten(body[name])}", field=name, code="unsupported")
        refuse(body, ("audio", "prediction", "web_search_options", "moderation"), "the policy has no such feature")
        refuse(body, TOKENS, "the run records the tokens itself")
        if body.get("modalities") not in (None, ["text"]):
            raise BadRequest("modalities must be ['text']", field="modalities", code="unsupported")
        tools, forced = _tools(body)
        wanted = take_optional(body, "response_format", dict, {})
        schema = schema_form(wanted, "response_format", within="json_schema")
        limits = [limit for name in ("max_completion_tokens", "max_tokens") if (limit := positive_int(body, name))]
        count = positive_int(body, "n") or 1
        if count > MAX_ANSWERS:
            raise BadRequest(f"n must be at most {MAX_ANSWERS}: got {count}", field="n")
        options = take_optional(body, "stream_options", dict, {})
        return ChatRequest(
            model=take(body, "model", str),
            messages=_MessageReader().read(take(body, "messages", list)),
            tools=tools,
            max_tokens=min(limits, default=None),
            stop=stop_texts(body.get("stop"), "stop"),
            count=count,
            stream=take_optional(body, "stream", bool, False),
            settings=settings(body, {**SAMPLING, **OTHER_SAMPLING}, ("reasoning_effort", "verbosity"))
            | _thinking(body),
            form=required_form(forced, schema, "response_format"),
            form_field="tool_choice" if forced else "response_format",
            single_call=not take_optional(body, PARALLEL, bool, True),
            logprobs=take_optional(body, "logprobs", bool, False),
            text_tools=[
                tool[CUSTOM]["name"] for tool in take_optional(body, "tools", list, []) if tool["type"] == CUSTOM
            ],
            extra={"include_usage": take_optional(options, "include_usage", bool, False, "stream_options")},
        )

    def write(self, request: ChatRequest, reply: Reply) -> Json:
        """Write a reply that is not streamed."""
        choices = [
            {
                "index": index,
                "message": _message(answer, request.text_tools),
                "logprobs": _logprobs(request, answer),
                "finish_reason": FINISH[answer.finish],
            }
            for index, answer in enumerate(reply.answers)
        ]
        return {**self._head(reply, "chat.completion"), "choices": choices, "usage": _usage(reply)}

    async def events(self, request: ChatRequest, streaming: StreamingReply) -> AsyncIterator[Event]:
        """Write a reply as chunks, then its usage if requested, then ``[DONE]``.

        The first answer is streamed while it is sampled; the others follow whole.
        """
        head = self._head(streaming.head, "chat.completion.chunk")
        if request.extra["include_usage"]:
            head["usage"] = None

        def chunk(index: int, delta: Json, finish: str | None = None, logprobs: Json | None = None) -> Event:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return None, {**head, "choices": [choice]}

        yield chunk(0, {"role": "assistant", "content": ""})
        async for kind, piece in streaming.parts():
            yield chunk(0, {DELTAS[kind]: piece})
        for index, answer in enumerate(streaming.reply.answers):
            if index:
                yield chunk(index, {"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning})
            for number_, call in enumerate(answer.calls):
                whole = _call(call, request.text_tools)
                kind, key = whole["type"], CALL_TEXTS[whole["type"]]
                text, opening = whole[kind][key], {**whole, kind: {**whole[kind], key: ""}}
                yield chunk(index, {"tool_calls": [{"index": number_, **opening}]})
                for piece in pieces(text):
                    yield chunk(index, {"tool_calls": [{"index": number_, kind: {key: piece}}]})
            yield chunk(index, {}, FINISH[answer.finish], _logprobs(request, answer))
        if request.extra["include_usage"]:
            yield None, {**head, "choices": [], "usage": _usage(streaming.reply)}
        yield None, "[DONE]"

    def reply_id(self, reply: Reply) -> str:
        """Return the id with its prefix."""
        return f"chatcmpl-{reply.id}"

    def _head(self, reply: Reply, kind: str) -> Json:
        return {"id": self.reply_id(reply), "object": kind, "created": reply.created, "model": reply.model}


def _tools(body: Mapping[str, Any]) -> tuple[Sequence[ToolSchema], AnswerForm | None]:
    """Return the offered tools (none if the request forbids calls) and the form of a forced or restricted call."""
    tools = []
    for index, tool in enumerate(take_optional(body, "tools", list, [])):
        path = f"tools.{index}"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str) or kind not in CALL_TEXTS:
            raise BadRequest(f"{path}.type must be function or custom", field=f"{path}.type", code="unsupported")
        held, where = take(tool, kind, dict, path), f"{path}.{kind}"
        if kind == CUSTOM:
            refuse_unknown(held, CUSTOM_FIELDS[1:], where)
        tools.append(custom_tool_schema(held, where) if kind == CUSTOM else tool_schema(held, where))
    kind, name = chosen_tool(body.get("tool_choice"))
    if kind == "allowed_tools":
        path = "tool_choice.allowed_tools"
        allowed = take(body["tool_choice"], "allowed_tools", dict, "tool_choice")
        return tools, allowed_calls(allowed, path, tools, lambda tool, where: take(tool, tool["type"], dict, where))
    return [] if kind == "none" else tools, forced_call(kind, name, tools, "tool_choice")


def _thinking(body: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the client's settings for thinking in the forms of other services."""
    refuse_unknown(take_optional(body, "chat_template_kwargs", dict, {}), TEMPLATE_SETTINGS, "chat_template_kwargs")
    return {name: json.dumps(body[name]) for name in THINKING_SETTINGS if is_given(body, name)}


def _logprobs(request: ChatRequest, answer: ReplyAnswer) -> Json | None:
    return {"content": logprob_rows(answer), "refusal": None} if request.logprobs else None


class _MessageReader:
    """Reader of messages that keeps the names of calls for their results."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def read(self, rows: Sequence[Any]) -> Sequence[Message]:
        if not rows:
            raise BadRequest("messages must contain at least one message", field="messages")
        return [self._read_one(row, f"messages.{index}") for index, row in enumerate(rows)]

    def _read_one(self, row: Any, path: str) -> Message:
        if not isinstance(row, dict):
            raise BadRequest(f"{path} must be an object", field=path)
        role = row.get("role")
        if role in ("system", "developer"):
            return Message(role="system", content=_content(row, path), name=participant(row, path))
        if role == "user":
            return Message(role="user", content=_content(row, path), name=participant(row, path))
        if role == "assistant":
            return self._assistant(row, path)
        if role == "tool":
            call_id = take(row, "tool_call_id", str, path)
            name = self._names.get(call_id) or take_optional(row, "name", str, "", path) or None
            return Message(role="tool", content=_content_or_none(row, path), tool_call_id=call_id, name=name)
        raise BadRequest(
            f"{path}.role must be system, developer, user, assistant or tool: got {role!r}", field=f"{path}.role"
        )

    def _assistant(self, row: Mapping[str, Any], path: str) -> Message:
        refuse(row, ("audio", "function_call"), "the policy cannot read it")
        calls = []
        for index, call in enumerate(take_optional(row, "tool_calls", list, [], path)):
            where = f"{path}.tool_calls.{index}"
            if not isinstance(call, dict):
                raise BadRequest(f"{where} must be an object", field=where)
            calls.append(_read_call(call, where))
            self._names[calls[-1].id] = calls[-1].name
        names = ("reasoning_content", "reasoning")
        row, thoughts = _without_thoughts(row, path)
        return Message(
            role="assistant",
            content=_content_or_none(row, path) or take_optional(row, "refusal", str, "", path),
            tool_calls=tuple(calls),
            reasoning=next((take(row, name, str, path) for name in names if is_given(row, name)), thoughts),
            name=participant(row, path),
        )


def _read_call(call: Mapping[str, Any], path: str) -> ToolCall:
    call_id = take_optional(call, "id", str, "", path)
    if call.get("type") == CUSTOM:
        return nested_custom_call(call, call_id, path)
    function, where = take(call, "function", dict, path), f"{path}.function"
    name = take(function, "name", str, where)
    return ToolCall(name=name, arguments=arguments(function.get("arguments"), f"{where}.arguments"), id=call_id)


def _without_thoughts(row: Mapping[str, Any], path: str) -> tuple[Mapping[str, Any], str | None]:
    """Return an answer without the parts that hold its thinking, and the thinking.

    Libraries that keep answers of several vendors in one form write such parts.
    """
    content, thoughts, rest = row.get("content"), [], []
    for index, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in THOUGHTS:
            thoughts.append(_thought(part, kind, f"{path}.content.{index}"))
        else:
            rest.append(part)
    return ({**row, "content": rest}, "\n\n".join(filter(None, thoughts)) or None) if thoughts else (row, None)


def _thought(part: Mapping[str, Any], kind: str, path: str) -> str:
    """Return the thinking of a part: under its own name, as its text, or as a summary."""
    value = part.get(kind, part.get("text", part.get("summary")))
    texts = value if isinstance(value, list) else [value]
    texts = [one.get("text") if isinstance(one, dict) else one for one in texts if one is not None]
    if not all(isinstance(text, str) for text in texts):
        raise BadRequest(f"{path}.{kind} must be text: got {shorten(value)}", field=f"{path}.{kind}")
    return "\n\n".join(texts)


def _content_or_none(row: Mapping[str, Any], path: str) -> Content:
    """Return the content of an answer or of a tool's result, which may be missing."""
    return _content(row, path) if is_given(row, "content") else ""


def _content(row: Mapping[str, Any], path: str) -> Content:
    content, where = row.get("content"), f"{path}.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be text or a list of parts", field=where)
    parts = [_part(part, f"{where}.{index}") for index, part in enumerate(content)]
    if all(isinstance(part, TextPart) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, TextPart))
    return tuple(parts)


def _part(part: Any, path: str) -> ContentPart:
    """Read a part of a message; parts of the Responses API mean the same."""
    if not isinstance(part, dict):
        raise BadRequest(f"{path} must be an object: got {shorten(part)}", field=path)
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text"):
        return TextPart(text=take(part, "text", str, path))
    if kind == "refusal":
        return TextPart(text=take(part, "refusal", str, path))
    if kind in ("image_url", "input_image"):
        url, where = part.get("image_url"), f"{path}.image_url"
        if isinstance(url, str):
            return image_of_url(url, where)
        return image_of_url(take(take(part, "image_url", dict, path), "url", str, where), f"{where}.url")
    raise BadRequest(f"{path}.type must be text or image_url: got {kind!r}", field=f"{path}.type", code="unsupported")


def _message(answer: ReplyAnswer, text_tools: Sequence[str]) -> Json:
    message: Json = {
        "role": "assistant",
        "content": None if answer.calls and not answer.text else answer.text,
        "refusal": None,
        "annotations": [],
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(call, text_tools) for call in answer.calls]
    return message


def _call(call: ToolCall, text_tools: Sequence[str]) -> Json:
    if call.name in text_tools:
        return {"id": call.id, "type": CUSTOM, CUSTOM: {"name": call.name, "input": call.arguments[TEXT_ARGUMENT]}}
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return {"id": call.id, "type": "function", "function": function}


def _usage(reply: Reply) -> Json:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.answer_tokens,
        "total_tokens": reply.prompt_tokens + reply.answer_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }
