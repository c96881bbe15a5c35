"""The four operations, for the desk's tool `calculate`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from agentrl.errors import ToolError

MAX_CHARACTERS = 200

_OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """Return the value of an expression, rounded to cents.

    >>> calculate("(19.99 + 5) * 2")
    '49.98'

    Raises:
        ToolError: it contains anything except numbers, + - * / and parentheses.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError("the expression is too long", got=f"{len(expression)} characters", expected=MAX_CHARACTERS)
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return f"{value:.2f}".removesuffix(".00")
    except (SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
        raise ToolError("cannot calculate this", got=repr(expression), expected="numbers, + - * / ( )") from error


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
    raise ValueError(ast.unparse(node))
