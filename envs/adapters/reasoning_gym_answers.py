"""Filter of answers for the score functions of reasoning-gym: only values and formulas may reach those that run code.

Some of these functions pass the answer to `eval`, others to sympy's `parse_expr`, which calls `eval`: both would let
the policy run any code in the training process.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re

FUNCTIONS = frozenset((
    "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "asec", "acsc", "acot", "sinh", "cosh",
    "tanh", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs", "Rational", "Pow", "Mul", "Add",
    "Integral", "erf", "erfi", "Ei", "Si", "Ci", "li", "gamma",
))  # fmt: skip
"""Functions that a formula may call."""
_FORMULA = re.compile(r"[\w\s.+\-*/^()!,]*", re.ASCII)
_CALL = re.compile(r"(\w+|\))\s*\(")
_INERT = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Name, ast.Load, ast.UnaryOp, ast.unaryop,
)  # fmt: skip


def may_be_scored(answer: str, dataset: type) -> bool:
    """Return True if a dataset's score function can score an answer without running code in it.

    Args:
        answer: The policy's answer.
        dataset: The dataset's class.
    """
    source = _source(dataset)
    if "parse_expr(" in source and not _is_formula(answer):
        return False
    return not re.search(r"\beval\(", source) or _is_inert(answer)


@functools.cache
def _source(dataset: type) -> str:
    """Return the source code of the module that defines the class."""
    module = inspect.getmodule(dataset)
    return inspect.getsource(module) if module is not None else "eval("


def _is_formula(answer: str) -> bool:
    """Return True if the answer consists of numbers, names, operators and calls of known functions."""
    return _FORMULA.fullmatch(answer) is not None and FUNCTIONS.issuperset(_CALL.findall(answer))


def _is_inert(answer: str) -> bool:
    """Return True if `eval` would return a name, a constant or a collection of them, or fail before running code."""
    try:
        nodes = list(ast.walk(ast.parse(answer.lstrip(" \t"), mode="eval")))
    except (SyntaxError, ValueError):
        return True
    except (MemoryError, RecursionError):
        return False
    return all(isinstance(node, _INERT) for node in nodes)
