"""The household world as a Gymnasium environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

from agentrl.errors import UsageError

from ..choices import choose
from .game import HouseGame
from .generator import generate
from .goals import TaskType
from .options import MAX_STEPS, parse_options
from .scenes import Size
from .state import House
from .syntax import PutSyntax
from .tasks import TRAIN, allowed_rows, row_of

RESET_OPTIONS = ("task_id", "scene", "task_type")


class HouseholdEnv(HouseGame):
    """The ALFWorld text game. An episode is a function of options and seed, on every machine.

    `reset` takes these options: ``task_id`` (a task of a split; with its own seed unless one is given), or ``scene``
    and ``task_type``; without them the seed draws a training task from those that the environment's options allow.

    Args:
        size: Size of the houses: tiny, small, medium or full (ALFWorld's).
        task_types: Kinds of tasks, by ALFWorld's names; all if left out.
        rooms: Kinds of rooms: kitchen, living, bedroom, bathroom; all if left out.
        max_steps: Steps after which an episode is truncated.
        put_syntax: ``move`` (``move apple 1 to fridge 1``) or ``put`` (``put apple 1 in/on fridge 1``).
    """

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
        super().__init__(max_steps=self.options.max_steps, put_syntax=self.options.put_syntax)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Raises:
            UsageError: an option is unknown, or the task does not exist.
        """
        super().reset(seed=seed)
        return self.enter(self._build(seed, options or {}))

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
