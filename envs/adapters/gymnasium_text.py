"""Gymnasium environments of numbers as text: the registry's entry ``gymnasium``, which also serves plain ids."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import ConfigError, UsageError, raised_at, raised_in
from agentrl.message import Content
from agentrl.task import seed_tasks

from ..text_adapter import TextAdapter, describe
from .gymnasium_words import WORDS, Words

Source: TypeAlias = str | EnvSpec | type[gymnasium.Env[Any, Any]]
NUMBERS = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)
MAX_NUMBERS = 1024
"""Maximum numbers of an observation; larger ones are pictures, which are not readable as text."""
_CODE = re.compile(r"\x1b\[([1-9]\d?)(?:;\d+)*m")
_COLOURED = re.compile(rf"((?:{_CODE.pattern})+)([^\x1b]*)(?:\x1b\[0m)+")
_COLOURS = ("grey", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class GymnasiumText(TextAdapter):
    """A Gymnasium environment of numbers as text, with the known names of its parts.

    The first observation begins with the goal, if one is known. If the environment can draw itself as text, this
    drawing is the observation, with colours in the form ``{red:S}``.

    Args:
        env: The environment.
        actions: Names of a discrete space's actions; if left out, known names or else numbers.

    Raises:
        UsageError: the spaces have no text form.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], *, actions: Sequence[str] | None = None) -> None:
        self.words = WORDS.get(env.spec.name if env.spec else "", Words(goal=""))
        count = _count(env.observation_space)
        if count > MAX_NUMBERS:
            raise UsageError(
                "these observations are too large for text",
                got=f"{count:,} numbers",
                expected=f"at most {MAX_NUMBERS:,}",
                hint="derive from agentrl.envs.text_adapter.TextAdapter and write describe()",
            )
        if env.render_mode != "ansi":
            describe(env.observation_space, env.observation_space.sample())  # raises if the space has no text form
        steps = env.spec.max_episode_steps if env.spec else None
        super().__init__(env, actions=actions or self._known_actions(env), max_steps=steps)
        self._threshold = env.spec.reward_threshold if env.spec else None
        self._return = 0.0

    def _known_actions(self, env: gymnasium.Env[Any, Any]) -> Sequence[str] | None:
        if not isinstance(env.action_space, spaces.Discrete):
            return None
        meanings = getattr(env.unwrapped, "get_action_meanings", None)
        return self.words.actions or (meanings() if callable(meanings) else None)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Start an episode, with the goal first."""
        self._return = 0.0
        text, info = super().reset(seed=seed, options=options)
        return (f"{self.words.goal}\n{text}", {**info, "goal": self.words.goal}) if self.words.goal else (text, info)

    def step(self, action: str) -> tuple[Content, float, bool, bool, dict[str, Any]]:
        """Take the action; with a threshold, the info says whether the episode's return has reached it."""
        text, reward, terminated, truncated, info = super().step(action)
        self._return += reward
        if self._threshold is not None:
            info.setdefault("success", self._return >= self._threshold)
        return text, reward, terminated, truncated, info

    def describe(self, observation: Any) -> str:
        """Return the environment's drawing, or else the numbers, with their names if they are known."""
        if self.inner.render_mode == "ansi":
            return _without_colours(str(self.inner.render())).strip("\n")
        if not self.words.parts:
            return describe(self.inner.observation_space, observation)
        numbers = np.asarray(observation).reshape(-1)
        return "\n".join(f"{part}: {float(number):.4g}" for part, number in zip(self.words.parts, numbers, strict=True))


def make(
    *, env_id: Source = "CartPole-v1", actions: Sequence[str] | None = None, **options: Any
) -> gymnasium.Env[Any, Any]:
    """Create an environment; one that uses numbers is adapted to text.

    Args:
        env_id: A Gymnasium id (``module:EnvId`` imports the module first), its registration, or a class.
        actions: Names of a discrete space's actions.
        options: Options of the environment, and of `gymnasium.make` for an id.

    Raises:
        UsageError: the environment cannot be created, or has no text form.
    """
    env = _create(env_id, options)
    if not _has_numbers(env):
        if actions is not None:
            env.close()
            raise UsageError(f"{_name(env_id)} uses text already", got="names of actions", expected="no names")
        return env
    if (
        isinstance(env_id, str | EnvSpec)
        and "ansi" in env.metadata.get("render_modes", ())
        and "render_mode" not in options
    ):
        env.close()
        env = _create(env_id, {**options, "render_mode": "ansi"})
    return GymnasiumText(env, actions=actions)


def _create(env_id: Source, options: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    try:
        if isinstance(env_id, str | EnvSpec):
            return gymnasium.make(env_id, disable_env_checker=True, **options)
        made: object = env_id(**options)
        if isinstance(made, gymnasium.vector.VectorEnv):
            made.close()
            raise UsageError(
                f"{_name(env_id)} makes several environments at once",
                got=f"a VectorEnv with num_envs={made.num_envs}",
                expected="a single environment, because agentrl makes one for each concurrent episode",
            )
        return cast("gymnasium.Env[Any, Any]", made)
    except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
        what = f"the Gymnasium environment {_name(env_id)} cannot be created"
        kind = ConfigError if _is_call(error) else UsageError
        raise kind(what, got=error, hint=_next_step(error)) from error


def _is_call(error: Exception) -> bool:
    """Return True if a constructor does not accept its arguments."""
    place = raised_at(error) if isinstance(error, TypeError) else None
    own = Path(gymnasium.__file__).parent
    return place is not None and (place.file == __file__ or own in Path(place.file).parents)


def _name(env_id: Source) -> str:
    if isinstance(env_id, EnvSpec):
        return env_id.id
    return env_id if isinstance(env_id, str) else f"{env_id.__module__}:{env_id.__qualname__}"


def _next_step(error: Exception) -> str | None:
    """Return the line of a constructor that failed, or say where its arguments come from if they are wrong."""
    if not isinstance(error, TypeError):
        return None
    is_call = _is_call(error)
    return "the arguments of its constructor are keys of environment.options" if is_call else raised_in(error)


def _has_numbers(env: gymnasium.Env[Any, Any]) -> bool:
    found = (getattr(env, f"{what}_space", None) for what in ("observation", "action"))
    return any(isinstance(space, NUMBERS) for space in found)


def _count(space: spaces.Space[Any]) -> int:
    """Count the numbers of a value of a space."""
    match space:
        case spaces.Dict():
            return sum(map(_count, space.spaces.values()))
        case spaces.Tuple():
            return sum(map(_count, space.spaces))
        case _:
            return int(np.prod(space.shape or ()))


def _without_colours(text: str) -> str:
    r"""Return the text with its coloured pieces in the form ``{colour:piece}``.

    >>> _without_colours("S\x1b[43m\x1b[35mY\x1b[0m\x1b[0mF")
    'S{yellow magenta:Y}F'
    """
    return _COLOURED.sub(lambda found: f"{{{_names(found[1])}:{found[3]}}}", text)


def _names(codes: str) -> str:
    return " ".join(_COLOURS[int(code) % 10 % len(_COLOURS)] for code in _CODE.findall(codes))


SPEC = EnvironmentSpec(
    name="gymnasium",
    make=make,
    tasks=functools.partial(seed_tasks, "gymnasium"),
    description=(
        "Any Gymnasium environment whose actions are discrete or a few numbers, as text. Option env_id: a registered"
        " id; it also serves plain ids such as CartPole-v1 or my_game:MyEnv-v0."
    ),
    isolation=Isolation.THREAD,
    options={"env_id": "CartPole-v1"},
)
