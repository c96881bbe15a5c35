"""Mistakes in a module: a small change at one place, like a careless programmer's."""

from __future__ import annotations

import ast
import copy
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
}
_CALLED = {"min": "max", "max": "min"}


class Mutation(NamedTuple):
    """A mistake in one of a module's functions."""

    function: str
    place: int
    """Index of the function among the module's statements."""
    code: str
    """The function with the mistake."""


def mutations(source: str) -> Iterator[Mutation]:
    """Yield every single mistake, in the order of the source."""
    for place, node in enumerate(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef):
            for number in range(sum(1 for _ in _places(node))):
                function = copy.deepcopy(node)
                changed, kind = next(itertools.islice(_places(function), number, None))
                _change(changed, kind)
                yield Mutation(node.name, place, ast.unparse(function))


def with_mistakes(source: str, mistakes: Iterable[Mutation]) -> str:
    """Return a module with mistakes in some of its functions, or none; always in the form of `ast.unparse`."""
    statements = [*_statements(source)]
    for mistake in mistakes:
        statements[mistake.place] = mistake.code
    return "\n".join(f"\n\n{code}" if code.startswith("def ") else code for code in statements).strip() + "\n"


@functools.lru_cache(maxsize=64)
def _statements(source: str) -> tuple[str, ...]:
    return tuple(map(ast.unparse, ast.parse(source).body))


def _places(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, int]]:
    """Yield the possible changes of a function: the node, and the number of the node's change."""
    for node in ast.walk(function):
        for kind in range(_changes(node)):
            yield node, kind


def _changes(node: ast.AST) -> int:
    """Count the possible changes of a node."""
    match node:
        case ast.Compare(ops=ops):
            return sum(type(op) in _COMPARED for op in ops)
        case ast.BinOp(op=op) | ast.AugAssign(op=op):
            return int(type(op) in _COMPUTED)
        case ast.BoolOp():
            return 1
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return 2 if value else 1
        case ast.Call(func=ast.Name(id=name)):
            return int(name in _CALLED)
    return 0


def _change(node: ast.AST, kind: int) -> None:
    match node:
        case ast.Compare(ops=ops):
            place = [number for number, op in enumerate(ops) if type(op) in _COMPARED][kind]
            ops[place] = _COMPARED[type(ops[place])]()
        case ast.BinOp() | ast.AugAssign():
            node.op = _COMPUTED[type(node.op)]()
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.Constant(value=int(value)):
            node.value = value - 1 if kind else value + 1
        case ast.Call(func=ast.Name() as name):
            name.id = _CALLED[name.id]
