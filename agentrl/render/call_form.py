"""Type in which a chat template expects the arguments of tool calls: a mapping, or JSON text.

Published templates differ, and none states its type. Most expect a mapping (MiniMax M2, GLM and Qwen3-Coder iterate
over it), but DeepSeek V3, R1 and V3.1 concatenate the arguments with a string. To find the form, one call is rendered
in both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.errors import TemplateError
from agentrl.message import ToolCall

PROBE_NAME = "look_around"
PROBE_ARGUMENTS: Mapping[str, Any] = {"place": "old north tower"}
PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Look around.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "string", "description": "Where to look."} for name in PROBE_ARGUMENTS},
            "required": [*PROBE_ARGUMENTS],
        },
    },
}
"""Tool for probing templates."""


def reads_json_arguments(render: Callable[[ToolCall, bool], str], call_id: str) -> bool:
    """Return True if a template shows a call only if its arguments are JSON text.

    Args:
        render: Returns the text of an answer with a call, whose arguments are JSON text (True) or a mapping. Raises
            `TemplateError` if the template refuses it.
        call_id: Call id that the template accepts.
    """
    call = ToolCall(name=PROBE_NAME, arguments=PROBE_ARGUMENTS, id=call_id)

    def shows(json_arguments: bool) -> bool:
        try:
            return shows_call(render(call, json_arguments), call)
        except TemplateError:
            return False

    return not shows(False) and shows(True)


def shows_call(text: str, call: ToolCall) -> bool:
    """Return True if a text contains a call's name and arguments, not in Python's notation and not quoted twice."""
    quoted_wrongly = (mark + str(key) for key in call.arguments for mark in ("'", '\\"'))
    parts = [call.name, *call.arguments, *(value for value in call.arguments.values() if isinstance(value, str))]
    return all(part in text for part in parts) and not any(wrong in text for wrong in quoted_wrongly)


def with_json_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message from `agentrl.message.Message.to_template` with the arguments of its calls as JSON text."""
    if "tool_calls" not in row:
        return dict(row)
    return {**row, "tool_calls": [_call_with_json_arguments(call) for call in row["tool_calls"]]}


def _call_with_json_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
