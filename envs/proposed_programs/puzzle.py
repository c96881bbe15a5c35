"""Puzzles, and the texts that propose and solve them: parsing, and the rules that need no execution.

A puzzle holds Python source and literals as text, so that it can be stored, shown and compared. Nothing of a policy's
text is executed here.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..programs.inside.values import NotPlainData, encode
from .options import Kind

FUNCTION = "f"
MAX_PROGRAM_CHARS = 8000
MAX_LITERAL_CHARS = 2000
MAX_MESSAGE_CHARS = 1000
"""Maximum characters of a program, of a literal and of a message."""
MODULES = frozenset(
    (
        *("bisect", "cmath", "collections", "copy", "dataclasses", "enum", "fractions", "functools", "heapq"),
        *("itertools", "math", "operator", "re", "statistics", "string", "textwrap", "typing"),
    )
)
"""Modules that a proposed program may import: deterministic, without files, clocks, processes and networks."""
FORBIDDEN = frozenset(
    (
        *("__import__", "breakpoint", "compile", "delattr", "eval", "exec", "exit", "globals", "hash", "help", "id"),
        *("input", "locals", "open", "print", "quit", "setattr", "vars", "__builtins__", "__globals__", "__loader__"),
        *("__spec__", "__subclasses__", "__code__", "__closure__", "sys", "_sys", "os", "_os"),
    )
)
"""Names and attributes that it may not use: they make it depend on more than its input."""
_BLOCK = re.compile(r"```[ \t]*(\w+)[ \t]*\n(.*?)```", re.DOTALL)
_WORDS = {"py": "python", "python3": "python"}


class PuzzleError(Exception):
    """The text is not a puzzle, or not an answer; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle:
    """A program with inputs and its outputs; one of each unless the kind is induction."""

    kind: Kind
    program: str
    inputs: tuple[str, ...]
    """Arguments of each call, as literals separated by commas."""
    outputs: tuple[str, ...]
    """Return value of each call, as a literal."""
    message: str = ""
    """Message of the proposer to the solver, for induction."""

    @property
    def shown(self) -> int:
        """Number of calls that the solver of an induction sees; it is judged by the others."""
        return len(self.inputs) // 2

    def to_record(self) -> dict[str, Any]:
        """Return the puzzle in plain JSON types."""
        parts = {"program": self.program, "inputs": [*self.inputs], "outputs": [*self.outputs]}
        return {"kind": self.kind.value, **parts, **({"message": self.message} if self.message else {})}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Puzzle:
        """Restore a puzzle from `to_record`."""
        return cls(
            kind=Kind(record["kind"]),
            program=record["program"],
            inputs=tuple(record["inputs"]),
            outputs=tuple(record["outputs"]),
            message=record.get("message", ""),
        )


def blocks(text: str, name: str) -> list[str]:
    r"""Return the fenced blocks of a text that have a name.

    >>> blocks("so:\n```input\n3, 'a'\n```", "input")
    ["3, 'a'"]
    """
    found = [body for word, body in _BLOCK.findall(text) if _WORDS.get(word.lower(), word.lower()) == name]
    return [body.rstrip(" \t").removesuffix("\n") for body in found]


def only_block(text: str, name: str) -> str:
    """Return the only block of a text with a name.

    Raises:
        PuzzleError: there is none, or several.
    """
    found = blocks(text, name)
    if len(found) != 1:
        raise PuzzleError(f"{len(found)} {name} blocks instead of one")
    return found[0].strip("\n")


def last_block(text: str, name: str) -> str:
    """Return the last block of a text with a name.

    Raises:
        PuzzleError: there is none.
    """
    found = blocks(text, name)
    if not found:
        raise PuzzleError(f"there is no {name} block")
    return found[-1].strip("\n")


def read_literal(text: str) -> Any:
    """Return the value of a Python literal.

    Raises:
        PuzzleError: it is not one, too long, or not plain data that a sandbox takes: an ellipsis, or too deeply nested.
    """
    if len(text) > MAX_LITERAL_CHARS:
        raise PuzzleError(f"a value has more than {MAX_LITERAL_CHARS} characters")
    try:
        found = _quietly(ast.literal_eval, text.strip())
        encode(found)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, NotPlainData) as error:
        raise PuzzleError(f"{text[:80]!r} is not a Python literal") from error
    return found


def read_arguments(text: str) -> tuple[Any, ...]:
    """Return the arguments of a call, given as literals separated by commas.

    >>> read_arguments("'ab', [1, 2]")
    ('ab', [1, 2])

    Raises:
        PuzzleError: there are none, or they are not literals.
    """
    found = read_literal(f"({text.strip().rstrip(',')},)")
    if not isinstance(found, tuple):
        raise PuzzleError(f"{text[:80]!r} is not a list of arguments")
    return found


def write_literal(value: Any) -> str:
    """Return a value as a literal that `read_literal` reads.

    Raises:
        PuzzleError: it has no literal, such as a NaN, or too long a one.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError) as error:  # integers of thousands of digits
        raise PuzzleError("a value cannot be written") from error
    if read_literal(text) != value:
        raise PuzzleError("a value has no literal")
    return text


def is_copy(puzzle: Puzzle, other: Puzzle) -> bool:
    """Return True if two puzzles have the same inputs, and programs that differ at most in comments and layout."""
    trees = [ast.dump(_quietly(ast.parse, one.program)) for one in (puzzle, other)]
    return trees[0] == trees[1] and [*map(read_arguments, puzzle.inputs)] == [*map(read_arguments, other.inputs)]


def check_program(program: str) -> str:
    """Check the source of a proposed program without running it; return it without trailing spaces.

    Raises:
        PuzzleError: it is too long, not Python, has no function f with arguments, or uses what it may not use.
    """
    if len(program) > MAX_PROGRAM_CHARS:
        raise PuzzleError(f"the program has more than {MAX_PROGRAM_CHARS} characters")
    try:
        tree = _quietly(ast.parse, program)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise PuzzleError("the program is not valid Python") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == FUNCTION]
    if len(functions) != 1:
        raise PuzzleError(f"the program has {len(functions)} functions named {FUNCTION} instead of one")
    given = functions[0].args
    if not (given.args or given.posonlyargs or given.vararg):
        raise PuzzleError(f"the function {FUNCTION} has no arguments")
    for node in ast.walk(tree):
        _check_node(node)
    return program.rstrip()


def _check_node(node: ast.AST) -> None:
    names: Sequence[str] = ()
    match node:
        case ast.Import(names=aliases):
            modules = [alias.name for alias in aliases]
        case ast.ImportFrom(module=module, names=aliases, level=level):
            modules = ["." * level + (module or "")]
            names = [alias.name for alias in aliases]
        case ast.Name(id=name) | ast.Attribute(attr=name):
            modules, names = [], [name]
        case ast.AsyncFunctionDef() | ast.Global():
            raise PuzzleError("the program uses a coroutine or a global variable")
        case _:
            return
    for module in modules:
        if module.partition(".")[0] not in MODULES:
            raise PuzzleError(f"the program imports {module}, which is not allowed")
    for name in names:
        if name in FORBIDDEN:
            raise PuzzleError(f"the program uses the name {name}, which is not allowed")


def _quietly(parse: Any, text: str) -> Any:
    """Parse a text without warnings about it, such as those about escape sequences."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parse(text)
