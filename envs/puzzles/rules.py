"""What a puzzle is: its rules, as a plain class. `PuzzleEnv` makes an environment of them.

class Doors(Puzzle):
name, fields, action_hint, max_steps = "doors", ("prize",), "a door: 1, 2 or 3", 3
def start(self, rng):          # a new instance
self.prize = rng.randint(1, 3)
def text(self):                # what the player sees
return "There are three doors."
def play(self, action):        # one action; what it led to
if action not in self.actions():
raise Illegal("There is no such door.")
won = action == str(self.prize)
return Played(reward=float(won), over=won, won=won)
def actions(self):
return ["1", "2", "3"]
def expert(self): ...          # plays by the texts alone
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
    """The action cannot be played, and the player reads why. It never leaves the environment."""


class Played(NamedTuple):
    """What an action led to."""

    reward: float = 0.0
    note: str = ""
    """Shown before the new situation."""
    over: bool = False
    won: bool = False
    legal: bool = True
    rewards: Mapping[str, float] = MappingProxyType({})
    """What single players get, in a game of several; `reward` is then everybody's."""


class Puzzle(ABC):
    """The rules of a puzzle and the state of one episode. Its options are the arguments of its constructor."""

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    """The attributes that are the whole state: JSON types, set by `start`. Lists may be changed in place."""
    action_hint: ClassVar[str]
    max_steps: ClassVar[int]
    """Actions after which an episode is truncated."""
    actions_per_turn: ClassVar[int] = 1
    """How many actions one turn may hold: ``left || up``."""
    illegal_reward: ClassVar[float] = 0.0
    loss_reward: ClassVar[float] = 0.0
    """Reward of losing. Reaching the limit pays the same, so that refusing to play is no better than losing."""
    players: Sequence[str] = ()
    """Who acts, in a game of several players; empty where one plays alone."""
    to_move: str
    """In such a game: who acts next, and reads `text`."""
    looks: ClassVar[Fields] = {}
    """How the letters of `text` look in a picture; without, the puzzle is shown as text only."""

    @abstractmethod
    def start(self, rng: Random) -> None:
        """Draw a new instance that can be solved."""

    @abstractmethod
    def play(self, action: str) -> Played:
        """Take one action, given in lower case with single blanks.

        Raises:
            Illegal: the action cannot be played; the state is as before.
        """

    @abstractmethod
    def text(self) -> str:
        """What the player sees after each turn."""

    @abstractmethod
    def expert(self) -> Expert:
        """Return a policy that plays well by the texts alone."""

    def introduction(self) -> str:
        """Return the first observation: what the options decide about the rules, and what the player sees."""
        return self.text()

    def restated(self) -> str:
        """What to repeat where the first observation is out of sight: what it says besides the situation."""
        return self.introduction().removesuffix(self.text()).strip()

    def actions(self) -> list[str] | None:
        """Return the actions that can be played now; ``None`` where they are too many to list."""
        return None

    def guess(self, rng: Random) -> str:
        """Return a random action: what the random policy plays where `actions` lists none."""
        return rng.choice(self.actions() or [""])

    def progress(self) -> float:
        """Measure how close the state is to the solution, from 0 to 1.

        An episode that is truncated pays for what its actions added to the progress of the first state, as a share of
        what was missing there.
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
        """Return, as JSON types, what tells this start from others: no two splits share a start."""
        return self.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, which is not kept."""
        for name in self.fields:
            setattr(self, name, state[name])


def share_gained(before: float, now: float) -> float:
    """Give the share of what was missing before that has been added since: 0 where nothing was.

    >>> share_gained(0.5, 0.75), share_gained(0.5, 0.25)
    (0.5, 0.0)
    """
    return max(now - before, 0.0) / (1 - before) if before < 1 else 0.0


class ChancePuzzle(Puzzle):
    """A puzzle in which chance goes on to play after the start.

    Its random numbers come from a number of 48 bits that is part of the state, so that an episode is a function of its
    seed and its actions, and goes on from a snapshot as it did before: the linear congruence of drand48 (POSIX).
    """

    dice: int

    def identity(self) -> Any:
        """Return the state without the dice, which nobody sees: starts that differ in them alone look the same."""
        return {name: value for name, value in self.state().items() if name != "dice"}

    def roll(self, below: int) -> int:
        """Return a random number from 0 to `below` - 1."""
        self.dice = (self.dice * 0x5DEECE66D + 11) & 0xFFFFFFFFFFFF
        return (self.dice >> 16) % below
