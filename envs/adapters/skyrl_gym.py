"""Environments of SkyRL (package `skyrl-gym`), over data sets in SkyRL's format."""

from __future__ import annotations

import dataclasses
import functools
import string
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from agentrl import registry
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import EnvironmentFailure, UsageError, did_you_mean
from agentrl.message.data_file import Row, message_rows, read_messages, read_rows, refuse_media
from agentrl.registry import Extra
from agentrl.task import Task

from ..split_files import file_of, files_by_split

EXTRA = Extra(name="skyrl-gym", module="skyrl_gym")
NAME, TRAIN, TEST = "skyrl_gym", "train", "test"
SPLITS = (TRAIN, TEST)
OWN_COLUMNS = ("prompt", "env_class")


class SkyRLGym(gymnasium.Env[str, str]):
    """An environment of SkyRL: one object of its class per episode, made from a row of the data.

    Args:
        files: A data file for each split, or one name with ``{split}`` in it: JSON lines or Parquet with the columns
            ``prompt`` (messages), ``env_class`` and those that the environment reads, such as ``reward_spec``.
        environment: Id of SkyRL's registry, or ``module:Class``, for rows without ``env_class``.
        max_turns: Passed to the environment among the columns, as SkyRL's generator does.
        config: Fields of the environment's configuration.

    Raises:
        UsageError: the package is not installed, the data cannot be read, or the environment is unknown or cannot be
            created.
    """

    action_hint = "any text, in the form that the prompt requires"

    def __init__(
        self,
        *,
        files: str | Mapping[str, str] | None = None,
        environment: str | None = None,
        max_turns: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        EXTRA.load()
        self._files, self._environment, self._max_turns, self._config = files, environment, max_turns, config
        self.observation_space = Text(65536, charset=string.printable)
        self.action_space = Text(64, charset=string.ascii_letters + string.digits)
        self._inner: Any = None
        self._over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start the episode of a row: that of the options, or else one of the training split, by its seed.

        Returns:
            The messages that the environment adds to the row's prompt, as text; usually none.
        """
        super().reset(seed=seed)
        self.close()
        if options and "row" in options:
            row = options["row"]
        else:
            rows = _rows(self._files, TRAIN)
            row = rows[(int(self.np_random.integers(len(rows))) if seed is None else seed) % len(rows)].values
        extras = {name: value for name, value in row.items() if name not in OWN_COLUMNS}
        if self._max_turns is not None:
            extras["max_turns"] = self._max_turns
        name = row.get("env_class") or self._environment
        self._inner = create(name, self._config, extras)
        self._over, self._return = False, 0.0
        prompt = [dict(message) for message in message_rows(row["prompt"])]
        shown, _ = self._inner.init([dict(message) for message in prompt])
        if shown[: len(prompt)] != prompt:
            raise EnvironmentFailure(
                f"the environment {name} of skyrl-gym rewrites the prompt",
                expected="an init that keeps it or appends to it",
            )
        return _text_of(shown[len(prompt) :]), {"success": False, "task_type": str(row.get("data_source", name))}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an action: the policy's whole answer.

        Raises:
            UsageError: the episode is over.
        """
        if self._over:
            raise UsageError(f"the episode of {NAME} is over", expected="reset before the next step")
        taken = self._inner.step(action)
        reward = float(taken["reward"])
        self._over = bool(taken["done"])
        self._return += reward
        info: dict[str, Any] = {"success": self._over and self._return >= 1}
        if self._over:
            metrics = {**(taken.get("metadata") or {}), **self._inner.get_metrics()}
            numbers = {name: value for name, value in metrics.items() if isinstance(value, bool | int | float)}
            info["reward_components"] = {name: float(value) for name, value in numbers.items()}
        return _text_of(taken["observations"]), reward, self._over, False, info

    def close(self) -> None:
        """Close SkyRL's environment."""
        if self._inner is not None:
            self._inner.close()
        self._inner = None


def create(name: str | None, config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> Any:
    """Create an environment of SkyRL from its id or ``module:Class``, its configuration and the columns of a row.

    Raises:
        UsageError: it is unknown or cannot be created.
    """
    if not name:
        raise UsageError(
            f"the environment for {NAME} is not set", expected="environment=ID, or the column env_class in the data"
        )
    registration = EXTRA.load("skyrl_gym.envs.registration")
    if ":" not in name and name not in registration.registry:
        raise UsageError(
            "skyrl-gym has no environment with this name",
            got=repr(name),
            expected=f"module:Class, or one of {', '.join(registration.registry)}",
            hint=did_you_mean(name, registration.registry),
        )
    try:
        if ":" in name:
            spec = registration.EnvSpec(id=name, entry_point=registry.load(name))
        else:
            spec = registration.registry[name]
        made = spec.entry_point
        if isinstance(made, str):
            made = registration.load_env_creator(made)
        return registration.make(spec, env_config=_env_config(made, config or {}), extras=dict(extras))
    except (TypeError, ValueError, AssertionError, KeyError, ImportError, AttributeError) as error:
        raise UsageError(f"the environment {name} of skyrl-gym cannot be created", got=error) from error


def _env_config(made: Any, config: Mapping[str, Any]) -> Any:
    """Return the configuration: the data class that the constructor's ``env_config`` names, or else OmegaConf's."""
    hint = typing.get_type_hints(made.__init__).get("env_config")
    kinds = [
        kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    ]
    return kinds[0](**config) if kinds else EXTRA.load("omegaconf").OmegaConf.create(dict(config))


def _text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(str(message["content"]) for message in messages)


def tasks(split: str, *, files: str | Mapping[str, str] | None = None, **_options: Any) -> Sequence[Task]:
    """Return the rows of a split as tasks.

    Raises:
        UsageError: the split has no file, or a row has no prompt.
    """
    return [_task(row, split, number) for number, row in enumerate(_rows(files, split))]


def _task(row: Row, split: str, number: int) -> Task:
    refuse_media(row.values, row.location)
    prompt = message_rows(row.values.get("prompt"), row.location)
    if not isinstance(prompt, list) or not prompt:
        raise UsageError(f"{row.location} has no prompt", got=repr(prompt)[:80], expected="a list of messages")
    messages = tuple(read_messages(prompt, row.location))
    if messages[-1].role != "user":
        raise UsageError(
            f"the prompt of {row.location} cannot be answered",
            got=f"a last message of {messages[-1].role}",
            expected="user",
        )
    return Task(
        id=f"{split}-{number}",
        environment=NAME,
        seed=number,
        options={"row": dict(row.values)},
        messages=messages,
        prompt="\n\n".join(message.text for message in messages),
    )


def _rows(files: str | Mapping[str, str] | None, split: str) -> Sequence[Row]:
    if not files:
        raise UsageError(
            f"the option files of {NAME} is not set", expected="files={train: train.parquet, test: test.parquet}"
        )
    return _read(file_of(files_by_split(files, SPLITS, "data"), split, "data"))


@functools.lru_cache(maxsize=4)
def _read(path: str) -> Sequence[Row]:
    rows = list(read_rows(path, "file of data"))
    if not rows:
        raise UsageError(f"the data file {path} is empty", expected="at least one row")
    return rows


SPEC = EnvironmentSpec(
    name=NAME,
    make=SkyRLGym,
    tasks=tasks,
    splits=SPLITS,
    description=(
        "Environments of SkyRL (skyrl-gym), such as gsm8k or search, and your own classes of its kind, over data sets"
        " in SkyRL's format. Options: files (split to path), environment (for rows without env_class), max_turns,"
        " config (of the environment)."
    ),
    answer_format="free",
    isolation=Isolation.PROCESS,
    extra=EXTRA,
)
