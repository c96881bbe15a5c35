"""What a parser has come across so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.message import ToolCall
from agentrl.render.tool_parsers.contract import Malformed, ParsedCalls


@dataclass(slots=True)
class Collected:
    """Content, calls and problems, in order."""

    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def number(self) -> int:
        """The number of the call that is read next, from 1 on; malformed ones count."""
        return len(self.calls) + len(self.problems) + 1

    def take(self, read: Callable[[], ToolCall]) -> bool:
        """Keep a call, or the problem with it; whether it was a call."""
        try:
            self.calls.append(read())
        except Malformed as problem:
            self.problems.append(str(problem))
            return False
        return True

    def result(self) -> ParsedCalls:
        """All of it."""
        return ParsedCalls(
            content="".join(self.content).strip(), calls=tuple(self.calls), problems=tuple(self.problems)
        )
