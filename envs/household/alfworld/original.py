"""The original engine: the packages `alfworld` and `textworld`, of agentrl's extra ``alfworld``.

They are imported when the environment is created. Run it in a worker process: a step takes a tenth of a second, and
its planner overwrites ``sys.argv``.
"""

from __future__ import annotations

import hashlib
import importlib
import string
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from agentrl.errors import UsageError

from ..expert import HouseholdExpert
from ..options import MAX_STEPS
from ..texts import NOTHING_HAPPENS
from .data import Games, task_type_of
from .writing import GameRules

_IDLE: list[Any] = []
"""Engines of closed environments. Each has a copy of the planner's library that must stay loaded, because the copies
share a registry that calls all of them when the process ends."""


class OriginalAlfworldEnv(gymnasium.Env[str, str]):
    """An episode of a game file in the original engine, with names that are not shuffled.

    `reset` takes the option ``game``, a game's id; without it the seed draws a training game.

    Args:
        data: ALFWorld's data folder; by default the original's.
        task_types: Kinds of tasks that the seed draws from; all if left out.
        max_steps: Steps after which an episode is truncated.

    Raises:
        UsageError: the packages are not installed.
    """

    action_hint = "one of the commands, for example: go to cabinet 1"

    def __init__(
        self, *, data: str | None = None, task_types: Iterable[str] | None = None, max_steps: int = MAX_STEPS
    ) -> None:
        self.games = Games(data, task_types)
        self.max_steps = max_steps
        self.observation_space = Text(4096, charset=string.printable)
        self.action_space = Text(256, charset=string.printable)
        self._engine: Any = _IDLE.pop() if _IDLE else _new_engine()
        self._path: Path | None = None
        self._state: Any = None
        self._task_type = ""
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Raises:
            UsageError: an option is unknown, or the game does not exist.
        """
        super().reset(seed=seed)
        path = self.games.path_for(options or {}, self.np_random)
        if path != self._path:
            self._engine.load(str(path))
            self._path = path
        self._state = self._engine.reset()
        self._task_type, self._steps = task_type_of(path), 0
        return self._state.feedback, self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out a command."""
        self._state, score, won = self._engine.step(action)
        self._steps += 1
        truncated = self._steps >= self.max_steps and not won
        observation = self._state.feedback
        return (
            observation,
            float(score),
            bool(won),
            truncated,
            {**self._info(), "valid": observation != NOTHING_HAPPENS},
        )

    def admissible_actions(self) -> list[str]:
        """Return the admissible commands, sorted."""
        return list(self._state.admissible_commands)

    def state_key(self) -> str:
        """Return a key of all current facts."""
        facts = sorted(map(str, self._state["_facts"]))
        return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()

    def expert(self) -> HouseholdExpert:
        """Return the household engine's expert, which reads only texts."""
        return HouseholdExpert()

    def close(self) -> None:
        """Keep the engine for the next environment of this process."""
        if self._engine is not None:
            _IDLE.append(self._engine)
            self._engine = None

    def _info(self) -> dict[str, Any]:
        return {"success": bool(self._state["won"]), "task_type": self._task_type}


def package_rules() -> GameRules:
    """Return the rules and the grammar of the installed package, for writing games.

    Raises:
        UsageError: the package is not installed.
    """
    places = _package("alfworld.info")
    return GameRules(domain=_text_of(places.ALFRED_PDDL_PATH), grammar=_text_of(places.ALFRED_TWL2_PATH))


def _new_engine() -> Any:
    textworld, wrappers = _package("textworld"), _package("alfworld.agents.environment.alfred_tw_env")
    _package("fast_downward")  # textworld imports it only if it is there
    infos = textworld.EnvInfos(won=True, admissible_commands=True)
    return wrappers.AlfredDemangler(textworld.envs.PddlEnv(infos), shuffle=False)


def _text_of(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _package(name: str) -> ModuleType:
    """Return a module of the original.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            "the original ALFWorld is not installed",
            got=error,
            expected="the packages alfworld, textworld and fast-downward-textworld",
            hint="pip install 'agentrl[alfworld]', or leave engine at native",
        ) from error
