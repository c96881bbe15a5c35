"""The form in which a chat template reads tool calls. Published templates differ, and none of them states its form.

Most want the arguments of a call as a mapping (MiniMax M2, GLM and Qwen3-Coder iterate over it), but DeepSeek V3, R1 and
V3.1 join them to a string, so they must be JSON text. The first template of DeepSeek V3 and R1 shows calls only in
messages whose content is null. The form is found by rendering one call in each form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from agentrl.errors import TemplateError
from agentrl.message import Message, ToolCall

PROBE_NAME = "look_around"
PROBE_ARGUMENTS: Mapping[str, Any] = {"place": "old north tower"}
_WORDS = "first some words"


class NullContent(Enum):
    """The messages with calls whose content is null instead of text."""

    NEVER = "never"
    WHERE_EMPTY = "where empty"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How messages with tool calls are passed to a chat template."""

    json_arguments: bool = False
    """Arguments are JSON text instead of a mapping."""
    null_content: NullContent = NullContent.NEVER

    def row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message, as `agentrl.message.Message.to_template` makes it, in this form."""
        if not row.get("tool_calls"):
            return dict(row)
        found = dict(row)
        if self.null_content is NullContent.ALWAYS or (
            self.null_content is NullContent.WHERE_EMPTY and not row["content"]
        ):
            found["content"] = None
        if self.json_arguments:
            found["tool_calls"] = [_with_json_arguments(call) for call in row["tool_calls"]]
        return found


FORMS = tuple(
    CallForm(json_arguments=json_arguments, null_content=null_content)
    for json_arguments in (False, True)
    for null_content in NullContent
)
"""Every form; the first is what most templates read."""


def find_call_form(render: Callable[[Message, CallForm], str], call_id: str) -> CallForm | None:
    """Find the form in which a template shows tool calls; ``None`` if it shows them in none.

    Args:
        render: Returns the text of a conversation that ends with the given answer, passed in the given form. Raises
            `TemplateError` if the template refuses it.
        call_id: An id of a call that the template accepts.
    """
    call = ToolCall(name=PROBE_NAME, arguments=PROBE_ARGUMENTS, id=call_id)
    alone = Message(role="assistant", tool_calls=(call,))
    with_words = Message(role="assistant", content=_WORDS, tool_calls=(call,))

    def rank(form: CallForm) -> tuple[bool, bool, int]:
        """Prefer forms that show a call beside words, then those that show the words, then those that add least."""
        text = _rendered(render, with_words, form)
        return shows_call(text, call), _WORDS in text, -len(_rendered(render, alone, form))

    fitting = [form for form in FORMS if shows_call(_rendered(render, alone, form), call)]
    return max(fitting, key=rank, default=None)


def shows_call(text: str, call: ToolCall) -> bool:
    """Return True if a text holds a call's name and arguments, neither in Python's notation nor quoted twice."""
    quoted_wrongly = (mark + str(key) for key in call.arguments for mark in ("'", '\\"'))
    parts = [call.name, *call.arguments, *(value for value in call.arguments.values() if isinstance(value, str))]
    return all(part in text for part in parts) and not any(wrong in text for wrong in quoted_wrongly)


def _rendered(render: Callable[[Message, CallForm], str], message: Message, form: CallForm) -> str:
    try:
        return render(message, form)
    except TemplateError:
        return ""


def _with_json_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
