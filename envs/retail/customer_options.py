"""Options of a customer that a language model plays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentrl.errors import UsageError, did_you_mean
from agentrl.remote.chat import ServiceSettings

SECTION = "environment.options.customer"
ROLE: Final = "role"
"""Value of the option with which the runtime plays the customer."""
DEFAULTS: Mapping[str, Any] = {
    "temperature": 0.0,
    "api_key_variable": "OPENAI_API_KEY",
    "timeout_s": 25.0,
    "max_tokens": 1024,
    "patience": 30,
}
"""Defaults of the optional keys; `url` and `model` are required."""
_KEYS = ("url", "model", *DEFAULTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerOptions:
    """Service that plays the customer, and settings of its requests."""

    service: ServiceSettings
    temperature: float
    max_tokens: int
    """Maximum tokens of an answer, including thinking."""
    patience: int
    """Number of answers after which the customer leaves."""


def parse_customer(given: object) -> CustomerOptions:
    """Check the option ``customer`` of a config.

    Its keys: ``url``, the service's base URL, including ``/v1``; ``model``, the service's name of the model;
    ``temperature``; ``api_key_variable``, the environment variable with the key; ``timeout_s``, the time limit of one
    answer with all its retries; ``max_tokens`` of one answer; ``patience``, the number of the customer's answers.

    Raises:
        UsageError: a key is missing or unknown, or a value is not allowed.
    """
    if not isinstance(given, Mapping):
        expected = f"{{url: http://HOST:PORT/v1, model: NAME}}, or {ROLE}"
        raise UsageError(f"{SECTION} is not valid", got=repr(given), expected=expected)
    for name in given:
        if name not in _KEYS:
            hint = did_you_mean(name, _KEYS)
            raise UsageError(f"{SECTION} has no key {name!r}", expected=f"one of {', '.join(_KEYS)}", hint=hint)
    values = {**DEFAULTS, **given}
    url = _text(values, "url", expected="the service's base address, such as http://127.0.0.1:8000/v1")
    if not re.match(r"https?://[^/\s]+", url):
        raise UsageError(f"{SECTION}.url is not an address", got=repr(url), expected="http://HOST:PORT/v1")
    return CustomerOptions(
        service=ServiceSettings(
            url=url,
            model=_text(values, "model", expected="the service's name of the model"),
            api_key_variable=_text(values, "api_key_variable", expected="the name of an environment variable"),
            timeout_s=_number(values, "timeout_s", above=0.0),
            section=SECTION,
        ),
        temperature=_number(values, "temperature"),
        max_tokens=_count(values, "max_tokens"),
        patience=_count(values, "patience"),
    )


def _text(values: Mapping[str, Any], name: str, *, expected: str) -> str:
    value = values.get(name)
    if not isinstance(value, str) or not value.strip():
        got = "nothing" if value is None else repr(value)
        raise UsageError(f"{SECTION}.{name} is missing or not a text", got=got, expected=expected)
    return value


def _number(values: Mapping[str, Any], name: str, *, above: float | None = None) -> float:
    value = values[name]
    expected = "a number of at least 0" if above is None else f"a number above {above:g}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < float("inf") or value == above:
        raise UsageError(f"{SECTION}.{name} is not valid", got=repr(value), expected=expected)
    return float(value)


def _count(values: Mapping[str, Any], name: str) -> int:
    value = values[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{SECTION}.{name} is not valid", got=repr(value), expected="a whole number of at least 1")
    return value
