"""The contract of puzzles: their rules, as a plain class. `PuzzleEnv` makes an environment of them.

class Doors(Puzzle):
    name, fields, action_hint, max_steps = "doors", ("prize",), "a door: 1, 2 or 3", 3

    def start(self, rng):          # draw a new instance
        self.prize = rng.randint(1, 3)

    def text(self):                # the text that the player reads
        return "There are three doors."

    def play(self, action):        # take one action
        if action not in self.actions():
            raise Illegal("This door does not exist.")
        won = action == str(self.prize)
        return Played(reward=float(won), over=won, won=won)

    def actions(self):
        return ["1", "2", "3"]

    def expert(self): ...          # a policy that reads only the texts
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from agentrl.env import Expert

from ..pictures import Fields


class Illegal(Exception):
    """The action is illegal; the player reads the reason. It is never raised outside the environment."""


class Played(NamedTuple):
    """Result of an action."""

    reward: float = 0.0
    note: str = ""
    """Text before the new state."""
    over: bool = False
    won: bool = False
    legal: bool = True
    rewards: Mapping[str, float] = MappingProxyType({})
    """Rewards by player, in a game of several players; `reward` is then given to all of them."""


class Puzzle(ABC):
    """The rules of a puzzle and the state of one episode. Its options are the arguments of its constructor."""

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    """Attributes that form the whole state: JSON types, set by `start`. Lists may be changed in place."""
    action_hint: ClassVar[str]
    max_steps: ClassVar[int]
    """Actions after which an episode is truncated."""
    actions_per_turn: ClassVar[int] = 1
    """Maximum number of actions in one turn: ``left || up``."""
    illegal_reward: ClassVar[float] = 0.0
    loss_reward: ClassVar[float] = 0.0
    """Reward of losing. Reaching the limit gives the same, so that refusing to play is no better than losing."""
    players: Sequence[str] = ()
    """Players of a game for several players; empty for a single player."""
    to_move: str
    """Player that acts next and reads `text`, in a game of several players."""
    looks: ClassVar[Fields] = {}
    """Appearance of the letters of `text` in a picture; if empty, the puzzle is shown only as text."""

    @abstractmethod
    def start(self, rng: Random) -> None:
        """Draw a new, solvable instance."""

    @abstractmethod
    def play(self, action: str) -> Played:
        """Take one action, given in lower case with single spaces.

        Raises:
            Illegal: the action is illegal; the state is unchanged.
        """

    @abstractmethod
    def text(self) -> str:
        """Return the text that the player reads after each turn."""

    @abstractmethod
    def expert(self) -> Expert:
        """Return a policy that plays well from the texts only."""

    def introduction(self) -> str:
        """Return the first observation: the rules that depend on options, and `text`."""
        return self.text()

    def goal_text(self) -> str:
        """Return the goal for loops that repeat it: the introduction without `text`."""
        return self.introduction().removesuffix(self.text()).strip()

    def actions(self) -> list[str] | None:
        """Return the legal actions; ``None`` if there are too many to list."""
        return None

    def guess(self, rng: Random) -> str:
        """Return a random action, for the random policy."""
        return rng.choice(self.actions() or [""])

    def progress(self) -> float:
        """Return how close the state is to the solution, from 0 to 1.

        A truncated episode is rewarded with the share of the progress missing at its start that its actions made.
        """
        return 0.0

    @property
    def task_type(self) -> str:
        """The kind of instance, for tables per type."""
        return self.name

    def state(self) -> dict[str, Any]:
        """Return the whole state."""
        return {name: getattr(self, name) for name in self.fields}

    def identity(self) -> Any:
        """Return, as JSON types, the data that identifies this start; no two splits share a start."""
        return self.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; the puzzle may modify it."""
        for name in self.fields:
            setattr(self, name, state[name])


def share_gained(before: float, now: float) -> float:
    """Return the gain as a share of the amount that was missing before; 0 without a gain.

    >>> share_gained(0.5, 0.75), share_gained(0.5, 0.25)
    (0.5, 0.0)
    """
    return max(now - before, 0.0) / (1 - before) if before < 1 else 0.0


class ChancePuzzle(Puzzle):
    """A puzzle with random events after the start.

    Its random numbers come from a state of 48 bits that is part of the puzzle's state, so that an episode is a function
    of its seed and its actions and continues from a snapshot in the same way: the generator of drand48 (POSIX).
    """

    dice: int

    def identity(self) -> Any:
        """Return the state without the dice: starts that differ only in the hidden dice are the same."""
        return {name: value for name, value in self.state().items() if name != "dice"}

    def roll(self, below: int) -> int:
        """Return a random number from 0 to `below` - 1."""
        self.dice = (self.dice * 0x5DEECE66D + 11) & 0xFFFFFFFFFFFF
        return (self.dice >> 16) % below
