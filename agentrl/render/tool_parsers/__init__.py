"""Parsers of tool calls: one module per notation, with a function from text to calls and problems, and its repair.

A repair also reads calls that are recognisable although they deviate from the notation. Such a call must name an
offered tool, and its arguments must fit the tool's schema. Repairs are calls without their tags (see
`agentrl.render.tool_parsers.untagged`) and, within the tags, missing closing brackets or trailing commas.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

from agentrl.message import ToolCall
from agentrl.registry import load
from agentrl.tool.json_schema import as_mapping

ToolSchemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Schemas of the offered tools by name, in the form for chat templates."""
UNCLOSED_TAG, LISTED, PARAMETERS = "no closing tag", "a list of calls", '"parameters" for "arguments"'
"""Deviations that inference servers accept."""
REPAIRS: Mapping[str, str] = {
    "hermes": "agentrl.render.tool_parsers.json_calls:repair_hermes",
    "llama3_json": "agentrl.render.tool_parsers.json_calls:repair_llama3_json",
    "mistral": "agentrl.render.tool_parsers.json_calls:repair_mistral",
    "pythonic": "agentrl.render.tool_parsers.pythonic:repair_pythonic",
    "lfm2": "agentrl.render.tool_parsers.pythonic:repair_lfm2",
    "qwen3_coder": "agentrl.render.tool_parsers.xml_calls:repair_qwen3_coder",
    "seed_oss": "agentrl.render.tool_parsers.xml_calls:repair_seed_oss",
    "apertus": "agentrl.render.tool_parsers.json_calls:repair_apertus",
    "glm": "agentrl.render.tool_parsers.xml_calls:repair_glm",
    "minimax_m2": "agentrl.render.tool_parsers.xml_calls:repair_minimax_m2",
    "deepseek_v32": "agentrl.render.tool_parsers.xml_calls:repair_deepseek_v32",
    "deepseek_v4": "agentrl.render.tool_parsers.xml_calls:repair_deepseek_v4",
    "deepseek_v3": "agentrl.render.tool_parsers.deepseek:repair_v3",
    "deepseek_v31": "agentrl.render.tool_parsers.deepseek:repair_v31",
    "kimi_k2": "agentrl.render.tool_parsers.deepseek:repair_kimi_k2",
    "gemma4": "agentrl.render.tool_parsers.gemma:repair_gemma4",
}
"""References to the repairs, by the registry name of the parser."""
_FENCE = re.compile(r"^[ \t]*```(?P<language>[^\n]*)$", re.MULTILINE)


def parameters_of(name: str, tools: ToolSchemas) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments; an empty one where the tool declares none."""
    function = as_mapping(as_mapping(tools.get(name)).get("function"))
    return as_mapping(function.get("parameters"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCalls:
    """Result of a parser."""

    content: str
    """Text around the calls."""
    calls: tuple[ToolCall, ...] = ()
    """Valid calls in order, with ids that are unique within the answer."""
    problems: tuple[str, ...] = ()
    """Problems with the other calls, for the model."""
    repairs: tuple[str, ...] = ()
    """Deviations from the model's own notation, for each call with deviations."""


class ToolParser(Protocol):
    """Parser of the calls in an answer's text."""

    def __call__(self, text: str, tools: ToolSchemas) -> ParsedCalls:
        """Return calls, problems and the remaining text; never raise."""


class CallRepair(Protocol):
    """Parser of the calls in an answer's text that also accepts small deviations from the model's notation."""

    def __call__(self, text: str, tools: ToolSchemas, *, is_whole: bool) -> ParsedCalls:
        """Return calls, problems and the remaining text; never raise. `is_whole`: the answer was not cut."""


def repair_of(parser: str | None) -> CallRepair | None:
    """Return the repair of the notation of a parser in the registry; ``None`` if it has none."""
    reference = None if parser is None else REPAIRS.get(parser)
    return None if reference is None else cast(CallRepair, load(reference))


class MalformedCall(Exception):
    """Unusable call; the message is a problem for the model. Parsers raise and catch it."""


def make_call(name: object, arguments: object, tools: ToolSchemas, number: int, call_id: str | None = None) -> ToolCall:
    """Make a call of an offered tool with an object of arguments.

    `number` counts the answer's calls from 1; `call_id` is the model's own, if its notation has ids.

    Raises:
        MalformedCall: the name or the arguments are missing, unknown or of a wrong type.
    """
    if name is None:
        raise MalformedCall(f'Tool call {number} has no "name". Offered tools: {", ".join(tools)}.')
    if not isinstance(name, str):
        raise MalformedCall(f'The "name" of tool call {number} must be a string, not {type(name).__name__}.')
    if name not in tools:
        near = difflib.get_close_matches(name, tools, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Offered tools: {', '.join(tools)}."
        raise MalformedCall(f"Tool call {number} names an unknown tool {name!r}. {hint}")
    if not isinstance(arguments, Mapping):
        raise MalformedCall(
            f"The arguments of {name} (tool call {number}) must be a JSON object, not {type(arguments).__name__}."
        )
    return ToolCall(name=name, arguments=dict(arguments), id=call_id or f"call_{number}")


def shows_example(text: str, mark: str) -> bool:
    """Return True if `mark` occurs only in closed code blocks before other text: the answer explains the notation."""
    outside: list[str] = []
    opened, cursor = -1, 0
    for fence in _FENCE.finditer(text):
        if opened < 0:
            opened = fence.start()
        elif not fence["language"].strip():
            outside.append(text[cursor:opened])
            opened, cursor = -1, fence.end()
    rest = text[cursor:]
    return bool(outside) and mark in text and mark not in "".join([*outside, rest]) and bool(rest.strip())


@dataclass(slots=True)
class CollectedCalls:
    """Collected content, calls, problems and repairs, in order."""

    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Number of the next call, from 1 on; malformed calls count."""
        return len(self.calls) + len(self.problems) + 1

    def take(self, read: Callable[[], ToolCall]) -> bool:
        """Keep a call or its problem; return True for a valid call."""
        try:
            self.calls.append(read())
        except MalformedCall as problem:
            self.problems.append(str(problem))
            return False
        return True

    def note(self, slips: Sequence[str]) -> None:
        """Record the deviations of the latest call from the model's notation, if any."""
        if slips:
            self.repairs.append(", ".join(dict.fromkeys(slips)))

    def refuse_stray(self, marks: Sequence[str], opening: str, form: str) -> None:
        """Report marks in the text after the last block, and remove them."""
        stray = [mark for mark in marks if mark in self.content[-1]]
        if stray:
            self.problems.append(f"{stray[0]} appears without {opening} before it. {form}")
        for mark in stray:
            self.content[-1] = self.content[-1].replace(mark, "")

    def result(self) -> ParsedCalls:
        """Return everything that was collected."""
        return ParsedCalls(
            content="".join(self.content).strip(),
            calls=tuple(self.calls),
            problems=tuple(self.problems),
            repairs=tuple(self.repairs),
        )


def collect_blocks(text: str, opening: str, read: Callable[[int, CollectedCalls], int]) -> CollectedCalls:
    """Collect the blocks that begin with `opening`, and the text between them.

    Args:
        text: Text of the answer.
        opening: Mark that begins a block.
        read: Collects the calls of the block whose body begins at an index, and returns the index after the block.
    """
    found, cursor = CollectedCalls(), 0
    while (start := text.find(opening, cursor)) >= 0:
        found.content.append(text[cursor:start])
        cursor = read(start + len(opening), found)
    found.content.append(text[cursor:])
    return found
