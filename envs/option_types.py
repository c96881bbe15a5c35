"""Checks that the options of a config have the types of a function's annotations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


def typed_options(environment: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the keyword arguments of a function before it is called.

    Args:
        environment: Name of the environment, for messages.

    Returns:
        A decorator; the decorated function raises a `UsageError` that names an option of the wrong type.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.cache
        def adapters() -> dict[str, TypeAdapter[Any]]:
            return {name: TypeAdapter(hint) for name, hint in get_type_hints(function).items() if name != "return"}

        @functools.wraps(function)
        def check_and_call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in kwargs.items():
                if name in adapters():
                    _check(adapters()[name], name, value)
            return function(*args, **kwargs)

        def _check(adapter: TypeAdapter[Any], name: str, value: object) -> None:
            try:
                adapter.validate_python(value, strict=True)
            except ValidationError:
                raise UsageError(
                    f"the option {name} of {environment} has the wrong type",
                    got=repr(value),
                    expected=inspect.signature(function).parameters[name].annotation,
                ) from None

        return check_and_call

    return decorate
