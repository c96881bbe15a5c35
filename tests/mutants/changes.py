"""Small wrong changes of a source file: cosmic-ray's operators and three custom ones."""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider

PAIRS = (
    "Binary: Add_Sub Sub_Add Mul_Div Mul_Add Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul BitOr_BitAnd BitAnd_BitOr "
    "Comparison: Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is "
    "Unary: USub_UAdd Delete_Invert Delete_Not"
)
OTHERS = (
    "AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd ReplaceBreakWithContinue "
    "ReplaceContinueWithBreak ExceptionReplacer NumberReplacer ZeroIterationForLoop"
)


class _Leaf(Operator):
    """Operator that replaces one leaf by another."""

    replacements: ClassVar[dict[str, str]]

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if getattr(node, "value", None) in self.replacements and self.fits(node):
            yield node.start_pos, node.end_pos

    def fits(self, node: Any) -> bool:
        return True

    def mutate(self, node: Any, index: int) -> Any:
        node.value = self.replacements[node.value]
        return node

    @classmethod
    def examples(cls) -> Sequence[Any]:
        return ()


class SwapExtreme(_Leaf):
    """Operator that calls the function or method with the opposite meaning."""

    replacements: ClassVar = {"min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin"}

    def fits(self, node: Any) -> bool:
        after = node.get_next_leaf()
        return node.type == "name" and after is not None and after.value == "("


class AssignPlainly(_Leaf):
    """Operator that replaces an augmented assignment by a plain one."""

    replacements: ClassVar = {"+=": "=", "-=": "=", "*=": "=", "|=": "=", "&=": "="}


class RemoveCall(Operator):
    """Operator that removes a call whose result is not used."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "simple_stmt" and node.children[0].type in ("atom_expr", "power", "await_expr"):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        call = node.children[0]
        node.children[0] = parso.python.tree.Name("pass", call.start_pos, prefix=call.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> Sequence[Any]:
        return ()


def operators() -> dict[str, Operator]:
    """Return the operators by name: boundaries and opposites only, because larger changes are always noticed."""
    library, kind, found = OperatorProvider(), "", {}
    for word in PAIRS.split():
        if word.endswith(":"):
            kind = word[:-1]
        else:
            name = f"Replace{kind}Operator_{word}"
            found[name] = library[name]()
    found |= {name: library[name]() for name in OTHERS.split()}
    return found | {type(own).__name__: own for own in (SwapExtreme(), AssignPlainly(), RemoveCall())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One wrong change of one function."""

    path: str
    function: str
    """Qualified name of the outermost function around it, without the module."""
    first_line: int
    """First line of that function's code."""
    before: str
    """The changed lines."""
    after: str
    source: str
    """The whole changed file."""
    diff: str


def sample(tree: Path, paths: Sequence[str], count: int | None, seed: int) -> tuple[list[Change], int]:
    """Draw changes, at most one per place, or all without a count; return them and the number of places.

    A place is one position in a file; if several changes are possible there, one is drawn. Error messages, log messages
    and annotations are not changed: no test should depend on them. Whether a place is drawn depends only on the place,
    so edits elsewhere do not change the sample.
    """
    places = sorted((place for path in paths for place in _places(tree, path)), key=lambda place: place.rank(seed))
    taken: list[Change] = []
    for place in places:
        if count is not None and len(taken) >= count:
            break
        ways = list(place.ways)
        random.Random(place.rank(seed)).shuffle(ways)
        change = next((found for way in ways if (found := _change(tree, place, *way)) is not None), None)
        if change is not None:
            taken.append(change)
    return taken, len(places)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    path: str
    ways: list[tuple[str, int]]
    """Names of operators with the index of their occurrence."""
    line: int
    text: str
    """Column and line of code, and the number of equal ones before it in the file."""

    def rank(self, seed: int) -> str:
        """Return the sort key of the draw."""
        return hashlib.sha256(f"{seed} {self.path} {self.text}".encode()).hexdigest()


def _places(tree: Path, path: str) -> list[_Place]:
    source = (tree / path).read_text()
    excluded, functions = _excluded(source), [_lines(code) for code in outermost_functions(source, path)]
    found: dict[tuple[int, int], _Place] = {}
    lines, texts = source.splitlines(), Counter[str]()
    parsed = get_ast(source)
    for name, operator in operators().items():
        occurrence = 0
        for node in ast_nodes(parsed):
            for start, _ in operator.mutation_positions(node):
                is_inside = any(first <= start[0] <= last for first, last in functions)
                if is_inside and not any(first <= start < last for first, last in excluded):
                    place = found.setdefault(start, _Place(path=path, ways=[], line=start[0], text=""))
                    place.ways.append((name, occurrence))
                occurrence += 1
    numbered = []
    for start in sorted(found):
        text = f"{start[1]} {lines[start[0] - 1]}"
        numbered.append(replace(found[start], text=f"{text} {texts[text]}"))
        texts[text] += 1
    return numbered


def _change(tree: Path, place: _Place, operator: str, occurrence: int) -> Change | None:
    """Return the change, or None if it does not change code: annotations are not part of the code."""
    source = (tree / place.path).read_text()
    try:
        changed = mutate_code(source, operators()[operator], occurrence)
    except AttributeError:  # of `except (OSError, module.Error)`, cosmic-ray can replace the first only
        return None
    old = next(code for code in outermost_functions(source, place.path) if _contains(code, place.line))
    try:
        news = outermost_functions(changed, place.path)
    except SyntaxError:
        return None
    new = next((code for code in news if _name_of(code) == _name_of(old)), None)
    if new is None or new == old or new.co_freevars != old.co_freevars:
        return None
    lines = list(
        difflib.unified_diff(source.splitlines(), changed.splitlines(), place.path, place.path, lineterm="", n=2)
    )
    return Change(
        path=place.path,
        function=old.co_qualname,
        first_line=old.co_firstlineno,
        before="\n".join(line[1:].strip() for line in lines[2:] if line.startswith("-")),
        after="\n".join(line[1:].strip() for line in lines[2:] if line.startswith("+")),
        source=changed,
        diff="\n".join(lines),
    )


NOTE = "__note_call__"
"""Name of the built-in function that notes a call."""


def with_notes(source: str, path: str) -> ast.Module:
    """Return the module with a call of `NOTE` at the start of each outermost function: with the path and its name."""
    module = ast.parse(source)
    _add_notes(module, path, "")
    return ast.fix_missing_locations(module)


def _add_notes(node: ast.AST, path: str, prefix: str) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for outside in (child.args, *child.decorator_list):
                _add_notes(outside, path, prefix)
            child.body.insert(0, ast.copy_location(ast.Expr(_note(path, prefix + child.name)), child.body[0]))
        elif isinstance(child, ast.Lambda):
            both = ast.Tuple([_note(path, f"{prefix}<lambda>"), child.body], ast.Load())
            child.body = ast.copy_location(ast.Subscript(both, ast.Constant(1), ast.Load()), child.body)
        else:
            _add_notes(child, path, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)


def _note(path: str, function: str) -> ast.Call:
    return ast.Call(ast.Name(NOTE, ast.Load()), [ast.Constant(f"{path}:{function}")], [])


def outermost_functions(source: str | ast.Module, path: str) -> list[CodeType]:
    """Return the code of the functions of a module and its classes; nested functions are part of the outer ones."""
    found: list[CodeType] = []
    around = [compile(source, path, "exec", dont_inherit=True)]
    while around:
        for inner in around.pop().co_consts:
            if isinstance(inner, CodeType):
                (found if inner.co_flags & inspect.CO_OPTIMIZED else around).append(inner)
    return found


def _name_of(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _lines(code: CodeType) -> tuple[int, int]:
    """Return the first and last line of a function's code."""
    last = code.co_firstlineno
    pending = [code]
    while pending:
        one = pending.pop()
        last = max([last, *(end for _, end, _, _ in one.co_positions() if end is not None)])
        pending += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
    return code.co_firstlineno, last


def _contains(code: CodeType, line: int) -> bool:
    first, last = _lines(code)
    return first <= line <= last


def _excluded(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return ranges on which no test should depend: arguments of raised errors, log calls; and parameter lists."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found += [(_start(word), _end(word)) for word in (*node.exc.args, *node.exc.keywords)]
        elif isinstance(node, ast.Expr) and ast.unparse(node.value).startswith(("_log.", "logging.")):
            found.append((_start(node), _end(node)))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((_start(node), _start(node.body[0])))
    return found


def _start(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset
