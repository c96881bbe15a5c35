"""Validation errors in words: which key, where it was written, what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agentrl.config.episodes import MixedEnvironmentConfig
from agentrl.config.fsdp import FSDPOptions
from agentrl.config.schema import Config
from agentrl.config.yaml_source import KeyPath
from agentrl.errors import ConfigError

LABELLED = "environments"
"""The section that holds others under labels of the user's."""
LABEL_WORD = "LABEL"
"""Stands for such a label."""
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
"""What pydantic puts behind a key for one of several types that its value may have."""


def config_error(error: ValidationError, origin: Callable[[KeyPath], str]) -> ConfigError:
    """All problems of a config as one error.

    Args:
        error: What pydantic found.
        origin: Where a key was written: ``"my.yaml line 4"``, ``"override 'a.b=1'"``, or an empty text.
    """
    problems = [_problem(details, origin) for details in _joined(error.errors())]
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError(f"{len(problems)} problems in the config:\n  " + "\n  ".join(problems))


def _joined(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """The errors, where a value that fits none of a key's alternatives counts as one that says what each expects."""
    found: list[ErrorDetails] = []
    for details in errors:
        *key, last = details["loc"] or ("",)
        if not _ALTERNATIVE.fullmatch(str(last)):
            found.append(details)
        elif found and found[-1]["loc"] == tuple(key):
            found[-1]["msg"] += f", or {_expected(details)}"
        else:
            found.append({**details, "loc": tuple(key), "msg": _expected(details), "type": "alternatives"})
    return found


def _problem(details: ErrorDetails, origin: Callable[[KeyPath], str]) -> str:
    path = _key_path(details["loc"])
    place = origin(path)
    prefix = f"{place}: " if place else ""
    return prefix + _explain(details, path)


def _explain(details: ErrorDetails, path: KeyPath) -> str:
    key = ".".join(path)
    match details["type"]:
        case "unexpected_keyword_argument":
            return f"unknown key {key}; known keys here: {', '.join(field.name for field in fields(FSDPOptions))}"
        case "extra_forbidden":
            return f"unknown key {key}{_suggestion(path)}"
        case "missing" if path[:1] == ("environment",):
            return "no environment is named: give environment=household/train, or --env NAME on the command line"
        case "missing":
            return f"{key} is missing"
        case "union_tag_invalid":
            return f"unknown {key}: got {details['ctx']['tag']!r}, expected {details['ctx']['expected_tags']}"
        case "value_error" | "assertion_error":
            return str(details["ctx"]["error"])
        case _:
            return f"{key}: got {details['input']!r}, expected {_expected(details)}"


def _expected(details: ErrorDetails) -> str:
    return _EXPECTED.get(details["type"], _plain(details["msg"]))


def _plain(message: str) -> str:
    plain = message.removeprefix("Input should be ").removeprefix("a valid ")
    return plain.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")


def _suggestion(path: KeyPath) -> str:
    section = section_at(path[:-1])
    if path[-1] in section:
        return f" for this {'.'.join(path[:-1])}: it belongs to another type of it"
    near = difflib.get_close_matches(path[-1], section or [], n=1, cutoff=0.6)
    if near:
        return f"; did you mean {'.'.join((*path[:-1], near[0]))}?"
    elsewhere = [".".join(key) for key in all_keys() if key[-1] == path[-1]]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; known keys here: {', '.join(section)}" if section else ""


def section_at(path: KeyPath) -> list[str]:
    """The keys of the section at `path` (of all variants, for a section with a ``type``); empty when there is none."""
    models: list[type[BaseModel]] = [Config]
    for key in (*path[:1], *path[2:]) if path[:1] == (LABELLED,) else path:
        models = [inner for model in models if key in model.model_fields for inner in models_of(_type(model, key))]
    return sorted({name for model in models for name in model.model_fields})


def all_keys() -> list[KeyPath]:
    """The path of every key that holds a value."""
    found: dict[KeyPath, None] = {}
    _walk(Config, (), found)
    return list(found)


def _walk(model: type[BaseModel], path: KeyPath, found: dict[KeyPath, None]) -> None:
    for name in own_fields(model):
        inner = models_of(_type(model, name))
        for section in inner:
            _walk(section, (*path, *key_words(name)), found)
        if not inner:
            found[(*path, name)] = None


def own_fields(model: type[BaseModel]) -> list[str]:
    """The keys of a section without those that it has from another one, where they are explained."""
    return [name for name in model.model_fields if model is not MixedEnvironmentConfig or name in model.__annotations__]


def key_words(section: str) -> KeyPath:
    """A section's name as it stands in paths of keys: with a place for the user's label where it has labels."""
    return (section, LABEL_WORD) if section == LABELLED else (section,)


def _type(model: type[BaseModel], field: str) -> Any:
    return model.model_fields[field].annotation


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The sections among the alternatives of a field's type, or under its labels."""
    if get_origin(annotation) is dict:
        return models_of(get_args(annotation)[1])
    if get_origin(annotation) in (Union, UnionType):
        return [model for part in get_args(annotation) for model in models_of(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _key_path(location: Sequence[str | int]) -> KeyPath:
    """Pydantic's location without list indices and without the tag of a union, which is no key."""
    keys = [part for part in location if isinstance(part, str)]
    if len(keys) > 1 and keys[0] == "engine":
        del keys[1]
    return tuple(keys)
