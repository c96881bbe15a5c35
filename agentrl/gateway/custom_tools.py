"""Custom tools of OpenAI's APIs: tools that take one text instead of JSON, such as patches of files.

The policy calls them as tools with one argument, ``input``, because models write calls as JSON. Clients send and
receive the text itself: as items of the Responses API, or within ``custom`` in Chat Completions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.errors import shorten
from agentrl.gateway.dialect import TEXT_ARGUMENT, BadRequest, Json, ToolSchema
from agentrl.gateway.fields import pieces, take, take_optional
from agentrl.gateway.forms import tool_schema
from agentrl.message import ToolCall

CUSTOM_FIELDS = ("type", "name", "description", "format")
CUSTOM = "custom"
"""Type of the tools, and the field that holds their properties in Chat Completions."""


def custom_tool_schema(tool: Mapping[str, Any], path: str) -> ToolSchema:
    """Return the schema of a tool that takes a text; its grammar is described to the policy, but not enforced."""
    form = take_optional(tool, "format", dict, {"type": "text"}, path)
    kind, where = form.get("type"), f"{path}.format"
    about = take_optional(tool, "description", str, "", path)
    if kind == "grammar":
        if "grammar" in form:  # as in Chat Completions
            form, where = take(form, "grammar", dict, where), f"{where}.grammar"
        syntax, definition = take(form, "syntax", str, where), take(form, "definition", str, where)
        about = f"{about}\n\nThe input follows this grammar ({syntax}):\n{definition}".lstrip()
    elif kind != "text":
        text = f"{where}.type must be text or grammar: got {shorten(kind)}"
        raise BadRequest(text, field=f"{where}.type", code="unsupported")
    parameters = {"type": "object", "properties": {TEXT_ARGUMENT: {"type": "string"}}, "required": [TEXT_ARGUMENT]}
    return tool_schema({"name": tool.get("name"), "description": about, "parameters": parameters}, path)


def custom_call(item: Mapping[str, Any], path: str) -> ToolCall:
    """Read a call of a custom tool."""
    name, call_id = take(item, "name", str, path), take(item, "call_id", str, path)
    return ToolCall(name=name, arguments={TEXT_ARGUMENT: take(item, "input", str, path)}, id=call_id)


def nested_custom_call(call: Mapping[str, Any], call_id: str, path: str) -> ToolCall:
    """Read a call of a custom tool in Chat Completions."""
    return custom_call({**take(call, CUSTOM, dict, path), "call_id": call_id}, f"{path}.{CUSTOM}")


def call_item(call: ToolCall, reply_id: str, index: int, *, is_custom: bool) -> Json:
    """Return the item of a call; `index` is its place among the calls of the reply."""
    named = {"call_id": call.id, "name": call.name}
    if is_custom:
        item = {
            "id": f"ctc_{reply_id}_{index}",
            "type": "custom_tool_call",
            **named,
            "input": call.arguments[TEXT_ARGUMENT],
        }
    else:
        text = json.dumps(dict(call.arguments))
        item = {"id": f"fc_{reply_id}_{index}", "type": "function_call", **named, "arguments": text}
    return {**item, "status": "completed"}


def call_events(item: Json, index: int) -> Iterator[tuple[str, Json]]:
    """Yield the events of the item of a call, which is the reply's item number `index`."""
    is_custom = item["type"] == "custom_tool_call"
    key, kind = ("input", "custom_tool_call_input") if is_custom else ("arguments", "function_call_arguments")
    location, text = {"item_id": item["id"], "output_index": index}, item[key]
    yield "response.output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", key: ""}}
    for piece in pieces(text):
        yield f"response.{kind}.delta", {**location, "delta": piece}
    name = {} if is_custom else {"name": item["name"]}
    yield f"response.{kind}.done", {**location, **name, key: text}
    yield "response.output_item.done", {"output_index": index, "item": item}
