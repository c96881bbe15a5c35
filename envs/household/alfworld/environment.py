"""ALFWorld's games as a Gymnasium environment, in the household engine."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

from agentrl.env import AnyEnv, Isolation
from agentrl.errors import UsageError

from ...choices import choose
from ...option_types import typed_options
from ..game import HouseGame
from ..options import MAX_STEPS
from .data import Games
from .game_file import load_house
from .original import OriginalAlfworldEnv


class Engine(enum.StrEnum):
    """Engine that plays a game."""

    NATIVE = "native"
    """The household engine."""
    ORIGINAL = "original"
    """The original's packages, in worker processes."""


class AlfworldEnv(HouseGame):
    """An episode of a game file of ALFWorld.

    `reset` takes the option ``game``, a game's id; without it the seed draws a training game.

    Args:
        data: ALFWorld's data folder; by default the original's.
        task_types: Kinds of tasks that the seed draws from; all if left out.
        max_steps: Steps after which an episode is truncated.
    """

    @typed_options("alfworld")
    def __init__(
        self, *, data: str | None = None, task_types: Iterable[str] | None = None, max_steps: int = MAX_STEPS
    ) -> None:
        if max_steps < 1:
            raise UsageError("alfworld max_steps is too small", got=max_steps, expected="at least 1")
        super().__init__(max_steps=max_steps)
        self.games = Games(data, task_types)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Raises:
            UsageError: an option is unknown, the game does not exist, or only the original can play it.
        """
        super().reset(seed=seed)
        return self.enter(load_house(self.games.path_for(options or {}, self.np_random)))


def make_alfworld(*, engine: str = Engine.NATIVE, **options: Any) -> AnyEnv:
    """Create an environment that plays ALFWorld's games in one of the engines.

    Args:
        engine: ``native`` or ``original``.
        options: Options of the environment.

    Raises:
        UsageError: the engine is unknown, or its packages are not installed.
    """
    if choose(Engine, engine, "alfworld engine") is Engine.ORIGINAL:
        return OriginalAlfworldEnv(**options)
    return AlfworldEnv(**options)


def isolation_of(*, engine: str = Engine.NATIVE, **_options: Any) -> Isolation:
    """Return where an engine runs: the original in a process, because its steps take a tenth of a second.

    Raises:
        UsageError: the engine is unknown.
    """
    is_original = choose(Engine, engine, "alfworld engine") is Engine.ORIGINAL
    return Isolation.PROCESS if is_original else Isolation.INLINE
