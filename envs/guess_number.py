"""Guess a number from 1 to 100 in ten turns: the smallest environment."""

import functools
from collections.abc import Mapping
from random import Random
from typing import Any

import gymnasium

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.message import Content, parse_int, text_of
from agentrl.task import seed_tasks

from .splits import split_of_seed, split_of_text

MAX_STEPS = 10
NUMBERS = range(1, 101)
CHARACTERS = frozenset(map(chr, range(32, 127)))


_REMARK = "That is not a number. Guess a whole number from 1 to 100, for example: 50"


class Guesses(gymnasium.spaces.Text):
    """Space of texts; a sample is a number."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return one of the numbers."""
        return str(self.np_random.choice(NUMBERS))


class GuessNumber(gymnasium.Env[str, str]):
    """Guess a number; each wrong guess is answered by "Higher." or "Lower.".

    Each number belongs to one split; the secret number is drawn from those of the seed's split.
    """

    observation_space = gymnasium.spaces.Text(200, charset=CHARACTERS)
    action_hint = "a whole number from 1 to 100, for example: 50"

    def __init__(self) -> None:
        self.action_space = Guesses(200, charset=CHARACTERS)

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[str, dict[str, object]]:
        """Think of a number."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        rng, split = Random(f"guess_number/{drawn}"), split_of_seed(drawn)
        own = [number for number in NUMBERS if split_of_text(str(number)) == split]
        self.secret, self.turns = rng.choice(own), 0
        return "I think of a number from 1 to 100. Guess.", {"success": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Answer a guess."""
        guess, self.turns = parse_int(action), self.turns + 1
        won = guess == self.secret
        answer = _REMARK if guess is None else "Higher." if guess < self.secret else "Lower."
        answer = "Right." if won else answer
        return (
            answer,
            float(won),
            won,
            self.turns >= MAX_STEPS and not won,
            {"success": won, "valid": guess is not None},
        )

    def expert(self) -> "Halving":
        """Return a policy that needs at most seven guesses."""
        return Halving()

    def state_key(self) -> str:
        """Return the secret number; guesses do not change the state."""
        return str(self.secret)

    def snapshot(self) -> dict[str, int]:
        """Return the episode as JSON types."""
        return {"secret": self.secret, "turns": self.turns}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot."""
        self.secret, self.turns = snapshot["secret"], snapshot["turns"]


class Halving:
    """Expert that guesses the middle of the remaining range."""

    def __init__(self) -> None:
        self.low, self.high, self.guess = NUMBERS[0], NUMBERS[-1], 0

    def act(self, observation: Content) -> str:
        """Return the next guess."""
        match text_of(observation):
            case "Higher.":
                self.low = self.guess + 1
            case "Lower.":
                self.high = self.guess - 1
        self.guess = (self.low + self.high) // 2
        return str(self.guess)


SPEC = EnvironmentSpec(
    name="guess_number",
    make=GuessNumber,
    tasks=functools.partial(seed_tasks, "guess_number"),
    description="Guess a number from 1 to 100 in ten turns, told higher or lower: the smallest environment.",
    instructions=(
        "I am thinking of a whole number from 1 to 100. Find it in at most ten guesses. Each turn, guess one"
        " number. I answer Higher if my number is higher than your guess, and Lower if it is lower."
    ),
    max_turns=MAX_STEPS,
    reward_range=(0.0, 1.0),
    success_threshold=1.0,
    isolation=Isolation.INLINE,
    scores={"random": 0.1, "expert": 1.0},
)
