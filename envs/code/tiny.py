"""Generated functions of one line over three numbers: a grammar that an untrained model can learn."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from ..programs.judging import Case
from .problem import Problem

FUNCTION = "f"
PARAMETERS = ("a", "b", "c")
HIDDEN = 8
LOWEST, HIGHEST = -9, 20
_NUMBERS = tuple(map(str, range(2, 10)))


class Operation(NamedTuple):
    """Operation on two numbers."""

    first: str
    """Description as the first step."""
    then: str
    """Description as a later step."""
    code: str
    commutes: bool


OPERATIONS = (
    Operation("{x} plus {y}", "add {y}", "{x} + {y}", True),
    Operation("{x} minus {y}", "subtract {y}", "{x} - {y}", False),
    Operation("{x} times {y}", "multiply by {y}", "{x} * {y}", True),
    Operation("the larger of {x} and {y}", "the larger of that and {y}", "max({x}, {y})", True),
    Operation("the smaller of {x} and {y}", "the smaller of that and {y}", "min({x}, {y})", True),
)
_SUMS, _TIMES = OPERATIONS[:2], OPERATIONS[2]


class Line(NamedTuple):
    """A function of the grammar."""

    words: str
    code: str
    level: int


@functools.cache
def lines() -> Sequence[Line]:
    """Return all functions of the grammar, each once."""
    return [line for one in _first_steps() for line in (Line(one[0].words, one[0].code, 1), *_second_steps(*one))]


def _first_steps() -> Iterator[tuple[Line, bool, tuple[str, str]]]:
    """Yield each first step, true if it binds weaker than a product, and its operands."""
    for operation in OPERATIONS:
        for x, y in itertools.product(PARAMETERS, (*PARAMETERS, *_NUMBERS)):
            if x == y or (operation.commutes and y in PARAMETERS and y < x):
                continue
            line = Line(operation.first.format(x=x, y=y), operation.code.format(x=x, y=y), 1)
            yield line, operation in _SUMS, (x, y)


def _second_steps(first: Line, is_loose: bool, operands: tuple[str, str]) -> Iterator[Line]:
    for operation in OPERATIONS:
        for y in (*PARAMETERS, *_NUMBERS):
            if y not in operands and not _is_constant(first.code, operands[1], operation.code, y):
                inner = f"({first.code})" if is_loose and operation is _TIMES else first.code
                words = f"{first.words}, then {operation.then.format(y=y)}"
                yield Line(words, operation.code.format(x=inner, y=y), 2)


def _is_constant(first: str, x: str, then: str, y: str) -> bool:
    """Return True if the result does not depend on the arguments, as in ``max(min(a, 3), 5)``."""
    if x in PARAMETERS or y in PARAMETERS:
        return False
    clipped = first[:3], then[:3]
    return (clipped == ("min", "max") and int(y) >= int(x)) or (clipped == ("max", "min") and int(y) <= int(x))


def problem_of(line: Line, task_id: str) -> Problem:
    """Return the problem whose solution is a function of the grammar."""
    header = f"def {FUNCTION}({', '.join(PARAMETERS)}):"
    return Problem(
        id=task_id,
        statement=f"Write {FUNCTION}({', '.join(PARAMETERS)}): take {line.words}.",
        function=FUNCTION,
        header=header,
        hidden=_cases(line, Random(f"code {task_id} {line.code}")),
        solution=f"return {line.code}",
        type="one operation" if line.level == 1 else "two operations",
    )


def _cases(line: Line, random: Random) -> tuple[Case, ...]:
    """Draw cases that no single parameter or constant passes, with as many different values as possible."""
    function: Any = eval(f"lambda {', '.join(PARAMETERS)}: {line.code}", {"max": max, "min": min})
    for wanted in itertools.chain(range(HIDDEN, 2, -1), itertools.repeat(2)):
        drawn = [tuple(random.randint(LOWEST, HIGHEST) for _ in PARAMETERS) for _ in range(HIDDEN)]
        values = [function(*arguments) for arguments in drawn]
        columns = [list(column) for column in zip(*drawn, strict=True)]
        if len(set(values)) >= wanted and values not in columns:
            break
    cases = zip(drawn, values, strict=True)
    return tuple(Case(call=FUNCTION, arguments=arguments, value=value) for arguments, value in cases)
