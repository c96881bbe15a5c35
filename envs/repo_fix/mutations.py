"""Mistakes in a module: one place changed, as somebody in a hurry would."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
    """A module with a mistake in one of its functions."""

    function: str
    source: str


def mutations(source: str) -> Iterator[Mutation]:
    """Every single mistake, in the order of the source; what is left of the source is as `ast.unparse` writes it."""
    for number in range(sum(1 for _ in _places(ast.parse(source)))):
        tree = ast.parse(source)
        function, node, kind = list(_places(tree))[number]
        _change(node, kind)
        yield Mutation(function, tidy(ast.unparse(tree)))


def tidy(source: str) -> str:
    """A module in the same form whether it was changed or not."""
    return ast.unparse(ast.parse(source)).replace("\n\ndef ", "\n\n\ndef ").strip() + "\n"


def _places(tree: ast.Module) -> Iterator[tuple[str, ast.AST, int]]:
    """Where something can be changed: the function, the node, and which of the node's changes."""
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            for kind in range(_changes(node)):
                yield function.name, node, kind


def _changes(node: ast.AST) -> int:
    """How many changes of a node there are."""
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
