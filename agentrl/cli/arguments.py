"""Arguments of several commands: configs, overrides, ``key=value`` pairs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import typer

from agentrl.config import Config, load_config
from agentrl.config.keys import all_keys
from agentrl.config.overrides import parse_value, warn_ignored, warn_repeated
from agentrl.errors import UsageError

Words: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG]... [KEY=VALUE]...",
        help="Configs, of which later ones override earlier ones; then overrides of single keys.",
    ),
]
EnvName: TypeAlias = Annotated[
    str | None, typer.Option(help="Environment: NAME or NAME/SPLIT; your own as module:Class or ./file.py:Class.")
]
ModelName: TypeAlias = Annotated[str | None, typer.Option(help="Model: a folder, a name, a run, or scratch.")]
ShowConfig: TypeAlias = Annotated[
    bool, typer.Option("--show-config", help="With --dry-run: print the resolved config, too.")
]
Rewards: TypeAlias = Annotated[
    list[str] | None, typer.Option(metavar="NAME[=WEIGHT]", help="Reward function: module:attr; may be repeated.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigWords:
    """Arguments of ``agentrl train``: configs and overrides."""

    source: str | list[str] | None
    """One config, or several; later ones override earlier ones."""
    overrides: list[str]


def config_words(words: Sequence[str]) -> ConfigWords:
    """Separate the names of configs from the overrides.

    Raises:
        UsageError: a key without a value, or a value that the shell split at its spaces.
    """
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


def read_config(words: Sequence[str] | None, *, shortcuts: Sequence[str] = (), reads: str | None = None) -> Config:
    """Read the config that the arguments name, with overrides from options (`shortcuts`).

    Args:
        words: Configs and overrides.
        shortcuts: Overrides from options.
        reads: As in `warn_ignored`; no such warnings if not set.

    Raises:
        UsageError: no arguments and no options.
        ConfigError: see `load_config`.
    """
    given = config_words(words or [])
    if given.source is None and not given.overrides and not shortcuts:
        raise UsageError(
            "no config and no environment",
            expected="a config (agentrl config list), or --env NAME",
            hint="for example: agentrl train quickstart",
        )
    overrides = [*shortcuts, *given.overrides]
    warn_repeated(overrides)
    if reads is not None:
        warn_ignored(given.overrides, reads=reads)
    return load_config(given.source, overrides)


def check_show_config(*, show_config: bool, dry_run: bool) -> None:
    """Check that ``--show-config`` comes with ``--dry-run``.

    Raises:
        UsageError: it comes alone.
    """
    if show_config and not dry_run:
        raise UsageError("--show-config needs --dry-run", hint="a run writes its config.yaml into its folder")


def json_pairs(words: Sequence[str] | None) -> dict[str, Any]:
    """Parse ``key=value`` arguments; values are JSON, otherwise text.

    >>> json_pairs(["low=1", "name=mug", 'sizes=[1, 2]'])
    {'low': 1, 'name': 'mug', 'sizes': [1, 2]}

    Raises:
        UsageError: no equals sign, a repeated key, or a value that is nested too deeply.
    """
    return {key: _json_or_text(key, value) for key, value in _split(words).items()}


def option_pairs(words: Sequence[str] | None) -> dict[str, Any]:
    """Parse options ``key=value`` of an environment, tool or benchmark; values are YAML, as in overrides.

    >>> option_pairs(["level=1", "names=[mug, sink]", "limits={turns: 3}"])
    {'level': 1, 'names': ['mug', 'sink'], 'limits': {'turns': 3}}

    Raises:
        UsageError: no equals sign, a repeated key, or a value that is not valid YAML.
    """
    return {key: parse_value(value, (key,), f"option {key}={value}") for key, value in _split(words).items()}


def _split(words: Sequence[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words or []:
        key, separator, value = word.partition("=")
        if not separator:
            raise UsageError("invalid argument", got=repr(word), expected="key=value")
        if key in found:
            raise UsageError(f"{key} is given twice", got=f"{key}={found[key]} and {word}", expected="one value")
        found[key] = value
    return found


def _json_or_text(key: str, value: str) -> Any:
    try:
        return json.loads(value)
    except RecursionError as error:
        raise UsageError(f"the value of {key} is nested too deeply", got=f"{len(value)} characters of JSON") from error
    except ValueError:  # not JSON, or a number with thousands of digits
        return value
