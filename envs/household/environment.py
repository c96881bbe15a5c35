"""The household world as a Gymnasium environment."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

import gymnasium
import orjson
from gymnasium.spaces import Text

from agentrl.errors import UsageError

from .engine import World
from .expert import HouseholdExpert
from .generator import generate
from .goals import TaskType
from .options import MAX_STEPS, choose, parse_options
from .scenes import Size
from .state import House, State
from .syntax import PutSyntax
from .tasks import TRAIN, allowed_rows, row_of
from .texts import NOTHING_HAPPENS, introduction

RESET_OPTIONS = ("task_id", "scene", "task_type")


class HouseholdEnv(gymnasium.Env[str, str]):
    """The ALFWorld text game. An episode is a function of (options, seed), on every machine.

    The reward is 1 when the goal is reached, which ends the episode, and 0 otherwise. An action that is not
    admissible answers "Nothing happens." and costs a step.

    `reset` takes these options: ``task_id`` (a task of a split; with its own seed unless one is given), or ``scene``
    and ``task_type``; without them the seed draws a training task among those that the environment's options allow.

    Args:
        size: How large houses are: tiny, small, medium or full (ALFWorld's).
        task_types: Kinds of tasks, by ALFWorld's names; all when left out.
        rooms: Kinds of rooms: kitchen, living, bedroom, bathroom; all when left out.
        max_steps: Steps after which an episode is truncated.
        put_syntax: ``move`` (``move apple 1 to fridge 1``) or ``put`` (``put apple 1 in/on fridge 1``).
    """

    action_hint = "one command, for example: go to cabinet 1"

    def __init__(
        self,
        *,
        size: str = Size.FULL,
        task_types: Iterable[str] | None = None,
        rooms: Iterable[str] | None = None,
        max_steps: int = MAX_STEPS,
        put_syntax: str = PutSyntax.MOVE,
    ) -> None:
        self.options = parse_options(
            size=size, task_types=task_types, rooms=rooms, max_steps=max_steps, put_syntax=put_syntax
        )
        self.observation_space = Text(4096, charset=string.printable)
        self.action_space = Text(256, charset=string.printable)
        self._world: World | None = None
        self._house_key: str | None = None
        self._steps = 0

    @property
    def world(self) -> World:
        """The world of the current episode.

        Raises:
            UsageError: `reset` was not called yet.
        """
        if self._world is None:
            raise UsageError("the household environment has no episode yet", expected="reset before anything else")
        return self._world

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Raises:
            UsageError: an option is unknown, or names no task.
        """
        super().reset(seed=seed)
        house = self._build(seed, options or {})
        self._enter(World(house, put_syntax=self.options.put_syntax), steps=0)
        return introduction(house.receptacles, house.goal.text), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Do what one command says.

        Raises:
            UsageError: the episode is over.
        """
        world = self.world
        if world.solved or self._steps >= self.options.max_steps:
            raise UsageError("the household episode is over", expected="reset before the next step")
        self._steps += 1
        answer = world.step(action)
        info = {**self._info(), "valid": answer is not None}
        truncated = self._steps >= self.options.max_steps and not world.solved
        return answer or NOTHING_HAPPENS, float(world.solved), world.solved, truncated, info

    def admissible_actions(self) -> list[str]:
        """The commands that do something now, sorted."""
        return self.world.admissible()

    def expert(self) -> HouseholdExpert:
        """A policy that solves every task within 50 steps."""
        return HouseholdExpert(self.options.put_syntax)

    def state_key(self) -> str:
        """Key of the full state of the house, whatever number of steps led to it."""
        if self._house_key is None:
            self._house_key = _digest(self.world.house.to_plain())
        return _digest(self._house_key, self.world.state.to_plain())

    def snapshot(self) -> dict[str, Any]:
        """The episode as JSON types."""
        return {"house": self.world.house.to_plain(), "state": self.world.state.to_plain(), "steps": self._steps}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on where a snapshot was taken, in this environment or another with the same options."""
        house = House.from_plain(snapshot["house"])
        state = State.from_plain(snapshot["state"])
        self._enter(World(house, state, self.options.put_syntax), steps=snapshot["steps"])

    def _enter(self, world: World, *, steps: int) -> None:
        self._world, self._steps = world, steps
        self._house_key = None

    def _info(self) -> dict[str, Any]:
        return {"success": self.world.solved, "task_type": self.world.house.goal.task_type.value}

    def _build(self, seed: int | None, options: Mapping[str, Any]) -> House:
        unknown = [name for name in options if name not in RESET_OPTIONS]
        if unknown or len(options) not in (0, 1 if "task_id" in options else 2):
            raise UsageError(
                "household cannot reset with these options",
                got=", ".join(options),
                expected="task_id, or scene and task_type, or none",
            )
        if "task_id" in options:
            row = row_of(options["task_id"])
            return generate(row.scene, row.task_type, row.seed if seed is None else seed, self.options.size)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        if options:
            task_type = choose(TaskType, options["task_type"], "household task type")
            return generate(options["scene"], task_type, drawn, self.options.size)
        rows = allowed_rows(TRAIN, self.options)
        row = rows[int(Random(f"task {drawn}").random() * len(rows))]
        return generate(row.scene, row.task_type, row.seed, self.options.size)


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(orjson.dumps(parts), digest_size=16).hexdigest()
