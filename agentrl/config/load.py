"""Config loading: YAML files or shipped configs, with overrides; errors name the key and its line."""

from __future__ import annotations

import difflib
import importlib.resources
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from agentrl import registry
from agentrl.config.config import Config
from agentrl.config.keys import all_keys, describe_unknown_key, describe_unknown_section, models_of
from agentrl.config.overrides import (
    ANNOUNCED,
    MAIN_KEYS,
    KeyPath,
    Override,
    YamlSource,
    apply,
    expand_all,
    overrides_of,
    parse_override,
    parse_source,
)
from agentrl.config.schedule import FORM_KEYS
from agentrl.config.schedule_forms import FORMS, advise
from agentrl.config.trainer import FSDPOptions
from agentrl.errors import ConfigError, did_you_mean, shorten

_EXPECTED: Mapping[str, str] = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "dataclass_type": "a mapping",
    "model_type": "a section with keys",
    "model_attributes_type": "a section with keys",
}
_ALTERNATIVE = re.compile(r"bool|int|float|str|literal\[.*\]")
"""Last element of pydantic's location for a value with several allowed types: the type that was tried."""
_log = logging.getLogger(__name__)
_SHIPPED_PACKAGE = "agentrl.configs"
_PUBLISHED = "recipes/published"
"""Name of the shipped YAML file that is not a config but the table of published values, and of systems without one."""
_SIZE = "size"
"""Key of overrides that selects a section of the config files, and the names of these sections and of the rest."""
_SMALL, _WHOLE = "small", "recipe"
_LOCAL = "local"
"""Type of an engine section without a type."""
_NAMED_KEY = re.compile(r"[a-z_]+(?:\.\w+)+")
_PATH_STARTS = ("./", "../", "/", "~/")
"""First characters of a source that names a file and never a shipped config."""
ConfigSource: TypeAlias = str | Path | Sequence[str | Path] | None
"""A config file or a shipped config's name, or several, each of which overrides the ones before."""


def config_error(error: ValidationError, origin: Callable[[KeyPath], str]) -> ConfigError:
    """Return all problems of a config as one error.

    Args:
        error: Pydantic's error.
        origin: Returns the location of a key: ``"my.yaml line 4"``, ``"override 'a.b=1'"``, or an empty text.
    """
    problems = [_problem(details, origin) for details in _join_alternatives(error.errors())]
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError(f"{len(problems)} problems in the config:\n  " + "\n  ".join(problems))


def _join_alternatives(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Merge the errors of a value's alternative types into one that says what each expects, and those of a schedule."""
    found: list[ErrorDetails] = []
    for details in errors:
        *key, last = details["loc"] or ("",)
        if details["type"] == "extra_forbidden" and key[:1] == ["schedules"] and len(key) == 2:
            if found and found[-1]["type"] == "extra_forbidden" and found[-1]["loc"][:-1] == tuple(key):
                found[-1]["msg"] += f", {last}"
            else:
                found.append({**details, "msg": f"unknown keys, {last}"})
            continue
        if not _ALTERNATIVE.fullmatch(str(last)):
            found.append(details)
        elif found and found[-1]["loc"] == tuple(key):
            found[-1]["msg"] += f", or {describe_expected(details)}"
        else:
            found.append({**details, "loc": tuple(key), "msg": describe_expected(details), "type": "alternatives"})
    return found


def _problem(details: ErrorDetails, origin: Callable[[KeyPath], str]) -> str:
    path = _key_path(details["loc"])
    if details["type"] == "invalid_key":
        path = (*path, str(details["input"]))
    text = _explain(details, path, is_override=origin(path).startswith("override"))
    named = _NAMED_KEY.match(text)  # a section's error names the key that is wrong
    key = tuple(named[0].split(".")) if named else path
    location = (origin(key) if key[: len(path)] == path else "") or origin(path)
    return f"{location}: {text}" if location else text


def _explain(details: ErrorDetails, path: KeyPath, *, is_override: bool) -> str:
    key = ".".join(path)
    match details["type"]:
        case "unexpected_keyword_argument":
            return f"unknown key {key}; known keys here: {', '.join(field.name for field in fields(FSDPOptions))}"
        case "extra_forbidden" if path[0] == "schedules" and len(path) > 2:
            if near := difflib.get_close_matches(path[-1], FORM_KEYS, n=1, cutoff=0.8):
                return f"unknown key {key}; did you mean {'.'.join(path[:-1])}.{near[0]}?"
            return f"the schedule of {path[1]} has {details['msg']}: {FORMS}"
        case "extra_forbidden":
            return describe_unknown_section(path, details["input"]) or describe_unknown_key(path)
        case "missing" if path[:1] == ("environment",):
            return "no environment is set: set environment=household/train, or --env NAME on the command line"
        case "missing":
            return f"{key} is missing"
        case "invalid_key":
            return f"unknown key {key}: got {details['input']!r}, expected a name"
        case "union_tag_invalid":
            tag, known = details["ctx"]["tag"], details["ctx"]["expected_tags"]
            hint = did_you_mean(tag, re.findall(r"'([^']*)'", known))
            return f"unknown {key}: got {tag!r}, expected {known}{f'; {hint}' if hint else ''}"
        case "value_error" | "assertion_error":
            return str(details["ctx"]["error"])
        case _:
            advice = advise(key, details["input"])
            wrong = f"{key}: got {details['input']!r}, expected {describe_expected(details)}"
            if details["type"] == "string_type" and isinstance(details["input"], int | float):
                quoted = f'"{details["input"]}"'
                wrong += "; in quotes, it is text: " + (f"{key}='{quoted}'" if is_override else f"{path[-1]}: {quoted}")
            return f"{wrong}. {advice[0].upper()}{advice[1:]}" if advice else wrong


def describe_expected(details: ErrorDetails) -> str:
    """Return what pydantic expected in place of a value, in words."""
    return _EXPECTED.get(details["type"], _plain(details["msg"]))


def _plain(message: str) -> str:
    plain = message.removeprefix("Input should be ").removeprefix("a valid ")
    return plain.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")


def _key_path(location: Sequence[str | int]) -> KeyPath:
    """Return pydantic's location without list indices and union tags, which are not keys."""
    keys = [part for part in location if isinstance(part, str)]
    if len(keys) > 1 and keys[0] == "engine":
        del keys[1]
    return tuple(keys)


def _shipped_hint(path: Path, known: Sequence[str]) -> str | None:
    """Suggest the shipped config that the last parts of a path name: ``household/grpo`` for ``../household/grpo.yaml``.

    >>> _shipped_hint(Path("../household/grpo.yaml"), ["grpo", "household/grpo"])
    'a config of this name comes with agentrl: household/grpo'
    """
    parts = path.with_suffix("").parts
    ends = ["/".join(parts[first:]) for first in range(len(parts))]
    name = next((end for end in ends if end in known), None)
    return None if name is None else f"a config of this name comes with agentrl: {name}"


def _config_hint(name: str, known: Sequence[str]) -> str | None:
    """Suggest the environment of this name, or the known config with the nearest name or last part of a name."""
    if name.partition("/")[0] in registry.names(registry.Kind.ENVIRONMENT):
        return f"it is the name of an environment: give it as --env {name}"
    parts = {part: config for config in reversed(known) for part in (config.rpartition("/")[2], config)}
    same = [config for part, config in parts.items() if part.lower() == name.lower()]
    close = difflib.get_close_matches(name.lower(), parts, n=3, cutoff=0.5)
    near = same or list(dict.fromkeys(parts[part] for part in close))
    return f"did you mean {' or '.join(near)}?" if near else None


def _file_hint(source: str | Path) -> str | None:
    """Suggest a file that has a suffix which the source lacks."""
    near = next((path for suffix in (".yaml", ".yml") if (path := Path(f"{source}{suffix}")).is_file()), None)
    return f"did you mean {near}?" if near else None


def _override_hint(word: str) -> str | None:
    """Suggest an override for a word that begins with a config key: ``trainer.steps:5``."""
    key, _, value = word.partition(":")
    is_key = tuple(key.removeprefix("~").split(".")) in all_keys()
    return f"an override has an equals sign: {key.removeprefix('~')}={value or 'VALUE'}" if is_key else None


def load_config(source: ConfigSource = None, overrides: Sequence[str] = ()) -> Config:
    """Read a config.

    Args:
        source: A YAML file, or the name of a shipped config (``quickstart``, ``household/grpo``); of several, later
            ones override earlier ones; ``None`` starts from the defaults.
        overrides: ``key.sub=value``; later ones override earlier ones. ``engine=local`` and
            ``environment=household/train`` set a section's main key, and ``size=small`` applies the section ``small``
            of recipes.

    Raises:
        ConfigError: no such file, an unknown key, a wrong value, or a key that the chosen parts would ignore; the
            message names the line or the override.
    """
    files = [(name, parse_source(text, name)) for name, text in map(_read, _as_list(source))]
    small = [(name, part) for name, file in files if (part := file.take(_SMALL)) is not None]
    name, parsed = files[0] if files else ("defaults", YamlSource({}))
    data = expand_all(parsed.data)
    words, is_small = _without_size(map(parse_override, overrides))
    if is_small and not small:
        names = " and ".join(name for name, _ in files) or name
        raise ConfigError(
            f"{names} has no small size", expected=f"a recipe with the section '{_SMALL}'", hint="see docs/recipes.md"
        )
    parts = [*files[1:], *(small if is_small else [])]
    layers = [override for name, part in parts for override in overrides_of(part, name)]
    chosen = [*layers, *words]
    replaced = []
    for number, override in enumerate(chosen):
        before = {section: data.get(section) for section in ANNOUNCED}
        apply(data, override)
        if number >= len(layers):  # one config file may replace the sections of another without a warning
            changed = (
                ReplacedConfig(override.origin, section, old)
                for section, old in before.items()
                if isinstance(old, dict)
            )
            replaced += [one for one in changed if one.is_by(data.get(one.section))]
    config = _validate(data, name, parsed, chosen)
    notices = (one.describe_dropped(data.get(one.section)) for one in replaced)
    for notice in dict.fromkeys(filter(None, notices)):
        _log.warning("%s", notice)
    return config


@dataclass(frozen=True, slots=True)
class ReplacedConfig:
    """A section before an override, which may select another environment, engine or agent loop."""

    override: str
    section: str
    old: Mapping[str, Any]

    def is_by(self, new: Any) -> bool:
        """Return True if `new` selects another environment, engine or agent loop."""
        main = MAIN_KEYS[self.section]
        return isinstance(new, dict) and self.old.get(main, _LOCAL) != new.get(main, _LOCAL)

    def describe_dropped(self, new: Any) -> str | None:
        """Return a message that names the settings that `new` no longer has; ``None`` if nothing was lost."""
        main = MAIN_KEYS[self.section]
        if not self.is_by(new):
            return None
        lost = {key: value for key, value in self.old.items() if key != main and key not in new}
        settings = [f"{self.section}.{key}={value}" for key, value in lost.items() if self._is_chosen(key, value)]
        if not settings:
            return None
        owner = f"{self.section} {self.old.get(main, _LOCAL)}"
        again = f"repeat them after it if {new.get(main)} accepts them"
        return f"{self.override} drops the settings of {owner}: {', '.join(settings)}; {again}"

    def _is_chosen(self, key: str, value: Any) -> bool:
        """Return True if a value differs from the key's default: a run's own config.yaml holds the defaults too."""
        models = models_of(Config.model_fields[self.section].annotation)
        fields = [model.model_fields[key] for model in models if key in model.model_fields]
        return all(field.get_default(call_default_factory=True) != value for field in fields)


def config_from(data: Mapping[str, Any]) -> Config:
    """Return a config from plain data, with sections as mappings or as one word.

    Raises:
        ConfigError: as `load_config`.
    """
    return _validate(expand_all(data), "config", YamlSource({}), [])


def shipped_configs() -> list[str]:
    """Return the names of the configs that come with agentrl, for `load_config`."""
    root = Path(str(importlib.resources.files(_SHIPPED_PACKAGE)))
    names = {path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")}
    return sorted(names - {_PUBLISHED})


def dump_config(config: Config) -> str:
    """Return the resolved config as YAML with every key, defaults included; `load_config` reads it back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _validate(data: dict[str, Any], name: str, parsed: YamlSource, overrides: Sequence[Override]) -> Config:
    def origin(path: KeyPath) -> str:
        for override in reversed(overrides):
            shared = min(len(path), len(override.path))
            if shared and path[:shared] == override.path[:shared]:
                return override.origin
        line = parsed.lines.get(path) or parsed.lines.get(path[:1])
        return f"{name} line {line}" if line else ""

    for section in [name for name, value in data.items() if value is None and _holds_keys(name)]:
        del data[section]  # a section whose keys are all comments
    if isinstance(data.get("engine"), dict):
        data["engine"].setdefault("type", "local")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise config_error(error, origin) from None


def _holds_keys(section: str) -> bool:
    """Return True for a section that always exists, with defaults; null turns other sections off."""
    field = Config.model_fields.get(section)
    return field is not None and not field.is_required() and NoneType not in get_args(field.annotation)


def names_environment(source: ConfigSource) -> bool:
    """Return True if a config, or one of several, names an environment; a hardware config does not.

    Raises:
        ConfigError: as `load_config`.
    """
    return any(
        {"environment", "environments"} & parse_source(text, name).data.keys()
        for name, text in map(_read, _as_list(source))
    )


def _as_list(source: ConfigSource) -> list[str | Path]:
    if source is None:
        return []
    if isinstance(source, Mapping):
        got = f"{type(source).__name__} {shorten(source)}"
        raise ConfigError("a config is not a file", got=got, expected="a file; single keys are overrides")
    return [source] if isinstance(source, str | Path) else list(source)


def _without_size(overrides: Iterable[Override]) -> tuple[list[Override], bool]:
    """Separate the overrides from ``size=small`` and ``size=recipe``; the last of these counts."""
    chosen, size = [], _WHOLE
    for override in overrides:
        if override.path != (_SIZE,):
            chosen.append(override)
        elif override.value in (_SMALL, _WHOLE):
            size = override.value
        else:
            raise ConfigError(f"{override.origin}: no such size", expected=f"{_SIZE}={_SMALL} or {_SIZE}={_WHOLE}")
    return chosen, size == _SMALL


def _read(source: str | Path) -> tuple[str, str]:
    path = Path(source)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", expected="a YAML file, or a shipped config's name")
    if path.parts[:1] == ("runs",) and not path.exists():
        raise ConfigError(f"no run {path}", expected="a run's folder", hint="list the runs: ls runs")
    if path.is_file():
        try:
            return str(path), path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not a text file", got=error, expected="YAML in UTF-8") from error
    name = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    known = shipped_configs()
    if str(source).startswith(_PATH_STARTS):
        hint = _file_hint(source) or _shipped_hint(path, known) or _config_hint(name, known)
        raise ConfigError(f"no config file {source}", expected="a YAML file", hint=hint)
    if name not in known:
        _refuse_missing_recipe(name)
        raise ConfigError(
            f"no config file {source}",
            expected="a YAML file, or a name from agentrl config list",
            hint=_file_hint(source) or _override_hint(str(source)) or _config_hint(name, known),
        )
    return f"{name}.yaml", _shipped_text(name)


def _shipped_text(name: str) -> str:
    return importlib.resources.files(_SHIPPED_PACKAGE).joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def _refuse_missing_recipe(name: str) -> None:
    """Raise an error that says why a known system has no recipe, if `name` is that recipe: ``recipes/simplevla_rl``."""
    if not name.startswith("recipes/"):
        return
    for system, reason in parse_source(_shipped_text(_PUBLISHED), _PUBLISHED).data["missing"].items():
        if re.sub(r"\W+", "_", system.lower()) == name.removeprefix("recipes/").replace("-", "_"):
            raise ConfigError(f"there is no recipe for {system}", hint=str(reason))
