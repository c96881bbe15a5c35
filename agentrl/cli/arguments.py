"""Words that several commands share: a config's name, overrides, ``key=value`` pairs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import typer

from agentrl.config import Config, load_config
from agentrl.config.load import all_keys
from agentrl.errors import UsageError

Words: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG]... [KEY=VALUE]...",
        help="Configs, each on top of the one before; then overrides.",
    ),
]
EnvName: TypeAlias = Annotated[
    str | None, typer.Option(help="The environment: NAME or NAME/SPLIT; your own as module:Class or ./file.py:Class.")
]
ModelName: TypeAlias = Annotated[str | None, typer.Option(help="The model: a folder, a name, a run, or scratch.")]
Rewards: TypeAlias = Annotated[
    list[str] | None, typer.Option(metavar="NAME[=WEIGHT]", help="A reward function: module:attr; may be repeated.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigWords:
    """The words after ``agentrl train``: configs, each on top of the one before, then overrides."""

    source: str | list[str] | None
    """The config, or several."""
    overrides: list[str]


def config_words(words: Sequence[str]) -> ConfigWords:
    """Separate the names of configs from the overrides; refuse a value that the shell split at its spaces."""
    sources = [word for word in words if "=" not in word]
    if keys := [word for word in sources if tuple(word.split(".")) in all_keys()]:
        raise UsageError(f"{keys[0]} has no value", expected="key=value", hint=f"for example: {keys[0]}=...")
    torn = any(word.count(opening) != word.count(closing) for word in words for opening, closing in ("{}", "[]"))
    if len(sources) > 1 and torn:
        raise UsageError(
            "a value was split at its spaces",
            got=" and ".join(sources),
            expected="files or shipped names, then key=value overrides",
            hint="put quotes around a value with spaces: 'key={a: 1, b: 2}'",
        )
    source = sources if len(sources) > 1 else next(iter(sources), None)
    return ConfigWords(source=source, overrides=[word for word in words if "=" in word])


def read_config(words: Sequence[str] | None, *, shortcuts: Sequence[str] = ()) -> Config:
    """The config that the words describe; `shortcuts` are overrides that options stand for."""
    given = config_words(words or [])
    if given.source is None and not given.overrides and not shortcuts:
        raise UsageError(
            "nothing says what to run",
            expected="a config (agentrl config list), or --env NAME",
            hint="for example: agentrl train quickstart",
        )
    return load_config(given.source, [*shortcuts, *given.overrides])


def shortcut(key: str, value: object) -> list[str]:
    """The override that an option stands for; none when the option was left out."""
    return [] if value is None else [f"{key}={value}"]


def json_pairs(words: Sequence[str] | None) -> dict[str, Any]:
    """``key=value`` words as a dictionary; a value is JSON, else text.

    >>> json_pairs(["low=1", "name=mug", 'sizes=[1, 2]'])
    {'low': 1, 'name': 'mug', 'sizes': [1, 2]}

    Raises:
        UsageError: a word without an equals sign.
    """
    return dict(_pair(word) for word in words or [])


def _pair(word: str) -> tuple[str, Any]:
    key, separator, value = word.partition("=")
    if not separator:
        raise UsageError("a word is not understood", got=repr(word), expected="key=value")
    try:
        return key, json.loads(value)
    except RecursionError as error:
        raise UsageError(f"the value of {key} is nested too deeply", got=f"{len(value)} characters of JSON") from error
    except ValueError:  # a number of thousands of digits among them
        return key, value
