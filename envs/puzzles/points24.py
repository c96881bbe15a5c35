"""Points24: write a formula of four cards with the value 24."""

from __future__ import annotations

import functools
import re
from random import Random

from agentrl.errors import UsageError

from .arithmetic import NotArithmetic, compute_tokens, reach, tokenize
from .environment import puzzle_spec
from .planner import Planner
from .rules import Illegal, Played, Puzzle

TARGET, CARDS, MAX_PARTS = 24, 4, 20
SOLVED_REWARD, FAILED_REWARD = 10.0, -1.0
"""Rewards of a right and of a wrong formula, as in Gym-Cards; an illegal action also costs 1."""
NAMES = {1: "A", 11: "J", 12: "Q", 13: "K"}
OPERATORS = ("+", "-", "*", "/", "(", ")")


@functools.cache
def formula_of(values: tuple[int, ...]) -> str | None:
    """Return a formula of all values with the result 24; ``None`` if there is none."""
    return reach(TARGET, list(values))


class Points24(Puzzle):
    """The rules of Points24. An action adds one or more numbers and operators to the formula; ``=`` ends it."""

    name = "points24"
    fields = ("cards", "formula")
    action_hint = "the formula, or the next part of it, for example: (3 + 5) * 3 * 1 ="
    max_steps = 20
    illegal_reward = FAILED_REWARD
    loss_reward = FAILED_REWARD

    cards: list[int]
    formula: list[str]

    def start(self, rng: Random) -> None:
        """Draw four cards that have a solution."""
        while True:
            self.cards = sorted(rng.randint(1, 13) for _ in range(CARDS))
            if formula_of(tuple(self._values())):
                break
        self.formula = []

    def play(self, action: str) -> Played:
        """Add to the formula; compute it at its end."""
        written, end, rest = action.partition("=")
        try:
            tokens = tokenize(written)
        except NotArithmetic as error:
            raise Illegal(str(error)) from error
        formula = self.formula + tokens
        if not (tokens or end) or rest.strip() not in ("", str(TARGET)):
            raise Illegal("Add numbers, + - * / and brackets to the formula, or end it with =.")
        if len(formula) > MAX_PARTS:
            raise Illegal(f"The formula would have more than {MAX_PARTS} parts.")
        left = self._values()
        for token in formula:
            if token.isdigit():
                if int(token) not in left:
                    raise Illegal(f"No card is left for {token}.")
                left.remove(int(token))
        self.formula = formula
        return self._end(left) if end else Played()

    def text(self) -> str:
        """Return the cards and the formula."""
        cards = ", ".join(NAMES.get(card, str(card)) for card in self.cards)
        return f"Cards: {cards}. Formula: {' '.join(self.formula) or 'empty'}."

    def actions(self) -> list[str]:
        """Return the numbers of the cards that are left, the operators, and the end mark."""
        left = self._values()
        for token in self.formula:
            if token.isdigit():
                left.remove(int(token))
        parts = [str(number) for number in sorted(set(left))] + list(OPERATORS)
        return ([] if len(self.formula) >= MAX_PARTS else parts) + ["="]

    def expert(self) -> Points24Expert:
        """Return a policy that writes a right formula at once."""
        return Points24Expert()

    def _values(self) -> list[int]:
        return [min(card, 10) for card in self.cards]

    def _end(self, left: list[int]) -> Played:
        try:
            value = compute_tokens(self.formula).value
        except NotArithmetic as error:
            return Played(FAILED_REWARD, str(error), over=True)
        if left:
            return Played(FAILED_REWARD, "Not all cards are used.", over=True)
        if not value.equals(TARGET):
            return Played(FAILED_REWARD, f"The formula is {value}, not {TARGET}.", over=True)
        return Played(SOLVED_REWARD, f"Right, that is {TARGET}.", over=True, won=True)


class Points24Expert(Planner):
    """Expert that searches all formulas and writes a right one."""

    def plan(self, text: str) -> list[str]:
        """Return the whole formula.

        Raises:
            UsageError: the text shows no cards that have a solution.
        """
        shown = re.search(r"Cards: ([\w, ]+)\. Formula: empty", text)
        cards = shown[1].split(", ") if shown else []
        values = [1 if card == "A" else int(card) if card.isdigit() else 10 for card in cards]
        found = formula_of(tuple(values))
        if found is None:
            raise UsageError("these cards have no solution", got=repr(text))
        return [f"{found} ="]


SPEC = puzzle_spec(
    Points24,
    description="Points24 with the rewards of Gym-Cards: write a formula of four cards with the value 24.",
    instructions=(
        "You play Points24. Write a formula whose value is 24. Use each of the four cards exactly once, with + -"
        " * / and parentheses. A counts 1; J, Q and K count 10. You can write the whole formula in one turn, or"
        " the next part of it in each turn. The formula ends with = and nothing after it."
    ),
    reward_range=(-21.0, 10.0),
    scores={"random": 0.0, "expert": 1.0},
)
make = SPEC.make
