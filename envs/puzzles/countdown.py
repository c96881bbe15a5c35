"""Countdown: combine numbers to a target."""

from __future__ import annotations

import re
from random import Random

from agentrl.errors import UsageError
from agentrl.message import Content

from .arithmetic import NotArithmetic, Value, compute, reach
from .bounds import within
from .environment import puzzle_spec
from .planner import read
from .rules import Illegal, Played, Puzzle

FORMAT_REWARD = 0.1
"""Reward of the first valid expression, as in TinyZero; the rest of 1 is the reward of the target."""
MIN_TARGET, MAX_TARGET = 10, 100


class Countdown(Puzzle):
    """The rules of Countdown, with as many attempts as there are steps. Each instance can be solved.

    Args:
        count: Number of numbers.
        largest: Maximum of the numbers.
    """

    name = "countdown"
    fields = ("numbers", "target", "has_tried")
    action_hint = "an expression that uses all your numbers, for example: (3 + 4) * 5 - 6"
    max_steps = 5

    numbers: list[int]
    target: int
    has_tried: bool

    def __init__(self, *, count: int = 4, largest: int = 99) -> None:
        self.count = within("count of countdown", count, 3, 5)
        self.largest = within("largest of countdown", largest, 9, 99)

    @property
    def task_type(self) -> str:
        """Number of numbers, in words."""
        return f"{self.count} numbers"

    def start(self, rng: Random) -> None:
        """Draw numbers and compute with them until the result is a target."""
        while True:
            self.numbers = sorted(rng.randint(1, self.largest) for _ in range(self.count))
            found = _combine(rng, self.numbers)
            if found is not None and MIN_TARGET <= found <= MAX_TARGET and found not in self.numbers:
                break
        self.target, self.has_tried = found, False

    def play(self, action: str) -> Played:
        """Compute an expression."""
        try:
            value, used = compute(action.partition("=")[0])
        except NotArithmetic as error:
            raise Illegal(str(error)) from error
        if sorted(used) != self.numbers:
            raise Illegal(f"Use each of the numbers {_join_numbers(self.numbers)} once, and no other.")
        reward = 0.0 if self.has_tried else FORMAT_REWARD
        self.has_tried = True
        if value.equals(self.target):
            return Played(reward + 1 - FORMAT_REWARD, f"Right, that is {self.target}.", over=True, won=True)
        return Played(reward, f"That is {value}, not {self.target}.")

    def text(self) -> str:
        """Return the numbers and the target."""
        return f"Numbers: {_join_numbers(self.numbers)}. Target: {self.target}."

    def guess(self, rng: Random) -> str:
        """Return the numbers in some order, with some operators and no brackets."""
        shuffled = rng.sample(self.numbers, self.count)
        return "".join(f"{number} {rng.choice('+-*/')} " for number in shuffled[:-1]) + str(shuffled[-1])

    def expert(self) -> CountdownExpert:
        """Return a policy that tries all expressions."""
        return CountdownExpert()


class CountdownExpert:
    """Expert that searches all expressions and answers with a right one."""

    def act(self, observation: Content) -> str:
        """Return an expression whose value is the target.

        Raises:
            UsageError: the text states no solvable problem.
        """
        shown = re.search(r"Numbers: ([\d, ]+)\. Target: (\d+)\.", read(observation))
        found = reach(int(shown[2]), [int(number) for number in shown[1].split(", ")]) if shown else None
        if found is None:
            raise UsageError("this cannot be solved", got=repr(observation), expected="a problem of countdown")
        return found


def _combine(rng: Random, numbers: list[int]) -> int | None:
    """Combine the numbers in random order with random operators; ``None`` if the result is not a whole number."""
    values = [Value(number) for number in numbers]
    while len(values) > 1:
        (a, b), (c, d) = (values.pop(int(rng.random() * len(values))) for _ in range(2))
        match int(rng.random() * 4):
            case 0:
                values.append(Value(a * d + c * b, b * d))
            case 1:
                values.append(Value(a * d - c * b, b * d))
            case 2:
                values.append(Value(a * c, b * d))
            case _ if c:
                values.append(Value(a * d, b * c))
            case _:
                return None
    over, under = values[0]
    return over // under if over % under == 0 else None


def _join_numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


SPEC = puzzle_spec(
    Countdown,
    description=(
        "Countdown: make the target out of all the numbers, in up to five attempts, each answered by its value."
        " Options: count (3 to 5 numbers), largest (9 to 99)."
    ),
    instructions=(
        "You play Countdown. Write an expression whose value is the target. Use every number exactly once, with +"
        " - * / and parentheses. Fractions are computed exactly. Write only the expression, without an equals"
        " sign and without the target. If it is wrong, you are told its value and can try again."
    ),
    reward_range=(0.0, 1.0),
    scores={"random": 0.05, "expert": 1.0},
)
make = SPEC.make
