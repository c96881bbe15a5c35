"""Arithmetic for the policy: expressions are walked as a syntax tree, never evaluated as code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import TypeAlias

from agentrl import ToolError, tool

Number: TypeAlias = int | float

MAX_CHARACTERS = 500
MAX_BITS = 4096
"""Maximum size of a whole number in bits, so that ``9**9**9`` does not exhaust time and memory."""

_BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "log": math.log,
    "max": max,
    "min": min,
    "round": round,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}
_CONSTANTS: Mapping[str, float] = {"pi": math.pi, "e": math.e}


@tool(inline=True, parallel=True)
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression, for example "(3 + 4) * sqrt(2)".

    Args:
        expression: Numbers, + - * / // % **, parentheses, pi, e, and the functions abs, ceil, cos, exp, floor, log,
            max, min, round, sin, sqrt, tan.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError("the expression is too long", got=f"{len(expression)} characters", expected=MAX_CHARACTERS)
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ToolError("this is not an arithmetic expression", got=repr(expression)) from error
    try:
        value = _evaluate(tree.body)
    except (ArithmeticError, ValueError, TypeError, RecursionError) as error:
        raise ToolError(f"cannot compute {expression!r}", got=str(error)) from error
    return str(value)


def _evaluate(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _combine(op, _evaluate(left), _evaluate(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_evaluate, arguments))
    raise ToolError("only arithmetic is allowed", got=ast.unparse(node), expected=calculator_vocabulary())


def _combine(op: ast.operator, left: Number, right: Number) -> Number:
    if isinstance(op, ast.Pow) and isinstance(left, int) and isinstance(right, int):
        _check_size(left.bit_length() * max(right, 0))
    if isinstance(op, ast.Mult) and isinstance(left, int) and isinstance(right, int):
        _check_size(left.bit_length() + right.bit_length())
    value = _BINARY[type(op)](left, right)
    if isinstance(value, complex):
        raise ToolError("the result is not a real number", got=value)
    return value


def _check_size(bits: int) -> None:
    if bits > MAX_BITS:
        raise ToolError("the number is too large", got=f"about {bits} bits", expected=f"at most {MAX_BITS}")


def calculator_vocabulary() -> str:
    """List the allowed elements of an expression, for error messages."""
    return f"numbers, + - * / // % **, {', '.join([*_CONSTANTS, *_FUNCTIONS])}"
