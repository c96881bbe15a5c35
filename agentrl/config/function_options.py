"""Options of functions that a config names: keyword-only parameters, checked before a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import ConfigError, did_you_mean

OUT_OF_RANGE = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"})
"""Pydantic's error types for values of the right type that are out of range."""


def convert_options(called: str, function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Check options of `function`, and convert them to the types of its keyword-only parameters.

    Errors call the function `called`.

    Raises:
        ConfigError: an option is unknown (the message suggests the nearest name), missing, of the wrong type, or
            outside its range.
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    for option in options:
        if option not in parameters:
            raise unknown_option(called, option, list(parameters))
    for option, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            raise ConfigError(f"{called} needs the option {option}")
    return {option: _convert(called, option, value, parameters[option]) for option, value in options.items()}


def unknown_option(called: str, option: str, known: list[str]) -> ConfigError:
    """Return the error for an option that a function does not take."""
    return ConfigError(
        f"{called} does not take this option",
        got=repr(option),
        expected=f"one of {', '.join(known)}" if known else "no options",
        hint=did_you_mean(option, known),
    )


def _convert(called: str, option: str, value: Any, parameter: inspect.Parameter) -> Any:
    if parameter.annotation is inspect.Parameter.empty:
        return value
    try:
        return TypeAdapter(parameter.annotation).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] in OUT_OF_RANGE:
            raise ConfigError(
                f"{called}: option {option} is out of range",
                got=repr(value),
                expected=first["msg"].removeprefix("Input should be "),
            ) from error
        raise ConfigError(
            f"{called}: option {option} has the wrong type",
            got=repr(value),
            expected=_describe_type(parameter.annotation),
        ) from error


def _describe_type(annotation: Any) -> str:
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if get_origin(plain) is Literal:
        return f"one of {', '.join(map(str, get_args(plain)))}"
    if get_origin(plain) is Sequence:
        return f"a list of {_describe_type(get_args(plain)[0])}"
    return inspect.formatannotation(plain)
