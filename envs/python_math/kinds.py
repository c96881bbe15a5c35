"""Kinds of problems that a program solves most easily, in addition to those of `math_problems`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from ..math_problems.kinds import KINDS as WORDED

CODED = "coded"
TOLD = "told"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedKind:
    """A kind whose answer is a Python expression."""

    name: str
    text: str
    working: str
    numbers: Mapping[str, tuple[int, int]]


KINDS = (
    CodedKind(
        name="multiples",
        text="How many whole numbers from 1 to {a} are divisible by {b} or by {c}, but not by {d}?",
        working="sum(1 for n in range(1, {a} + 1) if (n % {b} == 0 or n % {c} == 0) and n % {d} != 0)",
        numbers={"a": (200, 3000), "b": (3, 9), "c": (10, 17), "d": (2, 7)},
    ),
    CodedKind(
        name="digits",
        text="What is the sum of the digits of {a} to the power of {b}?",
        working="sum(int(digit) for digit in str({a} ** {b}))",
        numbers={"a": (3, 99), "b": (20, 120)},
    ),
    CodedKind(
        name="primes",
        text="What is the sum of all primes between {a} and {b}?",
        working="sum(n for n in range(max({a}, 2), {b} + 1) if all(n % k for k in range(2, int(n ** 0.5) + 1)))",
        numbers={"a": (10, 400), "b": (500, 1500)},
    ),
    CodedKind(
        name="pairs",
        text="How many pairs of whole numbers x and y with 1 <= x < y <= {a} have a product that leaves the rest {b}"
        " when it is divided by {c}?",
        working="sum(1 for y in range(1, {a} + 1) for x in range(1, y) if x * y % {c} == {b})",
        numbers={"a": (20, 90), "b": (0, 4), "c": (5, 13)},
    ),
    CodedKind(
        name="recurrence",
        text="A sequence begins with {a} and {b}. Each further number is the one before it plus {c} times the one"
        " before that, modulo {d}. What is the {e}th number of the sequence?",
        working=(
            "__import__('functools').reduce("
            "lambda p, _: (p[1], (p[1] + {c} * p[0]) % {d}), range({e} - 1), ({a}, {b}))[0]"
        ),
        numbers={"a": (1, 9), "b": (1, 9), "c": (2, 9), "d": (90, 999), "e": (24, 94)},
    ),
    CodedKind(
        name="paths",
        text="From the lower left to the upper right corner of a board of {a} by {b} squares, moving right or up along"
        " the lines: how many shortest ways are there?",
        working="__import__('math').comb({a} + {b}, {a})",
        numbers={"a": (3, 12), "b": (3, 12)},
    ),
)


class GeneratedProblem(NamedTuple):
    """A generated problem."""

    question: str
    answer: str
    kind: str
    program: str
    """Code that prints the answer."""


def draw(random: Random, kinds: str | None) -> GeneratedProblem:
    """Draw a problem of any kind, of a kind that needs a program (``coded``), or of the others (``told``)."""
    coded = random.random() < 0.5 if kinds is None else kinds == CODED
    if coded:
        kind = random.choice(KINDS)
        numbers = {name: random.randint(low, high) for name, (low, high) in kind.numbers.items()}
        working = kind.working.format(**numbers)
        value = eval(working, {"__builtins__": __builtins__, "math": math})
        return GeneratedProblem(kind.text.format(**numbers), str(value), kind.name, f"print({working})")
    worded = random.choice(WORDED)
    found = worded.draw(random)
    exact = re.sub(r"\d+", r"F(\g<0>)", worded.working.format(**found))
    program = f"from fractions import Fraction as F\nprint({exact})"
    return GeneratedProblem(worded.text.format(**found), str(worded.answer(found)), worded.name, program)
