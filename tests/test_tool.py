from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

import agentrl
from agentrl.errors import ConfigError, EnvironmentFailure, ToolError, UsageError
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
        ({}, "low is missing"),
        ({"low": "many"}, 'low is "many", expected a whole number'),
        ({"low": 1, "hihg": 2}, "unknown argument hihg (did you mean high?)"),
    ],
)
async def test_wrong_arguments_are_reported_to_the_policy(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ToolError, match=r"; it takes: low \(a whole number\), high \(.*optional\)") as raised:
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


def test_tool_without_a_docstring_is_rejected() -> None:
    def silent(x: int) -> int:
        return x

    with pytest.raises(UsageError, match="silent has no docstring"):
        agentrl.tool(silent)


async def stream() -> Any:
    """Tell one after the other."""
    yield 1


def series() -> Any:
    """Tell one after the other."""
    yield 1


@pytest.mark.parametrize("function", [stream, series])
def test_generator_function_is_rejected(function: Any) -> None:
    with pytest.raises(UsageError, match="is a generator: got yield, expected a function that returns"):
        agentrl.tool(function)


@pytest.mark.parametrize("value", ["a\ud800b", {"x": "a\ud800b"}])
def test_unencodable_characters_are_replaced(value: object) -> None:
    assert "a\ufffdb" in agentrl.ToolResult(value).text


def test_class_that_is_not_callable_is_rejected() -> None:
    with pytest.raises(UsageError, match="cannot be called"):

        @agentrl.tool
        class Thing:
            """A thing."""


def test_argument_without_a_type_is_rejected_by_the_schema() -> None:
    @agentrl.tool
    def vague(x):  # type: ignore[no-untyped-def]
        """Do something.

        Args:
            x: Anything.
        """

    with pytest.raises(UsageError, match=r"^tool vague has an argument without a type: got x, .* such as x: int$"):
        _ = vague.schema


def test_a_method_that_has_no_object_is_refused_with_a_hint() -> None:
    class Counter:
        def count(self, by: int) -> int:
            """Count.

            Args:
                by: Difference.
            """
            return by

    with pytest.raises(UsageError, match=r"count has an argument without a type: got self, .* method of an object"):
        _ = agentrl.tool(Counter.count).schema


def test_an_argument_that_json_cannot_express_is_named() -> None:
    @agentrl.tool
    def apply(times: int, function: Callable[[int], int]) -> int:
        """Apply.

        Args:
            times: How often.
            function: What.
        """
        return function(times)

    with pytest.raises(UsageError, match=r"type that JSON does not support: got function: .*Callable"):
        _ = apply.schema


def test_constraints_that_do_not_fit_a_type_are_named() -> None:
    @agentrl.tool
    def turn(amount: Annotated[int, Field(lt=3.5)]) -> str:
        """Turn.

        Args:
            amount: How far.
        """
        return str(amount)

    with pytest.raises(
        UsageError, match=r"a type of tool turn has wrong bounds: got 'lt' must be coercible to an integer"
    ):
        _ = turn.schema


def test_unknown_type_is_reported_once() -> None:
    @agentrl.tool
    def lost(x: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821
        """Look for something.

        Args:
            x: What.
        """
        return str(x)

    with pytest.raises(UsageError, match=r"^tool lost: a type hint cannot be read: got NameError"):
        _ = lost.schema


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class Item(BaseModel):
    name: str
    count: int = 1


@agentrl.tool
def order(
    items: list[Item],
    size: Size = Size.SMALL,
    note: str | None = None,
    copy: Annotated[int, Field(ge=1)] = 1,
    schema: float = 0.5,
) -> list[object]:
    """Order things.

    Args:
        items: What is ordered.
        size: Of the box.
        note: For the packer.
        copy: How often.
        schema: A name that pydantic's models have, too.
    """
    return [[item.name for item in items], size.value, note, copy, schema]


def test_models_enums_and_bounds_are_described() -> None:
    parameters = order.schema["function"]["parameters"]
    assert parameters["properties"]["size"]["enum"] == ["small", "large"]
    assert parameters["properties"]["copy"] == {"type": "integer", "minimum": 1, "description": "How often."}
    assert parameters["$defs"]["Item"]["required"] == ["name"]
    assert parameters["required"] == ["items"]


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ({"items": [{"name": "a"}]}, '[["a"], "small", null, 1, 0.5]'),
        ({"items": '[{"name": "a"}]', "size": "large"}, '[["a"], "large", null, 1, 0.5]'),
        ({"items": [], "copy": None, "size": None}, '[[], "small", null, 1, 0.5]'),
        ({"items": [{"name": "5"}], "note": 7, "copy": "2", "schema": "1"}, '[["5"], "small", "7", 2, 1.0]'),
    ],
)
async def test_model_arguments_are_coerced(arguments: dict[str, object], result: str) -> None:
    assert await call(order, **arguments) == result


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"items": "a"}, 'items is "a", expected a list'),
        ({"items": [{"count": 2}]}, "items.0.name is missing"),
        ({"items": [], "copy": 0}, "copy is 0, expected greater than or equal to 1"),
        ({"items": [], "size": "huge"}, "size is \"huge\", expected 'small' or 'large'"),
        ({"items": [], "nte": "x", "schema": "y"}, 'schema is "y", expected a number; unknown argument nte'),
        ({"items": [], "schema": "nan"}, 'schema is "nan", expected a finite number'),
        ({"items": [], "schema": 1e999}, "schema is Infinity, expected a finite number"),
        ({"items": [], "schema": "-inf"}, 'schema is "-inf", expected a finite number'),
        ({"items": "x" * 500}, "x…, expected a list"),
    ],
)
async def test_error_names_each_wrong_argument(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ToolError) as raised:
        await call(order, **arguments)
    assert words in str(raised.value)


async def test_error_lists_the_arguments_of_the_tool() -> None:
    with pytest.raises(ToolError) as raised:
        await call(order)
    assert 'size (one of "small", "large", optional), note (text or null, optional)' in str(raised.value)


def test_unnamed_arguments_are_rejected() -> None:
    def loose(*numbers: int) -> int:
        """Add."""
        return sum(numbers)

    with pytest.raises(UsageError, match=r"tool loose has arguments that cannot be passed by name: got \*numbers,"):
        agentrl.tool(loose)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"stop": True, "pure": True}, "cannot be parallel or pure"),
        ({"timeout_s": 0}, "timeout_s is too small"),
        ({"max_concurrent": -1}, "max_concurrent is too small"),
        ({"max_tokens": 1.5}, "max_tokens is not valid: got 1.5, expected a whole number"),
        ({"timeout_s": "5"}, "timeout_s is not valid: got '5', expected a number"),
        ({"parallel": "yes"}, "parallel is not valid: got 'yes', expected a bool"),
        ({"timeout": 5}, r"tool midpoint has an unknown rule: got timeout, .* Did you mean 'timeout_s"),
        ({"name": "weird name!"}, "a tool's name is not valid: got 'weird name!', expected 1 to 64 letters"),
        ({"name": ""}, "a tool's name is not valid: got '', expected 1 to 64 letters"),
    ],
)
def test_contradictory_rules_are_rejected(rules: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        agentrl.tool(**rules)(midpoint.target)


def test_uncallable_object_is_not_a_tool() -> None:
    with pytest.raises(UsageError, match="not a valid tool: got 5, expected a function"):
        agentrl.tool(5)  # type: ignore[call-overload]


def test_a_stateful_tool_is_not_pure() -> None:
    with pytest.raises(UsageError, match="is stateful and cannot be pure"):
        agentrl.tool(pure=True)(Counter.target)


class Shop:
    def __init__(self, stock: int, *, context: agentrl.ToolContext, open_late: bool = False) -> None:
        self.stock, self.context, self.open_late = stock, context, open_late

    def __call__(self, what: str) -> agentrl.ToolResult:
        """Buy something.

        Args:
            what: The thing.
        """
        return agentrl.ToolResult({"bought": what, "left": self.stock - 1}, reward=0.5, metrics={"sold": 1})


def test_runtime_parameters_are_hidden_from_the_policy_and_from_configs() -> None:
    shop = agentrl.tool(Shop)
    assert list(shop.schema["function"]["parameters"]["properties"]) == ["what"]
    assert shop.with_options({"stock": "3"}).options == {"stock": 3, "open_late": False}
    assert not shop.needs_sandbox


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "stock is missing"),
        ({"stock": 3, "open_lat": True}, r"unknown argument open_lat \(did you mean open_late"),
        ({"stock": "many"}, 'stock is "many", expected a whole number'),
        ({"stock": 3, "context": 5}, "unknown argument context"),
    ],
)
def test_wrong_options_are_errors_of_the_config(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        agentrl.tool(Shop).with_options(options)


def test_a_function_has_no_options() -> None:
    with pytest.raises(ConfigError, match="tool midpoint has no options: got low"):
        midpoint.with_options({"low": 1})


async def test_tool_that_needs_an_episode_raises_outside_one() -> None:
    shop = agentrl.tool(Shop).with_options({"stock": 3})
    with pytest.raises(UsageError, match="needs a context"):
        await call(shop, what="tea")


@pytest.mark.parametrize("reward", [float("nan"), "much", True])
async def test_a_reward_that_is_no_number_is_no_reward(reward: Any) -> None:
    @agentrl.tool
    def pay() -> agentrl.ToolResult:
        """Pay."""
        return agentrl.ToolResult("paid", reward=reward)

    with pytest.raises(EnvironmentFailure, match="reward of tool pay is"):
        await call(pay)
