"""Notations with one ``invoke`` tag per call and one ``parameter`` tag per argument (DeepSeek V3.2, MiniMax M2)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.message import ToolCall
from agentrl.render.tool_parsers.collected import Collected
from agentrl.render.tool_parsers.contract import Malformed, ParsedCalls, ToolSchemas, make_call
from agentrl.render.tool_parsers.json_value import skip_space

ValueReader = Callable[[str, str | None, str, str, int], Any]
"""From a value's text, its ``string`` attribute, its key, the tool's name and the call's number; raises `Malformed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InvokeMarks:
    """The tags of a notation."""

    block: str
    """Name of the tag around all calls."""
    prefix: str = ""
    """What stands before the names of tags, ``｜DSML｜`` or nothing."""
    string: str = ""
    """An attribute of ``parameter``, as it is shown to the model."""

    @property
    def open(self) -> str:
        """What opens the calls."""
        return f"<{self.prefix}{self.block}>"

    @property
    def close(self) -> str:
        """What closes the calls."""
        return f"</{self.prefix}{self.block}>"

    def end_of(self, tag: str) -> str:
        """A closing tag."""
        return f"</{self.prefix}{tag}>"

    @property
    def form(self) -> str:
        """A sentence for the model."""
        p = self.prefix
        return (
            f'Write {self.open}\n<{p}invoke name="tool">\n<{p}parameter name="argument"{self.string}>value'
            f"</{p}parameter>\n</{p}invoke>\n{self.close}."
        )


class InvokeTagParser:
    """A parser of one such notation; see `agentrl.render.tool_parsers.contract`."""

    def __init__(self, marks: InvokeMarks, read_value: Callable[[ToolSchemas], ValueReader]) -> None:
        self._marks, self._read_value = marks, read_value
        tag = re.escape(f"<{marks.prefix}")
        self._invoke = re.compile(rf'\s*{tag}invoke\s+name="([^"]*)"\s*>')
        self._parameter = re.compile(
            rf'\s*{tag}parameter\s+name="([^"]*)"(?:\s+string="(true|false)")?\s*>'
            rf"(.*?){re.escape(marks.end_of('parameter'))}",
            re.DOTALL,
        )

    def __call__(self, text: str, tools: ToolSchemas) -> ParsedCalls:
        """Calls, problems and the remaining text; never raises."""
        found, marks = Collected(), self._marks
        cursor = 0
        while (start := text.find(marks.open, cursor)) >= 0:
            found.content.append(text[cursor:start])
            cursor = self._read_block(text, start + len(marks.open), tools, found)
        found.content.append(text[cursor:])
        stray = f"<{marks.prefix}invoke name="
        if stray in found.content[-1] or marks.close in found.content[-1]:
            found.problems.append(f"Parts of a tool call stand outside {marks.open} and {marks.close}. {marks.form}")
            found.content[-1] = found.content[-1].replace(marks.close, "")
        return found.result()

    def _read_block(self, text: str, start: int, tools: ToolSchemas, found: Collected) -> int:
        marks = self._marks
        cursor, before = start, len(found.calls) + len(found.problems)
        while invoke := self._invoke.match(text, cursor):
            cursor = self._read_invoke(text, invoke, tools, found)
        cursor = skip_space(text, cursor)
        if text.startswith(marks.close, cursor):
            if len(found.calls) + len(found.problems) == before:
                found.problems.append(f"{marks.open} holds no call. {marks.form}")
            return cursor + len(marks.close)
        extra = "was not closed" if cursor == len(text) else "holds something else than calls"
        found.problems.append(f"{marks.open} {extra}. {marks.form}")
        close = text.find(marks.close, cursor)
        return len(text) if close < 0 else close + len(marks.close)

    def _read_invoke(self, text: str, invoke: re.Match[str], tools: ToolSchemas, found: Collected) -> int:
        """Collect one call; the index of what follows it."""
        number, end = found.number, invoke.end()
        closing = self._marks.end_of("invoke")

        def read() -> ToolCall:
            nonlocal end
            written: dict[str, tuple[str, str | None]] = {}
            while parameter := self._parameter.match(text, end):
                key, end = parameter[1], parameter.end()
                if key in written:
                    raise Malformed(f"Tool call {number} gives {key!r} twice.")
                written[key] = parameter[3], parameter[2]
            end = skip_space(text, end)
            if not text.startswith(closing, end):
                extra = "was not closed" if end == len(text) else "has text outside its parameter tags"
                raise Malformed(f"Tool call {number} {extra}. {self._marks.form}")
            call = make_call(invoke[1] or None, {}, tools, number)
            value = self._read_value(tools)
            arguments = {key: value(*parts, key, call.name, number) for key, parts in written.items()}
            return make_call(call.name, arguments, tools, number)

        found.take(read)
        return self._after_invoke(text, end)

    def _after_invoke(self, text: str, start: int) -> int:
        """The index after the call's closing tag, or else of the next call or the end of the block."""
        closing = self._marks.end_of("invoke")
        close = text.find(closing, start)
        following = self._invoke.search(text, start)
        if close >= 0 and (following is None or close < following.start()):
            return close + len(closing)
        if following is not None:
            return following.start()
        block = text.find(self._marks.close, start)
        return block if block >= 0 else len(text)
