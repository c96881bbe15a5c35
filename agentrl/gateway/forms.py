"""Read answer forms (JSON that follows a schema, a forced tool call) and tool schemas from requests of all vendors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.agent_loop import ANY_OBJECT, AnswerForm
from agentrl.errors import shorten
from agentrl.gateway.dialect import BadRequest, ToolSchema
from agentrl.gateway.fields import take, take_optional

FORCING = ("required", "any")
"""The vendors' values of ``tool_choice`` that force a call of any tool."""
NAMING = ("function", "custom", "tool")
"""The vendors' types of ``tool_choice`` that name a tool."""


def schema_form(value: Mapping[str, Any], path: str, *, within: str | None = None) -> AnswerForm | None:
    """Return the form of ``{"type": "json_schema", …}`` or ``{"type": "json_object"}``; ``None`` for text.

    Args:
        value: Value of the client's field.
        path: Path of the field.
        within: Name of the nested field that holds the schema and its name, if the dialect nests them.
    """
    kind = take_optional(value, "type", str, "text", path)
    if kind == "text":
        return None
    if kind == "json_object":  # with a schema as in llama.cpp
        return AnswerForm(schema=take_optional(value, "schema", dict, ANY_OBJECT, path) or ANY_OBJECT)
    if kind != "json_schema":
        raise BadRequest(
            f"{path}.type must be text, json_object or json_schema: got {shorten(kind)}",
            field=f"{path}.type",
            code="unsupported",
        )
    holder, where = (value, path) if within is None else (take(value, within, dict, path), f"{path}.{within}")
    return AnswerForm(schema=take(holder, "schema", dict, where))


def tool_schema(row: Mapping[str, Any], path: str, *, parameters: str = "parameters") -> ToolSchema:
    """Return the schema of a tool that the client runs; ``strict``, which agents set by default, is not enforced.

    `path` is the tool's path in the request, and `parameters` the field that holds its parameters.
    """
    take_optional(row, "strict", bool, False, path)
    function = {
        "name": take(row, "name", str, path),
        "description": take_optional(row, "description", str, "", path),
        "parameters": take_optional(row, parameters, dict, {**ANY_OBJECT, "properties": {}}, path),
    }
    return {"type": "function", "function": function}


def chosen_tool(choice: Any) -> tuple[Any, Any]:
    """Return the kind of a ``tool_choice``, and the name of the tool that it forces, in either of OpenAI's notations.

    >>> chosen_tool({"type": "function", "function": {"name": "add"}}), chosen_tool({"type": "function", "name": "add"})
    (('function', 'add'), ('function', 'add'))
    >>> chosen_tool({"type": "custom", "custom": {"name": "patch"}})
    ('custom', 'patch')
    >>> chosen_tool(None), chosen_tool("required"), chosen_tool({"type": "auto"})
    (('auto', None), ('required', None), ('auto', None))
    """
    if not isinstance(choice, dict) or not choice:
        return choice or "auto", None
    named = next((held for name in ("function", "custom") if isinstance(held := choice.get(name), dict)), choice)
    return choice.get("type", "function"), named.get("name")


def forced_call(kind: Any, name: Any, tools: Sequence[ToolSchema], path: str) -> AnswerForm | None:
    """Return the form of an answer that must call a tool; ``None`` if the policy decides.

    Args:
        kind: ``auto``, ``none``, one of `FORCING` for any tool, or one of `NAMING` for the tool `name`.
        name: Name of the forced tool.
        tools: The offered tools.
        path: Path of the field.

    Raises:
        BadRequest: `kind` or `name` is unknown, or a call is forced and no tool is offered.
    """
    if kind in ("auto", "none"):
        return None
    offered = tuple(str(tool["function"]["name"]) for tool in tools)
    if not offered:
        raise BadRequest(f"{path}: a call cannot be forced because no tool is offered", field=path)
    if kind in FORCING:
        return AnswerForm(calls=offered)
    if kind not in NAMING:
        raise BadRequest(f"{path} is not supported here: got {shorten(kind)}", field=path, code="unsupported")
    if name not in offered:
        raise BadRequest(f"{path}: unknown tool {shorten(name)}: expected one of {', '.join(offered)}", field=path)
    return AnswerForm(calls=(name,))


def allowed_calls(
    value: Mapping[str, Any],
    path: str,
    tools: Sequence[ToolSchema],
    function_of: Callable[[Mapping[str, Any], str], Mapping[str, Any]],
) -> AnswerForm | None:
    """Return the form of an answer that may call only some of the tools; ``None`` if it may call all of them.

    All tools stay in the prompt, as in OpenAI's API.

    Args:
        value: ``{"mode": "auto" | "required", "tools": [{"type": "function", …}, …]}``.
        path: Path of the field.
        tools: The offered tools.
        function_of: Returns the object with the name of an allowed tool, which has a path.
    """
    mode, names = take(value, "mode", str, path), []
    if mode not in ("auto", "required"):
        raise BadRequest(f"{path}.mode must be auto or required: got {shorten(mode)}", field=f"{path}.mode")
    for index, tool in enumerate(take(value, "tools", list, path)):
        where = f"{path}.tools.{index}"
        if not isinstance(tool, dict) or tool.get("type") not in ("function", "custom"):
            raise BadRequest(f"{where}.type must be function or custom", field=f"{where}.type", code="unsupported")
        name = take(function_of(tool, where), "name", str, where)
        forced_call("function", name, tools, where)
        names.append(name)
    if not names:
        raise BadRequest(f"{path}.tools must name at least one tool; to forbid calls, send none", field=f"{path}.tools")
    if mode == "auto" and {tool["function"]["name"] for tool in tools} == set(names):
        return None
    return AnswerForm(calls=tuple(dict.fromkeys(names)), or_text=mode == "auto")


def required_form(forced: AnswerForm | None, schema: AnswerForm | None, path: str) -> AnswerForm | None:
    """Return the form of an answer from the choice of tools and from the schema of its text, whose field is `path`.

    A forced call leaves no text to which the schema could apply.
    """
    if forced is not None and forced.or_text and schema is not None:
        text = f"{path} is not supported here together with allowed_tools of mode auto"
        raise BadRequest(text, field=path, code="unsupported")
    return forced or schema
