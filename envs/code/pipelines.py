"""Generated functions of a few steps over a list; each step is a sentence and a line of code."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from ..programs.judging import Case
from .problem import Problem

FUNCTION = "solve"
EXAMPLES, HIDDEN = 3, 10
VARIED = 3
"""Minimum number of distinct return values of the hidden cases."""
NUMBERS, WORDS, END = "numbers", "words", "end"
WORD_LIST = (
    "apple",
    "river",
    "stone",
    "cloud",
    "maple",
    "tiger",
    "ocean",
    "eagle",
    "lemon",
    "piano",
    "amber",
    "zebra",
    "ivory",
    "otter",
    "usher",
    "queen",
    "kayak",
    "level",
    "noon",
    "ant",
    "bee",
    "oak",
    "sky",
    "elm",
    "yak",
    "gnu",
    "ice",
    "urn",
    "fox",
)
_TYPES = {NUMBERS: "a list of whole numbers", WORDS: "a list of words"}


class Step(NamedTuple):
    """A step that changes the list."""

    before: str
    """Type of the list's items before the step."""
    after: str
    words: str
    code: str
    """An expression over ``items``."""
    low: int = 0
    high: int = 0
    """Range of the number ``k``, if the step has one."""


STEPS = (
    Step(NUMBERS, NUMBERS, "keep the even numbers", "[x for x in items if x % 2 == 0]"),
    Step(NUMBERS, NUMBERS, "keep the odd numbers", "[x for x in items if x % 2 == 1]"),
    Step(NUMBERS, NUMBERS, "keep the numbers greater than {k}", "[x for x in items if x > {k}]", -5, 12),
    Step(NUMBERS, NUMBERS, "keep the numbers less than {k}", "[x for x in items if x < {k}]", 4, 20),
    Step(NUMBERS, NUMBERS, "drop the multiples of {k}", "[x for x in items if x % {k} != 0]", 3, 7),
    Step(NUMBERS, NUMBERS, "add {k} to each number", "[x + {k} for x in items]", 1, 15),
    Step(NUMBERS, NUMBERS, "multiply each number by {k}", "[x * {k} for x in items]", 2, 9),
    Step(NUMBERS, NUMBERS, "replace each number by its square", "[x * x for x in items]"),
    Step(NUMBERS, NUMBERS, "replace each number by its absolute value", "[abs(x) for x in items]"),
    Step(NUMBERS, NUMBERS, "replace each number by its remainder modulo {k}", "[x % {k} for x in items]", 4, 11),
    Step(NUMBERS, NUMBERS, "sort the numbers from low to high", "sorted(items)"),
    Step(NUMBERS, NUMBERS, "sort the numbers from high to low", "sorted(items, reverse=True)"),
    Step(NUMBERS, NUMBERS, "reverse the list", "items[::-1]"),
    Step(NUMBERS, NUMBERS, "keep the first {k}", "items[:{k}]", 3, 6),
    Step(NUMBERS, NUMBERS, "drop the first {k}", "items[{k}:]", 1, 3),
    Step(NUMBERS, NUMBERS, "keep every second number, starting with the first", "items[::2]"),
    Step(NUMBERS, NUMBERS, "keep only the first of equal numbers", "list(dict.fromkeys(items))"),
    Step(NUMBERS, NUMBERS, "replace the list by its running totals", "[sum(items[:i + 1]) for i in range(len(items))]"),
    Step(NUMBERS, END, "return the list", "items"),
    Step(NUMBERS, END, "return the sum", "sum(items)"),
    Step(NUMBERS, END, "return the largest number, or {k} if there is none", "max(items, default={k})", 0, 9),
    Step(NUMBERS, END, "return the smallest number, or {k} if there is none", "min(items, default={k})", 0, 9),
    Step(NUMBERS, END, "return how many are left", "len(items)"),
    Step(WORDS, WORDS, "keep the words of more than {k} letters", "[x for x in items if len(x) > {k}]", 2, 4),
    Step(WORDS, WORDS, "keep the words that begin with a vowel", "[x for x in items if x[0].lower() in 'aeiou']"),
    Step(WORDS, WORDS, "drop the words that hold the letter e", "[x for x in items if 'e' not in x.lower()]"),
    Step(WORDS, WORDS, "write each word in capitals", "[x.upper() for x in items]"),
    Step(WORDS, WORDS, "write each word backwards", "[x[::-1] for x in items]"),
    Step(WORDS, WORDS, "sort the words by the alphabet", "sorted(items)"),
    Step(WORDS, WORDS, "sort the words by length, equal ones in the order they have", "sorted(items, key=len)"),
    Step(WORDS, WORDS, "reverse the list", "items[::-1]"),
    Step(WORDS, WORDS, "keep the first {k}", "items[:{k}]", 3, 5),
    Step(WORDS, WORDS, "cut each word to its first {k} letters", "[x[:{k}] for x in items]", 2, 3),
    Step(WORDS, NUMBERS, "replace each word by its number of letters", "[len(x) for x in items]"),
    Step(WORDS, END, "return the list", "items"),
    Step(WORDS, END, "return the words joined by dashes", "'-'.join(items)"),
    Step(WORDS, END, "return how many are left", "len(items)"),
)


class Plan(NamedTuple):
    """The steps of a function, with their numbers."""

    start: str
    words: tuple[str, ...]
    code: tuple[str, ...]

    @property
    def text(self) -> str:
        """Text that identifies the plan."""
        return f"{self.start}: {'; '.join(self.words)}"

    @property
    def level(self) -> int:
        """Number of steps before the return value."""
        return len(self.words) - 1

    @property
    def solution(self) -> str:
        """Code of the planned function."""
        steps = [f"    items = {code}" for code in self.code[:-1]]
        return "\n".join([f"def {FUNCTION}(items):", *steps, f"    return {self.code[-1]}"])


def draw_plan(random: Random, level: int) -> Plan:
    """Draw a plan of `level` steps and a return value."""
    start = kind = random.choice((NUMBERS, NUMBERS, WORDS))
    chosen: list[Step] = []
    while len(chosen) < level:
        step = random.choice([s for s in STEPS if s.before == kind and s.after != END and s not in chosen])
        chosen.append(step)
        kind = step.after
    chosen.append(random.choice([s for s in STEPS if s.before == kind and s.after == END]))
    numbers = [random.randint(step.low, step.high) for step in chosen]
    filled = [(step.words.format(k=k), step.code.format(k=k)) for step, k in zip(chosen, numbers, strict=True)]
    return Plan(start, tuple(words for words, _ in filled), tuple(code for _, code in filled))


def problem_of(plan: Plan, task_id: str) -> Problem:
    """Return the problem whose solution is a planned function."""
    cases = _cases(plan, Random(f"code {task_id} {plan.text}"))
    steps = [f"{number}. {words}" for number, words in enumerate(plan.words, start=1)]
    examples = [f"{case} == {case.value!r}" for case in cases[:EXAMPLES]]
    lines = [f"Write a Python function {FUNCTION}(items) that takes {_TYPES[plan.start]}. In this order:", *steps]
    return Problem(
        id=task_id,
        statement="\n".join([*lines, "Examples:", *examples]),
        function=FUNCTION,
        header=f"def {FUNCTION}(items):",
        examples=tuple(cases[:EXAMPLES]),
        hidden=tuple(cases[EXAMPLES:]),
        solution=plan.solution,
        type=f"{plan.start}, {plan.level} {'step' if plan.level == 1 else 'steps'}",
    )


def _cases(plan: Plan, random: Random) -> Sequence[Case]:
    """Draw cases; the hidden ones include an empty list and have at least `VARIED` different values."""
    function = _function(plan)
    while True:
        drawn = [*(_items(plan.start, random) for _ in range(EXAMPLES + HIDDEN - 1)), []]
        cases = [Case(call=FUNCTION, arguments=(items,), value=function(items)) for items in drawn]
        if len({repr(case.value) for case in cases[EXAMPLES:]}) >= VARIED:
            return cases


def is_varied(plan: Plan) -> bool:
    """Return True if a planned function returns at least `VARIED` different values for random arguments."""
    function, random = _function(plan), Random(plan.text)
    return len({repr(function(_items(plan.start, random))) for _ in range(HIDDEN)}) >= VARIED


def _function(plan: Plan) -> Any:
    space: dict[str, Any] = {}
    exec(plan.solution, space)
    return space[FUNCTION]


def _items(kind: str, random: Random) -> list[Any]:
    count = random.randint(4, 9)
    return [random.randint(-15, 30) if kind == NUMBERS else random.choice(WORD_LIST) for _ in range(count)]
