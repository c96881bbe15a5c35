"""Tool calls of Gemma 4: ``call:tool{key:value,…}`` between marks, with texts between ``<|"|>``."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
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
from agentrl.render.tool_parsers.tolerant_tags import DAMAGED, fitting_call
from agentrl.render.tool_parsers.untagged import read_untagged
from agentrl.render.tool_parsers.values import JsonValue, first_of, read_json, skip_space

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
FORM = f"Write {OPEN}call:tool{{key:{QUOTE}text{QUOTE},key:1}}{CLOSE}."
_HEAD = re.compile(r"\s*call:\s*([^\s{}<(]*)\s*(?=\{)")
_DAMAGED_HEAD = re.compile(r"[^:{<(]*:\s*([^\s{}<(]*)\s*(?=[{(])")
_EXTRA = re.compile(r"[^\w<]*(?:<[^<>]*>?)?\s*\Z")
"""Pattern of the text after the arguments of a damaged call: brackets, and a damaged closing mark."""
_KEY = re.compile(rf'(?:{re.escape(QUOTE)}(.+?){re.escape(QUOTE)}|"([^"]+)"|([^\s:,{{}}\[\]<"]+))\s*:', re.DOTALL)
_DAMAGED_KEY = re.compile(_KEY.pattern[:-1] + "[:=]", re.DOTALL)
_AFTER_TEXT = {
    "}": re.compile(rf"[\s,]*(?:\}}|$)|\s*,\s*(?:{_KEY.pattern})", re.DOTALL),
    "]": re.compile(r"\s*(?:\]|,|$)"),
    ")": re.compile(rf"[\s,]*(?:\)|$)|\s*,\s*(?:{_KEY.pattern})", re.DOTALL),
}
"""What follows a text in an object or a list: quotes within texts are written with the same token."""
_PYTHON_TEXT = re.compile(r"'(?:[^'\\\n]|\\.)*'")
_BARE = re.compile(r'(?:(?!<\||<tool_call\|>)[^,{}\[\]"])+')
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def parse_gemma4(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read the calls of Gemma 4, also damaged ones as servers accept them; see `agentrl.render.tool_parsers`."""
    strict, tolerant = (_parse(text, tools, read) for read in (_read_block, _read_damaged_block))
    return tolerant if strict.problems and len(tolerant.calls) > len(strict.calls) else strict


def repair_gemma4(text: str, tools: ToolSchemas, *, is_whole: bool) -> ParsedCalls:
    """Read calls whose last mark and brackets are missing, or JSON with or without the notation's marks."""
    served = parse_gemma4(text, tools)
    if is_whole and served.problems:
        closed = parse_gemma4(text + CLOSE, tools)
        served = closed if len(closed.calls) > len(served.calls) else served
    if served.calls:
        return served
    plain = text.replace(OPEN, "\n").replace(CLOSE, "\n")
    return read_untagged(plain, tools, FORM, is_whole=is_whole) or served


def _parse(text: str, tools: ToolSchemas, read: Callable[[str, ToolSchemas, int, CollectedCalls], int]) -> ParsedCalls:
    found = collect_blocks(text, OPEN, partial(read, text, tools))
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
        arguments = reader.read_arguments()
        end = skip_space(text, reader.at)
        if end < len(text) and not text.startswith((CLOSE, OPEN), end):
            raise MalformedCall(f"Tool call {number} continues after its arguments. {FORM}")
        return make_call(head[1] or None, arguments, tools, number)

    if found.take(read) and not text.startswith(CLOSE, end):
        found.note([UNCLOSED_TAG])
        return end
    after = first_of(text, (CLOSE, OPEN), end)
    return after + len(CLOSE) if text.startswith(CLOSE, after) else after


def _read_damaged_block(text: str, tools: ToolSchemas, start: int, found: CollectedCalls) -> int:
    """Collect a call as `_read_block`, or one with damaged brackets, commas or marks whose arguments fit."""
    before, problems = len(found.calls), len(found.problems)
    after = _read_block(text, tools, start, found)
    if len(found.calls) > before:
        return after
    del found.problems[problems:]
    stop = first_of(text, (CLOSE, OPEN), start)
    number, body, is_cut = found.number, text[start:stop], stop == len(text)

    def read() -> ToolCall:
        head = _DAMAGED_HEAD.match(body)
        if head is None:
            raise MalformedCall(f"Tool call {number} does not begin with call:tool{{. {FORM}")
        reader = _Values(body, head.end(), number, is_damaged=True, is_cut=is_cut)
        arguments = reader.read_arguments()
        if not _EXTRA.match(body, reader.at):
            raise MalformedCall(f"Tool call {number} continues after its arguments. {FORM}")
        return fitting_call(head[1], arguments, tools, number)

    if found.take(read):
        found.note([DAMAGED])
    return after


class _Values:
    """Reader of values in a text, from index `at` on."""

    def __init__(self, text: str, at: int, number: int, *, is_damaged: bool = False, is_cut: bool = True) -> None:
        self.text, self.at, self._number = text, at, number
        self._is_damaged, self._is_cut = is_damaged, is_cut

    def read_arguments(self) -> Any:
        """Read the arguments of a call, and move after them; otherwise raise `MalformedCall`."""
        try:
            if self._is_damaged and self._take("("):
                return self._items(")")
            return self.read()
        except RecursionError as error:
            raise MalformedCall(f"The arguments of tool call {self._number} are nested too deeply.") from error

    def read(self, close: str = "}") -> Any:
        """Read a value in brackets that end with `close`, and move after it; otherwise raise `MalformedCall`."""
        self.at = skip_space(self.text, self.at)
        if self._take(QUOTE):
            return self._read_quoted(close)
        if python := _PYTHON_TEXT.match(self.text, self.at):
            self.at = python.end()
            if self._is_damaged:
                self._take(QUOTE)
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
        try:
            known = read_json(self.text, self.at, f"A value in tool call {self._number}", FORM)
        except MalformedCall:
            if not self._is_damaged or bare is None or not plain:
                raise
            known = JsonValue(plain, bare.end())
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
        while not self._ends(close, is_first=not (values or items)):
            if close == "]":
                items.append(self.read(close))
                continue
            key = (_DAMAGED_KEY if self._is_damaged else _KEY).match(self.text, skip_space(self.text, self.at))
            if key is None:
                raise self._error("has a value without a key")
            name = key[1] or key[2] or key[3]
            if name in values:
                raise self._error(f"gives {name!r} twice")
            self.at = key.end()
            values[name] = self.read(close)
        return items if close == "]" else values

    def _ends(self, close: str, *, is_first: bool) -> bool:
        """Take the end of brackets, or else the comma before the next item."""
        if self._take(close):
            return True
        if self._is_damaged and not self._is_cut and skip_space(self.text, self.at) == len(self.text):
            return True
        if not self._take(","):
            if is_first:
                return False
            raise self._error(f"is not closed with {close}")
        if is_first and not self._is_damaged:
            raise self._error("begins with a comma")
        return self._is_damaged and self._ends(close, is_first=True)

    def _take(self, mark: str) -> bool:
        """Skip white space and a mark; return False if the text does not continue with it."""
        at = skip_space(self.text, self.at)
        if not self.text.startswith(mark, at):
            return False
        self.at = at + len(mark)
        return True

    def _error(self, problem: str) -> MalformedCall:
        return MalformedCall(f"Tool call {self._number} {problem}. {FORM}")
