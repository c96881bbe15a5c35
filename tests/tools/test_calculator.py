"""The calculator computes arithmetic, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ToolError
from agentrl.registry import Kind, lookup
from agentrl.tool import Tool


def calculate(expression: str) -> str:
    tool = lookup(Kind.TOOL, "calculator")
    assert isinstance(tool, Tool)
    return str(tool(expression))


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * -4", "-20"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ** 10", "1024"),
        ("1 / 8", "0.125"),
        ("sqrt(16) + abs(-1)", "5.0"),
        ("max(3, 5, 4)", "5"),
        ("round(2.71828, 2)", "2.72"),
        (" 1 ", "1"),
    ],
)
def test_arithmetic(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("2 +", "not an arithmetic expression"),
        ("__import__('os')", "only arithmetic"),
        ("(1).real", "only arithmetic"),
        ("'a' * 3", "only arithmetic"),
        ("True + 1", "only arithmetic"),
        ("9 ** 9 ** 9", "too large"),
        ("9 ** 400 * 9 ** 1200", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("sqrt(-1)", "cannot compute"),
        ("sqrt(1, 2)", "cannot compute"),
        ("1e308 ** 2", "cannot compute"),
        ("1+" * 300 + "1", "too long"),
        ("", "not an arithmetic expression"),
    ],
)
def test_what_it_cannot_do_is_told_to_the_policy(expression: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        calculate(expression)


@given(st.text(alphabet="0123456789+-*/%(). episqrtmax,", max_size=40))
def test_any_text_gives_a_number_or_a_tool_error(expression: str) -> None:
    try:
        result = calculate(expression)
    except ToolError:
        return
    assert float(result) is not None


def test_the_schema_describes_the_argument() -> None:
    function = lookup(Kind.TOOL, "calculator").schema["function"]
    assert function["name"] == "calculator"
    assert list(function["parameters"]["properties"]) == ["expression"]
    assert "arithmetic" in function["description"]
