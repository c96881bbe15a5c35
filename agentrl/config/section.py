"""Base class of config sections, and number types."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_COUNT = 2**31 - 1
"""Maximum count or size; larger ones are mistakes: token positions and most counters are 32-bit integers."""
MAX_SETTING_S = 365 * 86_400.0
"""Maximum deadline, a year; longer ones are mistakes, and far longer ones overflow the event loop's clock."""
ANY_INTEGER = frozenset({"seed"})
"""Integer keys that are not counts."""
Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
"""A number that is neither infinite nor NaN."""
Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""Decay rate of a moving average: the share of the average that remains after each new value."""


_VARIABLE = re.compile(r"\$\{?[A-Za-z_]")


def user_path(key: str) -> AfterValidator:
    """Return a validator of a path that the user writes: ``~`` is expanded, and environment variables are refused."""

    def expand(path: str) -> str:
        if _VARIABLE.search(path):
            raise ValueError(
                f"{key} has an environment variable, which is not expanded: got {path!r}, expected a path; a shell "
                f'expands it in {key}="$HOME/..." on the command line'
            )
        return str(Path(path).expanduser()) if path.startswith("~") else path

    return AfterValidator(expand)


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, assigned values are checked, docstrings document fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_assignment=True)

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, data: Any) -> Any:
        """Turn ``true`` into text where a number is expected, so that it is refused; otherwise it would be 1."""
        if not isinstance(data, dict):
            return data
        wrong = [
            name
            for name, value in data.items()
            if isinstance(value, bool) and name in cls.model_fields and _is_number(cls.model_fields[name].annotation)
        ]
        return {**data, **{name: str(data[name]).lower() for name in wrong}} if wrong else data


def _is_number(annotation: Any) -> bool:
    """Return True for the type of a number, which may be missing."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return all(part in (int, float, NoneType) for part in parts)


def _is_a_rate(value: float) -> float:
    if value > 1:
        raise PydanticCustomError("too_fast", "at most 1: an update moves each weight by about the learning rate")
    return value


LearningRate: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_is_a_rate)]


def implausible_values(section: Section, path: str = "") -> Iterator[str]:
    """Yield a message for each count and deadline that is implausibly large, with the largest accepted value.

    Args:
        section: The section; nested sections are searched, too.
        path: Key of the section; empty for the whole config.
    """
    for name in type(section).model_fields:
        yield from _implausible(getattr(section, name), f"{path}.{name}" if path else name)


def _implausible(value: Any, key: str) -> Iterator[str]:
    name = key.rpartition(".")[2]
    if isinstance(value, Section):
        yield from implausible_values(value, key)
    elif isinstance(value, Mapping):
        for label, entry in value.items():
            if isinstance(entry, Section):
                yield from implausible_values(entry, f"{key}.{label}")
    elif isinstance(value, int) and value > MAX_COUNT and name not in ANY_INTEGER:
        yield f"{key}: got {value:,}, expected at most {MAX_COUNT:,}"
    elif isinstance(value, float) and name.endswith(("_s", "seconds")) and value > MAX_SETTING_S:
        yield f"{key}: got {value:g} seconds, expected at most {MAX_SETTING_S:,.0f}, a year"
