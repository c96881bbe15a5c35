"""Structural tags of xgrammar, which hold an answer to a form: JSON of a schema, or calls of tools.

Thinking stays free: it comes before what is held to a form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.agent_loop import AnswerForm, UnsupportedOption
from agentrl.render.families import ThinkingMarks
from agentrl.render.tokens import ToolSchema

CALLS = {
    "hermes": ('<tool_call>\n{{"name": {name}, "arguments": ', "}\n</tool_call>"),
    "llama3_json": ('{{"name": {name}, "parameters": ', "}"),
}
"""What stands before and after the arguments of a call, by the parser that reads it."""


def structure_of(
    form: AnswerForm, tools: Sequence[ToolSchema], *, parser: str | None, thinking: ThinkingMarks | None, header: str
) -> str:
    """Return the structural tag of a form, as JSON.

    Args:
        form: What the answer has to be.
        tools: Those that were offered.
        parser: Registry name of the way in which the model writes calls.
        thinking: Marks of the thinking that an answer begins with; ``None`` where it has none.
        header: What the template writes before an answer; it may open the thinking.

    Raises:
        UnsupportedOption: the model writes calls in a way that no structural tag is known for.
    """
    shape: dict[str, Any]
    if form.schema is not None:
        shape = {"type": "json_schema", "json_schema": form.schema}
    else:
        calls = [_call(tool["function"], parser) for tool in tools if tool["function"]["name"] in form.calls]
        shape = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
    if thinking is not None:
        shape = {"type": "sequence", "elements": [_thought(thinking, header), shape]}
    return json.dumps({"type": "structural_tag", "format": shape})


def _call(function: Mapping[str, Any], parser: str | None) -> dict[str, Any]:
    if parser not in CALLS:
        raise UnsupportedOption(
            "a call of a tool cannot be forced",
            option="form",
            got=f"a model that writes calls as {parser}",
            expected=f"one that writes them as {' or '.join(CALLS)}",
        )
    begin, end = CALLS[parser]
    schema = {"type": "json_schema", "json_schema": function.get("parameters") or {"type": "object"}}
    return {"type": "tag", "begin": begin.format(name=json.dumps(function["name"])), "content": schema, "end": end}


def _thought(thinking: ThinkingMarks, header: str) -> dict[str, Any]:
    begin, _, rest = thinking.written("\0", header).partition("\0")
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": rest.lstrip()}
