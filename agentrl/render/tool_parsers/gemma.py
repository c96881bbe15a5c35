"""Tool calls of Gemma 4: ``call:tool{key:value,…}`` between marks, with texts between ``<|"|>``."""

from __future__ import annotations

import ast
import re
from functools import partial
from typing import Any

from agentrl.message import ToolCall
from agentrl.render.tool_parsers import (
    UNCLOSED_TAG,
    CollectedCalls,
    MalformedCall,
    ParsedCalls,
    ToolSchemas,
    collect_blocks,
    make_call,
)
from agentrl.render.tool_parsers.values import first_of, read_json, skip_space

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
FORM = f"Write {OPEN}call:tool{{key:{QUOTE}text{QUOTE},key:1}}{CLOSE}."
_HEAD = re.compile(r"\s*call:\s*([^\s{}<(]*)\s*(?=\{)")
_KEY = re.compile(rf'(?:{re.escape(QUOTE)}(.+?){re.escape(QUOTE)}|"([^"]+)"|([^\s:,{{}}\[\]<"]+))\s*:', re.DOTALL)
_AFTER_TEXT = {
    "}": re.compile(rf"\s*(?:\}}|,\s*(?:{_KEY.pattern})|$)", re.DOTALL),
    "]": re.compile(r"\s*(?:\]|,|$)"),
}
"""What follows a text in an object or a list: quotes within texts are written with the same token."""
_PYTHON_TEXT = re.compile(r"'(?:[^'\\\n]|\\.)*'")
_BARE = re.compile(r'(?:(?!<\||<tool_call\|>)[^,{}\[\]"])+')
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def parse_gemma4(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read the calls of Gemma 4; see `agentrl.render.tool_parsers`."""
    found = collect_blocks(text, OPEN, partial(_read_block, text, tools))
    found.refuse_stray((CLOSE,), OPEN, FORM)
    return found.result()


def _read_block(text: str, tools: ToolSchemas, start: int, found: CollectedCalls) -> int:
    """Collect the call whose body begins at `start`; return the index after it."""
    number, end = found.number, start

    def read() -> ToolCall:
        nonlocal end
        head = _HEAD.match(text, start)
        if head is None:
            raise MalformedCall(f"Tool call {number} does not begin with call:tool{{. {FORM}")
        reader = _Values(text, head.end(), number)
        try:
            arguments = reader.read()
        except RecursionError as error:
            raise MalformedCall(f"The arguments of tool call {number} are nested too deeply.") from error
        end = skip_space(text, reader.at)
        if end < len(text) and not text.startswith((CLOSE, OPEN), end):
            raise MalformedCall(f"Tool call {number} continues after its arguments. {FORM}")
        return make_call(head[1] or None, arguments, tools, number)

    if found.take(read) and not text.startswith(CLOSE, end):
        found.note([UNCLOSED_TAG])
        return end
    after = first_of(text, (CLOSE, OPEN), end)
    return after + len(CLOSE) if text.startswith(CLOSE, after) else after


class _Values:
    """Reader of values in a text, from index `at` on."""

    def __init__(self, text: str, at: int, number: int) -> None:
        self.text, self.at, self._number = text, at, number

    def read(self, close: str = "}") -> Any:
        """Read a value in brackets that end with `close`, and move after it; otherwise raise `MalformedCall`."""
        self.at = skip_space(self.text, self.at)
        if self._take(QUOTE):
            return self._read_quoted(close)
        if python := _PYTHON_TEXT.match(self.text, self.at):
            self.at = python.end()
            return ast.literal_eval(python[0])
        if self._take("{"):
            return self._items("}")
        if self._take("["):
            return self._items("]")
        bare = _BARE.match(self.text, self.at)
        plain = bare[0].strip() if bare else ""
        if plain.lower() in _WORDS:
            self.at = bare.end() if bare else self.at
            return _WORDS[plain.lower()]
        known = read_json(self.text, self.at, f"A value in tool call {self._number}", FORM)
        self.at = known.end
        return known.value

    def _read_quoted(self, close: str) -> str:
        """Read a text up to the first closing mark after which its brackets go on or end."""
        begin, end = self.at, self.text.find(QUOTE, self.at)
        while end >= 0:
            self.at = end + len(QUOTE)
            if _AFTER_TEXT[close].match(self.text, self.at):
                return self.text[begin:end].replace(QUOTE, '"')
            end = self.text.find(QUOTE, self.at)
        raise self._error(f"has a text without {QUOTE} at its end")

    def _items(self, close: str) -> dict[str, Any] | list[Any]:
        """Read the items of an object or a list after its opening bracket."""
        values: dict[str, Any] = {}
        items: list[Any] = []
        while not self._take(close):
            if (values or items) and not self._take(","):
                raise self._error(f"is not closed with {close}")
            if close == "]":
                items.append(self.read(close))
                continue
            key = _KEY.match(self.text, skip_space(self.text, self.at))
            if key is None:
                raise self._error("has a value without a key")
            name = key[1] or key[2] or key[3]
            if name in values:
                raise self._error(f"gives {name!r} twice")
            self.at = key.end()
            values[name] = self.read(close)
        return items if close == "]" else values

    def _take(self, mark: str) -> bool:
        """Skip white space and a mark; return False if the text does not continue with it."""
        at = skip_space(self.text, self.at)
        if not self.text.startswith(mark, at):
            return False
        self.at = at + len(mark)
        return True

    def _error(self, problem: str) -> MalformedCall:
        return MalformedCall(f"Tool call {self._number} {problem}. {FORM}")
