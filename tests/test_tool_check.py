"""The conformance kit of tools finds what is wrong with them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

import agentrl
from agentrl.errors import UsageError
from agentrl.registry import Kind, lookup, names, register, unregister
from agentrl.testing import check_tool
from agentrl.testing.report import CheckStatus
from agentrl.tool import Tool, Toolset

seen: Counter[str] = Counter()


@agentrl.tool(pure=True)
def spell(word: str, times: int = 1) -> str:
    """Spell a word.

    Args:
        word: Any.
        times: How often.
    """
    return " ".join("-".join(word) for _ in range(times))


@agentrl.tool(pure=True)
def draw(word: str) -> str:
    """Draw a number.

    Args:
        word: Any.
    """
    seen[word] += 1
    return str(seen[word])


@agentrl.tool(inline=True)
def dawdle(word: str) -> str:
    """Compute for long.

    Args:
        word: Any.
    """
    until = time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    return word


@agentrl.tool
async def stumble(word: str) -> str:
    """Fail.

    Args:
        word: Any.
    """
    raise KeyError("the drawer is empty")


class Tray:
    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, word: str) -> str:
        """Put something on a tray.

        Args:
            word: What.
        """
        self.calls += 1
        await asyncio.sleep(0)
        return f"{word} {self.calls}"


misnamed = agentrl.tool(Tray)
misnamed.name = "put it"


def broken_rules(tool: Tool) -> dict[str, str]:
    report = check_tool(tool, examples=[{"word": "fern"}])
    return {row.check: row.detail for row in report.rows if row.status is CheckStatus.FAILED}


def test_a_good_tool_passes() -> None:
    report = check_tool(spell, examples=[{"word": "ab", "times": 2}, {"word": "c"}])
    assert report.passed, report
    assert {row.status for row in report.rows} == {CheckStatus.PASSED}
    assert "passed   pure means pure" in str(report)


@pytest.mark.parametrize(
    ("tool", "rule", "words"),
    [
        (draw, "pure means pure", "gave 3 results"),
        (dawdle, "event loop goes on", "blocked the event loop for"),
        (stumble, "examples succeed", "stumble failed (KeyError) (KeyError: 'the drawer is empty'; it was raised in"),
        (agentrl.tool(parallel=True)(Tray), "parallel calls agree", "other results than calls one after another"),
        (misnamed, "name can be sent", "'put it' is not 1 to 64 letters"),
    ],
)
def test_broken_rules_are_found(tool: Tool, rule: str, words: str) -> None:
    assert words in broken_rules(tool)[rule]


def test_without_examples_nothing_is_called() -> None:
    report = check_tool(stumble)
    assert report.passed
    assert next(row.check for row in report.rows if row.status is CheckStatus.SKIPPED) == "examples succeed"


@pytest.mark.parametrize("tool", [name for name in names(Kind.TOOL) if isinstance(lookup(Kind.TOOL, name), Tool)])
def test_shipped_tools_are_described(tool: str) -> None:
    schema: dict[str, Any] = lookup(Kind.TOOL, tool).schema["function"]
    assert schema["name"] == tool
    assert all(told["description"] for told in schema["parameters"]["properties"].values())


class Two(Toolset):
    """Two tools."""

    async def tools(self) -> list[Tool]:
        return [spell, draw]

    async def close(self) -> None:
        return


def test_several_tools_are_not_checked_as_one() -> None:
    register(Kind.TOOL, "two", Two)
    try:
        with pytest.raises(UsageError, match="only a single tool can be checked"):
            check_tool("two")
    finally:
        unregister(Kind.TOOL, "two")


async def test_a_tool_is_checked_where_an_event_loop_runs():
    def double(number: int) -> int:
        """Double a number.

        Args:
            number: Any.
        """
        return 2 * number

    assert check_tool(agentrl.tool(double), examples=[{"number": 2}]).passed
