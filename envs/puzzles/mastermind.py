"""Mastermind: find a hidden code from the marks of guesses."""

from __future__ import annotations

import itertools
import re
from random import Random

from agentrl.errors import UsageError
from agentrl.message import Content

from .bounds import within
from .environment import puzzle_spec
from .planner import read
from .rules import Illegal, Played, Puzzle, share_gained


class Mastermind(Puzzle):
    """The rules of Mastermind.

    Args:
        length: Number of digits of the code.
        digits: Largest digit; the smallest is 1.
        repeats: True if a digit may occur more than once.
    """

    name = "mastermind"
    fields = ("code", "guesses")
    action_hint = "a code of digits with spaces between them, for example: 1 2 3 4"
    max_steps = 20

    code: str
    guesses: list[str]

    def __init__(self, *, length: int = 4, digits: int = 6, repeats: bool = False) -> None:
        self.length = within("length of mastermind", length, 2, 5)
        self.digits = within("digits of mastermind", digits, self.length, 9)
        self.repeats = repeats

    @property
    def task_type(self) -> str:
        """The kind of code."""
        return f"{self.length} of {self.digits}"

    def start(self, rng: Random) -> None:
        """Think of a code."""
        known = "123456789"[: self.digits]
        self.code = "".join(rng.choices(known, k=self.length) if self.repeats else rng.sample(known, self.length))
        self.guesses = []

    def play(self, action: str) -> Played:
        """Compare a guess with the code."""
        guess = action.replace(" ", "").replace(",", "")
        if len(guess) != self.length or not all("1" <= digit <= str(self.digits) for digit in guess):
            raise Illegal(f"Answer with {self.length} digits from 1 to {self.digits}.")
        if not self.repeats and len(set(guess)) < self.length:
            raise Illegal("All digits of the code are different.")
        if guess in self.guesses:
            raise Illegal("You have tried this code before.")
        self.guesses.append(guess)
        if guess == self.code:
            return Played(1.0, "Right, that is the code.", over=True, won=True)
        placed, misplaced = compare(guess, self.code)
        return Played(0.0, f"{' '.join(guess)}: {placed} in place, {misplaced} in another place.")

    def progress(self) -> float:
        """Return how much closer the last guess is than the first one, which was made without information."""
        return share_gained(*map(self._closeness, (self.guesses[0], self.guesses[-1]))) if self.guesses else 0.0

    def _closeness(self, guess: str) -> float:
        """Return the share of the digits that are in place; half for a digit in another place."""
        placed, misplaced = compare(guess, self.code)
        return (placed + misplaced / 2) / self.length

    def introduction(self) -> str:
        """Return the kind of code."""
        kind = "may stand in it more than once" if self.repeats else "are all different"
        return f"I think of a code of {self.length} digits from 1 to {self.digits}, which {kind}.\n{self.text()}"

    def text(self) -> str:
        """Return the number of guesses so far."""
        return f"Guesses so far: {len(self.guesses)}."

    def guess(self, rng: Random) -> str:
        """Return a code that was not tried yet."""
        known = "123456789"[: self.digits]
        while True:
            guess = "".join(rng.choices(known, k=self.length) if self.repeats else rng.sample(known, self.length))
            if guess not in self.guesses:
                return guess

    def expert(self) -> MastermindExpert:
        """Return a policy that guesses codes that may be right."""
        return MastermindExpert(self.length, self.digits, repeats=self.repeats)


class MastermindExpert:
    """Expert that guesses the middle one of the codes that agree with all answers.

    Args:
        length: Number of digits of the code.
        digits: Largest digit.
        repeats: True if a digit may occur more than once.
    """

    def __init__(self, length: int, digits: int, *, repeats: bool) -> None:
        known = "123456789"[:digits]
        codes = itertools.product(known, repeat=length) if repeats else itertools.permutations(known, length)
        self._left = ["".join(code) for code in codes]

    def act(self, observation: Content) -> str:
        """Return a code that may be right.

        Raises:
            UsageError: no such code is left.
        """
        feedback = re.search(r"([\d ]+): (\d) in place, (\d) in another", read(observation))
        if feedback:
            guess, answer = feedback[1].replace(" ", ""), (int(feedback[2]), int(feedback[3]))
            self._left = [code for code in self._left if code != guess and compare(guess, code) == answer]
        if not self._left:
            raise UsageError("no code agrees with the answers", got=repr(observation))
        return " ".join(self._left[len(self._left) // 2])


def compare(guess: str, code: str) -> tuple[int, int]:
    """Count the digits in the right place, and those that the code has in another place.

    >>> compare("1123", "1214")
    (1, 2)
    """
    placed = sum(one == other for one, other in zip(guess, code, strict=True))
    common = sum(min(guess.count(digit), code.count(digit)) for digit in set(guess))
    return placed, common - placed


SPEC = puzzle_spec(
    Mastermind,
    description=(
        "Mastermind: find a code of four different digits from 1 to 6 in 20 guesses. Options: length (2 to 5), digits"
        " (up to 9), repeats."
    ),
    instructions=(
        "You play Mastermind: find the secret code. Each turn, try one code. You are told how many of its digits"
        " are correct and in the right place, and how many are in the secret code but in another place."
    ),
    reward_range=(0.0, 1.0),
    scores={"random": 0.07, "expert": 1.0},
)
make = SPEC.make
