"""Structural tags of xgrammar, which enforce the form of an answer: JSON of a schema, or tool calls.

Thinking comes before the form and is not constrained.
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
"""Texts before and after the arguments of a call, by the name of the parser."""


def structure_of(
    form: AnswerForm, tools: Sequence[ToolSchema], *, parser: str | None, thinking: ThinkingMarks | None, header: str
) -> str:
    """Return the structural tag of a form as JSON.

    Args:
        form: Form of the answer.
        tools: Offered tools.
        parser: Registry name of the parser for the model's calls.
        thinking: Marks of the thinking at the start of an answer; ``None`` without thinking.
        header: Text of the template before an answer; it may open the thinking.

    Raises:
        UnsupportedOption: no structural tag is known for the model's notation of calls.
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
            "a tool call cannot be enforced for this model",
            option="form",
            got=f"a model with calls in the notation {parser}",
            expected=f"the notation {' or '.join(CALLS)}",
        )
    begin, end = CALLS[parser]
    schema = {"type": "json_schema", "json_schema": function.get("parameters") or {"type": "object"}}
    return {"type": "tag", "begin": begin.format(name=json.dumps(function["name"])), "content": schema, "end": end}


def _thought(thinking: ThinkingMarks, header: str) -> dict[str, Any]:
    begin, _, rest = thinking.write("\0", header).partition("\0")
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": rest.lstrip()}
