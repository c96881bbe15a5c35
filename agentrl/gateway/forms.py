"""Forms that a client asks an answer for: JSON of a schema, or a call of a tool; and the tools that it offers.

Every vendor has its own words for the same few wishes; here they become one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.agent_loop import ANY_OBJECT, AnswerForm
from agentrl.gateway.dialect import BadRequest, ToolSchema
from agentrl.gateway.fields import optional, shown, take

FORCING = ("required", "any")
"""Words of the vendors for a call of whichever tool."""


def schema_form(told: Mapping[str, Any], path: str, *, within: str | None = None) -> AnswerForm | None:
    """Return the form of ``{"type": "json_schema", …}`` and its kind; ``None`` for text.

    Args:
        told: The client's field.
        path: Of it.
        within: Field that holds the schema with its name, where that is one of its own.
    """
    kind = optional(told, "type", str, "text", path)
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerForm(schema=ANY_OBJECT)
    if kind != "json_schema":
        raise BadRequest(
            f"{path}.type must be text, json_object or json_schema: got {shown(kind)}",
            field=f"{path}.type",
            code="unsupported",
        )
    holder, where = (told, path) if within is None else (take(told, within, dict, path), f"{path}.{within}")
    return AnswerForm(schema=take(holder, "schema", dict, where))


def tool_schema(row: Mapping[str, Any], path: str, *, parameters: str = "parameters") -> ToolSchema:
    """Return the schema of a tool that a client runs; ``strict``, which agents set by default, is not enforced.

    Args:
        row: Its name, description and parameters.
        path: Of it.
        parameters: Field of the parameters.
    """
    optional(row, "strict", bool, False, path)
    function = {
        "name": take(row, "name", str, path),
        "description": optional(row, "description", str, "", path),
        "parameters": optional(row, parameters, dict, {**ANY_OBJECT, "properties": {}}, path),
    }
    return {"type": "function", "function": function}


def forced_call(kind: Any, name: Any, tools: Sequence[ToolSchema], path: str) -> AnswerForm | None:
    """Return the form of an answer that must call a tool; ``None`` where the policy decides.

    Args:
        kind: ``auto``, ``none``, a word for any tool, or a word for the tool `name`; anything else is refused.
        name: Of that tool.
        tools: Those that are offered.
        path: Of the field.
    """
    if kind in ("auto", "none"):
        return None
    offered = tuple(str(tool["function"]["name"]) for tool in tools)
    if not offered:
        raise BadRequest(f"{path}: a call cannot be forced where no tool is offered", field=path)
    if kind in FORCING:
        return AnswerForm(calls=offered)
    if kind not in ("function", "tool"):
        raise BadRequest(f"{path} is not supported here: got {shown(kind)}", field=path, code="unsupported")
    if name not in offered:
        raise BadRequest(f"{path}: there is no tool {shown(name)}, but {', '.join(offered)}", field=path)
    return AnswerForm(calls=(name,))
