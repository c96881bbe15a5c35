"""A game in a house as a Gymnasium environment; subclasses supply the houses."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping
from typing import Any

import gymnasium
import orjson
from gymnasium.spaces import Text

from agentrl.errors import UsageError

from .engine import World
from .expert import HouseholdExpert
from .state import House, State
from .syntax import PutSyntax
from .texts import NOTHING_HAPPENS


class HouseGame(gymnasium.Env[str, str]):
    """An episode in a house. A subclass resets by calling `enter` with a house.

    The reward is 1 when the goal is reached, which ends the episode, and 0 otherwise. An action that is not
    admissible is answered with "Nothing happens." and costs a step.

    Args:
        max_steps: Steps after which an episode is truncated.
        put_syntax: Form of the command that puts an object down.
    """

    action_hint = "one whole command, for example: go to cabinet 1"

    def __init__(self, *, max_steps: int, put_syntax: PutSyntax = PutSyntax.MOVE) -> None:
        self.max_steps = max_steps
        self.put_syntax = put_syntax
        self.observation_space = Text(4096, charset=string.printable)
        self.action_space = Text(256, charset=string.printable)
        self._world: World | None = None
        self._house_key: str | None = None
        self._steps = 0
        self._over = False

    @property
    def world(self) -> World:
        """The world of the current episode.

        Raises:
            UsageError: `reset` was not called yet.
        """
        if self._world is None:
            raise UsageError("the household environment has no episode yet", expected="reset before anything else")
        return self._world

    def enter(self, house: House) -> tuple[str, dict[str, Any]]:
        """Start an episode in a house; return the first observation and its info."""
        self._begin(World(house, put_syntax=self.put_syntax), steps=0)
        return self.world.introduction(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out a command.

        Raises:
            UsageError: the episode is over.
        """
        world = self.world
        if self._over:
            raise UsageError("the household episode is over", expected="reset before the next step")
        self._steps += 1
        answer = world.step(action)
        info = {**self._info(), "valid": answer is not None}
        truncated = self._steps >= self.max_steps and not world.solved
        self._over = world.solved or truncated
        return answer or NOTHING_HAPPENS, float(world.solved), world.solved, truncated, info

    def admissible_actions(self) -> list[str]:
        """Return the admissible commands, sorted."""
        return self.world.admissible()

    def expert(self) -> HouseholdExpert:
        """Return a policy that reads the texts; it solves every generated task within 50 steps."""
        return HouseholdExpert(self.put_syntax)

    def state_key(self) -> str:
        """Return a key of the full state of the house, independent of the number of steps."""
        if self._house_key is None:
            self._house_key = _digest(self.world.house.to_plain())
        return _digest(self._house_key, self.world.state.to_plain())

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return {"house": self.world.house.to_plain(), "state": self.world.state.to_plain(), "steps": self._steps}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot, in this environment or another one with the same options."""
        house = House.from_plain(snapshot["house"])
        state = State.from_plain(snapshot["state"])
        self._begin(World(house, state, self.put_syntax), steps=snapshot["steps"])

    def _begin(self, world: World, *, steps: int) -> None:
        self._world, self._steps = world, steps
        self._over = steps >= self.max_steps or (steps > 0 and world.solved)
        self._house_key = None

    def _info(self) -> dict[str, Any]:
        return {"success": self.world.solved, "task_type": self.world.house.goal.task_type.value}


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(orjson.dumps(parts), digest_size=16).hexdigest()
