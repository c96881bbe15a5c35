from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

import agentrl
from agentrl.errors import ToolError, UsageError
from agentrl.tool import Tool


@agentrl.tool
def midpoint(low: int, high: int = 100) -> int:
    """The middle of a range.

    Args:
        low: Smallest candidate.
        high: Largest candidate.
    """
    return (low + high) // 2


@agentrl.tool(name="counter", stop=True)
class Counter:
    """Counts over one episode."""

    closed = 0

    def __init__(self) -> None:
        self.total = 0

    async def __aenter__(self) -> Counter:
        return self

    async def __aexit__(self, *error: object) -> None:
        type(self).closed += 1

    async def __call__(self, by: int = 1) -> dict[str, int]:
        """Count up.

        Args:
            by: How much to add.
        """
        self.total += by
        return {"total": self.total}


async def call(tool: Tool, **arguments: object) -> str:
    async with AsyncExitStack() as stack:
        return await tool.call(await tool.open(stack), arguments)


def test_a_tool_stays_a_function() -> None:
    assert midpoint(1, 3) == 2
    assert midpoint.__doc__ is not None
    assert not midpoint.is_stateful


def test_the_schema_comes_from_the_signature_and_the_docstring() -> None:
    function = midpoint.schema["function"]
    assert function["name"] == "midpoint"
    assert function["description"] == "The middle of a range."
    assert function["parameters"]["properties"]["low"] == {"type": "integer", "description": "Smallest candidate."}
    assert function["parameters"]["required"] == ["low"]


def test_a_stateful_tool_is_described_by_its_call_method_without_self() -> None:
    function = Counter.schema["function"]
    assert (function["name"], list(function["parameters"]["properties"])) == ("counter", ["by"])
    assert Counter.stop


async def test_arguments_are_coerced_and_results_are_text() -> None:
    assert await call(midpoint, low="10") == "55"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "low: Field required"),
        ({"low": "many"}, "low: Input should be a valid integer"),
        ({"low": 1, "hihg": 2}, "hihg: Extra inputs are not permitted"),
    ],
)
async def test_wrong_arguments_are_told_to_the_policy(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ToolError, match="expected low, high") as raised:
        await call(midpoint, **arguments)
    assert words in str(raised.value)


async def test_each_episode_gets_its_own_object_and_it_is_closed() -> None:
    before = Counter.target.closed
    async with AsyncExitStack() as stack:
        first, second = await Counter.open(stack), await Counter.open(stack)
        await Counter.call(first, {"by": 2})
        assert await Counter.call(first, {}) == '{"total": 3}'
        assert await Counter.call(second, {}) == '{"total": 1}'
    assert Counter.target.closed == before + 2


def test_a_tool_without_a_docstring_is_refused() -> None:
    def silent(x: int) -> int:
        return x

    with pytest.raises(UsageError, match="silent has no docstring"):
        agentrl.tool(silent)


def test_a_class_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be called"):

        @agentrl.tool
        class Thing:
            """A thing."""


def test_an_argument_without_a_type_is_refused_when_described() -> None:
    @agentrl.tool
    def vague(x):  # type: ignore[no-untyped-def]
        """Do something.

        Args:
            x: Anything.
        """

    with pytest.raises(UsageError, match="vague cannot be described"):
        _ = vague.schema
