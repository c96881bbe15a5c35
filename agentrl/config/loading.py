"""Reading a config: a YAML file or a shipped config's name, overrides on top, all keys checked."""

from __future__ import annotations

import difflib
import importlib.resources
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import ValidationError

from agentrl.config.overrides import (
    MAIN_KEYS,
    REPLACED_WHOLE,
    Override,
    apply,
    expand_all,
    overrides_of,
    parse_override,
)
from agentrl.config.problems import config_error, models_of
from agentrl.config.schema import Config
from agentrl.config.yaml_source import KeyPath, Source, parse_source
from agentrl.errors import ConfigError

_log = logging.getLogger(__name__)

_SHIPPED_PACKAGE = "agentrl.configs"
_LOCAL = "local"
"""The engine of a section that names none."""

ConfigSource: TypeAlias = str | Path | Sequence[str | Path] | None
"""A config file or a shipped config's name, or several, each on top of the one before."""


def load_config(source: ConfigSource = None, overrides: Sequence[str] = ()) -> Config:
    """Read a config.

    Args:
        source: A YAML file, or the name of a shipped config (``quickstart``, ``household/grpo``); several are put on
            top of each other, later ones win; ``None`` starts from the defaults.
        overrides: ``key.sub=value``, later ones win; ``engine=local`` and ``environment=household/train`` are short
            for a section's main key.

    Raises:
        ConfigError: no such file, an unknown key, a wrong value, or a key that the chosen parts would ignore; the
            message says in which line or override.
    """
    sources = _listed(source)
    name, text = _read(sources[0]) if sources else ("defaults", "")
    parsed = parse_source(text, name)
    data = expand_all(parsed.data)
    layers = [override for other in sources[1:] for override in _layer(other)]
    chosen = [*layers, *(parse_override(override) for override in overrides)]
    replaced = []
    for number, override in enumerate(chosen):
        before = {section: data.get(section) for section in REPLACED_WHOLE}
        apply(data, override)
        if number >= len(layers):  # a config on top of another is meant to replace
            changed = (
                Replaced(override.place, section, old) for section, old in before.items() if isinstance(old, dict)
            )
            replaced += [one for one in changed if one.is_by(data.get(one.section))]
    config = _validate(data, name, parsed, chosen)
    dropped = (one.dropped(data.get(one.section)) for one in replaced)
    for told in dict.fromkeys(filter(None, dropped)):
        _log.warning("%s", told)
    return config


@dataclass(frozen=True, slots=True)
class Replaced:
    """A section before an override, which may have put another environment or engine in its place."""

    override: str
    section: str
    old: Mapping[str, Any]

    def is_by(self, new: Any) -> bool:
        """Whether `new` is the section of another environment or engine."""
        main = MAIN_KEYS[self.section]
        return isinstance(new, dict) and self.old.get(main, _LOCAL) != new.get(main, _LOCAL)

    def dropped(self, new: Any) -> str | None:
        """Name the settings that `new` no longer has, for the user; ``None`` where nothing was lost."""
        main = MAIN_KEYS[self.section]
        if not self.is_by(new):
            return None
        lost = {key: value for key, value in self.old.items() if key != main and key not in new}
        settings = [f"{self.section}.{key}={value}" for key, value in lost.items() if self._is_chosen(key, value)]
        if not settings:
            return None
        owner = f"{self.section} {self.old.get(main, _LOCAL)}"
        again = f"give them after it if {new.get(main)} takes them"
        return f"{self.override} drops the settings of {owner}: {', '.join(settings)}; {again}"

    def _is_chosen(self, key: str, value: Any) -> bool:
        """Return True if a value differs from the key's default: a run's own config.yaml holds the defaults too."""
        models = models_of(Config.model_fields[self.section].annotation)
        fields = [model.model_fields[key] for model in models if key in model.model_fields]
        return all(field.get_default(call_default_factory=True) != value for field in fields)


def config_from(data: Mapping[str, Any]) -> Config:
    """A config from plain data, sections as mappings or as one word.

    Raises:
        ConfigError: as `load_config`.
    """
    return _validate(expand_all(data), "config", Source({}), [])


def shipped_configs() -> list[str]:
    """Names of the configs that come with agentrl, as `load_config` takes them."""
    root = Path(str(importlib.resources.files(_SHIPPED_PACKAGE)))
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))


def dump_config(config: Config) -> str:
    """The resolved config as YAML: every key, defaults included; `load_config` reads it back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _validate(data: dict[str, Any], name: str, parsed: Source, overrides: Sequence[Override]) -> Config:
    def origin(path: KeyPath) -> str:
        for override in reversed(overrides):
            shared = min(len(path), len(override.path))
            if shared and path[:shared] == override.path[:shared]:
                return override.place
        line = parsed.lines.get(path) or parsed.lines.get(path[:1])
        return f"{name} line {line}" if line else ""

    if isinstance(data.get("engine"), dict):
        data["engine"].setdefault("type", "local")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise config_error(error, origin) from None


def names_environment(source: ConfigSource) -> bool:
    """Return True if a config, or one of several, names an environment; a hardware config does not.

    Raises:
        ConfigError: as `load_config`.
    """
    return any(
        {"environment", "environments"} & parse_source(text, name).data.keys()
        for name, text in map(_read, _listed(source))
    )


def _listed(source: ConfigSource) -> list[str | Path]:
    if source is None:
        return []
    return [source] if isinstance(source, str | Path) else list(source)


def _layer(source: str | Path) -> list[Override]:
    name, text = _read(source)
    return overrides_of(parse_source(text, name), name)


def _read(source: str | Path) -> tuple[str, str]:
    path = Path(source)
    if path.is_file():
        try:
            return str(path), path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is no text file", got=error, expected="YAML in UTF-8") from error
    name = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    known = shipped_configs()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        raise ConfigError(
            f"no config file {source}",
            expected=f"a YAML file, or one of {', '.join(known)}",
            hint=f"did you mean {near[0]}?" if near else None,
        )
    file = importlib.resources.files(_SHIPPED_PACKAGE).joinpath(f"{name}.yaml")
    return f"{name}.yaml", file.read_text(encoding="utf-8")
