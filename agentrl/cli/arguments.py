"""Words that several commands share: a config's name, overrides, an environment with its split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config import Config, load_config
from agentrl.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigWords:
    """What stands after ``agentrl train``: at most one config, then overrides."""

    source: str | None
    overrides: list[str]


def config_words(words: Sequence[str]) -> ConfigWords:
    """Tell the config's name from the overrides.

    Raises:
        UsageError: two words that are no overrides.
    """
    sources = [word for word in words if "=" not in word]
    if len(sources) > 1:
        raise UsageError(
            "more than one config is named",
            got=" and ".join(sources),
            expected="one file or shipped name, then key=value overrides",
        )
    return ConfigWords(source=next(iter(sources), None), overrides=[word for word in words if "=" in word])


def read_config(words: Sequence[str] | None, *, shortcuts: Sequence[str] = ()) -> Config:
    """The config that the words describe; `shortcuts` are overrides that options stand for."""
    told = config_words(words or [])
    if told.source is None and not told.overrides and not shortcuts:
        raise UsageError(
            "nothing says what to run",
            expected="a config (agentrl config list), or --env NAME",
            hint="for example: agentrl train quickstart",
        )
    return load_config(told.source, [*shortcuts, *told.overrides])


def shortcut(key: str, value: object) -> list[str]:
    """The override that an option stands for; none when the option was left out."""
    return [] if value is None else [f"{key}={value}"]
