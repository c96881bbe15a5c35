"""Kinds of generated problems: a text with numbers, and the expression of the answer."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from ..puzzles.arithmetic import Value, compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of problem."""

    name: str
    level: int
    """1: one step; 2: several steps; 3: fractions, or working backwards."""
    text: str
    """Template with a placeholder for each number."""
    working: str
    """Expression of the answer, with the same placeholders."""
    numbers: Mapping[str, tuple[int, int]]
    """Range of each number."""

    def draw(self, rng: Random) -> dict[str, int]:
        """Draw numbers whose answer is not negative, and is whole unless the level is 3."""
        while True:
            drawn = {name: rng.randint(low, high) for name, (low, high) in self.numbers.items()}
            value = self.answer(drawn)
            if value.over * value.under >= 0 and (self.level == 3 or value.over % value.under == 0):
                return drawn

    def answer(self, drawn: Mapping[str, int]) -> Value:
        """Return the answer for some numbers."""
        return compute(self.working.format(**drawn)).value

    def read(self, text: str) -> dict[str, int] | None:
        """Return the numbers of a problem of this kind; ``None`` for any other text.

        >>> KINDS[0].read("What is 3 + 4 * 5?")
        {'a': 3, 'b': 4, 'c': 5}
        """
        found = _pattern(self.text).fullmatch(text)
        return {name: int(number) for name, number in found.groupdict().items()} if found else None


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(text)), re.ASCII)


KINDS = (
    Kind(
        name="sum and product",
        level=1,
        text="What is {a} + {b} * {c}?",
        working="{a} + {b} * {c}",
        numbers={"a": (10, 999), "b": (3, 99), "c": (3, 99)},
    ),
    Kind(
        name="difference",
        level=1,
        text="A library has {a} books. {b} of them are lent out, and {c} are being repaired. How many are on the"
        " shelves?",
        working="{a} - {b} - {c}",
        numbers={"a": (200, 2000), "b": (20, 900), "c": (2, 99)},
    ),
    Kind(
        name="sharing",
        level=1,
        text="{a} apples are packed into boxes of {b}. How many boxes are filled?",
        working="{a} / {b}",
        numbers={"a": (20, 600), "b": (3, 24)},
    ),
    Kind(
        name="shopping",
        level=2,
        text="Mira buys {a} pens at {b} cents each and {c} books at {d} cents each. She pays with {e} cents. How many"
        " cents does she get back?",
        working="{e} - {a} * {b} - {c} * {d}",
        numbers={"a": (2, 9), "b": (20, 90), "c": (1, 5), "d": (200, 900), "e": (2000, 6000)},
    ),
    Kind(
        name="weeks",
        level=2,
        text="A baker bakes {a} loaves on each of {b} days of the week and {c} on each of the other days. How many"
        " loaves is that in {d} weeks?",
        working="({a} * {b} + {c} * (7 - {b})) * {d}",
        numbers={"a": (20, 90), "b": (2, 5), "c": (10, 60), "d": (2, 9)},
    ),
    Kind(
        name="meeting",
        level=2,
        text="Two trains leave from towns that are {a} km apart and drive towards each other at {b} km/h and {c} km/h."
        " After how many hours do they meet?",
        working="{a} / ({b} + {c})",
        numbers={"a": (100, 1200), "b": (40, 120), "c": (40, 120)},
    ),
    Kind(
        name="percent",
        level=2,
        text="A coat costs {a} dollars. Its price falls by {b} percent and then by another {c} dollars. How many"
        " dollars does it cost now?",
        working="{a} * (100 - {b}) / 100 - {c}",
        numbers={"a": (40, 400), "b": (5, 60), "c": (1, 15)},
    ),
    Kind(
        name="equation",
        level=3,
        text="Solve for x: {a} * x + {b} = {c}",
        working="({c} - {b}) / {a}",
        numbers={"a": (2, 19), "b": (1, 60), "c": (20, 400)},
    ),
    Kind(
        name="fractions",
        level=3,
        text="What is {a}/{b} + {c}/{d}, as a fraction?",
        working="{a} / {b} + {c} / {d}",
        numbers={"a": (1, 12), "b": (2, 15), "c": (1, 12), "d": (2, 15)},
    ),
    Kind(
        name="working together",
        level=3,
        text="One pump fills a tank in {a} hours, another one in {b} hours. How many hours do they take together?",
        working="{a} * {b} / ({a} + {b})",
        numbers={"a": (2, 24), "b": (2, 24)},
    ),
    Kind(
        name="mean",
        level=3,
        text="The mean of {a} numbers is {b}. One more number, {c}, is added to them. What is the mean now?",
        working="({a} * {b} + {c}) / ({a} + 1)",
        numbers={"a": (3, 12), "b": (10, 90), "c": (10, 200)},
    ),
)
