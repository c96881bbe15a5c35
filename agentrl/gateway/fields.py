"""Read and check fields of a client's JSON; errors name the field."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from agentrl.errors import did_you_mean, shorten
from agentrl.gateway.dialect import BadRequest
from agentrl.message import ImagePart
from agentrl.remote.listening import DEEPEST, is_deep

T = TypeVar("T")
NAME = re.compile(r"[^\s<|\\/>]{1,64}")
"""Names of participants that OpenAI accepts."""
MAX_STOP_TEXTS = 64
WORDS: Mapping[type, str] = {
    str: "text",
    dict: "an object",
    list: "a list",
    int: "a whole number",
    bool: "true or false",
}


def is_given(body: Mapping[str, Any], name: str) -> bool:
    """Return True if a field is present and not null; clients send null for fields that they do not set."""
    return body.get(name) is not None


def take(body: Mapping[str, Any], name: str, kind: type[T], path: str = "") -> T:
    """Return a required field.

    Raises:
        BadRequest: the field is missing, or has another type.
    """
    value = body.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        where = f"{path}.{name}" if path else name
        got = "it is missing" if value is None else f"got {shorten(value)}"
        raise BadRequest(f"{where} must be {WORDS.get(kind, kind.__name__)}: {got}", field=where)
    return value


def take_optional(body: Mapping[str, Any], name: str, kind: type[T], default: T, path: str = "") -> T:
    """Return a field, or `default` if it is missing or null."""
    return take(body, name, kind, path) if is_given(body, name) else default


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """Return a number within bounds, or ``None`` if the field is missing or null."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or math.isnan(value):
        raise BadRequest(f"{name} must be a number from {low:g} to {high:g}: got {shorten(value)}", field=name)
    return float(value)


def read_feedback(body: Mapping[str, Any], largest: float) -> tuple[float, bool | None]:
    """Return the reward and the success of ``{"reward": 1.0, "success": true}``; rewards are at most `largest`.

    Raises:
        BadRequest: the body is malformed.
    """
    refuse_unknown(body, ("reward", "success"))
    reward = number(body, "reward", -largest, largest)
    if reward is None:
        raise BadRequest("reward is missing", field="reward")
    return reward, take(body, "success", bool) if is_given(body, "success") else None


def settings(
    body: Mapping[str, Any], numbers: Mapping[str, tuple[float, float]], words: Iterable[str] = ()
) -> dict[str, float | str]:
    """Return the client's generation settings: numbers within bounds, ``seed``, and the texts in `words`."""
    found: dict[str, float | str] = {}
    for name, bounds in numbers.items():
        if (value := number(body, name, *bounds)) is not None:
            found[name] = value
    if is_given(body, "seed"):
        found["seed"] = take(body, "seed", int)
    return found | {name: take(body, name, str) for name in words if is_given(body, name)}


def check_top_logprobs(body: Mapping[str, Any]) -> None:
    """Refuse alternatives of sampled tokens, which engines do not return."""
    if take_optional(body, "top_logprobs", int, 0):
        raise BadRequest(
            "top_logprobs is not supported here: only the sampled tokens have log-probabilities",
            field="top_logprobs",
            code="unsupported",
        )


def positive_int(body: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number of at least 1, or ``None`` if the field is missing or null."""
    if not is_given(body, name):
        return None
    value = take(body, name, int)
    if value < 1:
        raise BadRequest(f"{name} must be 1 or more: got {value}", field=name)
    return value


def refuse(body: Mapping[str, Any], names: Iterable[str], why: str) -> None:
    """Refuse unsupported fields; null, false, empty and 0 are accepted.

    Raises:
        BadRequest: a field is set.
    """
    for name in names:
        if body.get(name):
            raise BadRequest(f"{name} is not supported here: {why}", field=name, code="unsupported")


def refuse_unknown(body: Mapping[str, Any], known: Iterable[str], path: str = "") -> None:
    """Refuse fields that the dialect does not have, unless they are null.

    Raises:
        BadRequest: an unknown field is set.
    """
    names = set(known)
    for name in sorted(set(body) - names):
        if body[name] is not None:
            where = f"{path}.{name}" if path else name
            hint = did_you_mean(name, sorted(names))
            got = f"got {shorten(body[name])}{f'; {hint}' if hint else ''}"
            raise BadRequest(f"{where} is not supported here: {got}", field=where, code="unsupported")


def participant(row: Mapping[str, Any], path: str) -> str | None:
    """Return the name of a message's author, or ``None``; some chat templates show it.

    Raises:
        BadRequest: the name has characters that a chat template could misread.
    """
    if not is_given(row, "name"):
        return None
    name = take(row, "name", str, path)
    if not NAME.fullmatch(name):
        where = f"{path}.name"
        raise BadRequest(
            f"{where} must be 1 to 64 characters without spaces, <, |, \\, / and >: got {shorten(name)}", field=where
        )
    return name


def stop_texts(value: Any, name: str) -> tuple[str, ...]:
    """Return the stop strings of a field that holds one string or a list."""
    texts = [value] if isinstance(value, str) else ([] if value is None else value)
    most = MAX_STOP_TEXTS
    if not isinstance(texts, list) or len(texts) > most or not all(isinstance(text, str) and text for text in texts):
        raise BadRequest(
            f"{name} must be text, or a list of up to {most} non-empty texts: got {shorten(value)}", field=name
        )
    return tuple(texts)


def arguments(text: Any, path: str) -> dict[str, Any]:
    """Return the arguments of a tool call in the history, which clients send as JSON text or as an object.

    Null, an empty text and the text ``null`` mean a call without arguments.

    Raises:
        BadRequest: they are something else.
    """
    if isinstance(text, str):
        try:
            text = json.loads(text or "{}", parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"{path} is not valid JSON: {error}", field=path) from error
        if isinstance(text, dict) and is_deep(text):
            raise BadRequest(f"{path} has more than {DEEPEST} levels of lists and objects", field=path)
    if text is None:
        return {}
    if not isinstance(text, dict):
        raise BadRequest(f"{path} must be an object: got {shorten(text)}", field=path)
    return text


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


def image_of_url(url: str, path: str) -> ImagePart:
    """Return the image of a ``data:`` URL.

    Raises:
        BadRequest: it is another URL, because the gateway fetches nothing; or its text is not valid base64.
    """
    try:
        return ImagePart.from_data_url(url)
    except ValueError as error:
        raise BadRequest(f"{path} cannot be read: {error}", field=path) from error


def image(data: str, media_type: str, path: str) -> ImagePart:
    """Return the image of base64 text, which may be broken into lines.

    Raises:
        BadRequest: the text is not valid base64.
    """
    try:
        return ImagePart(data=base64.b64decode("".join(data.split()), validate=True), media_type=media_type)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"{path} is not valid base64: {error}", field=path) from error


def pieces(text: str, size: int = 40) -> Sequence[str]:
    """Split text for the events of a stream: at least one piece, which is empty only for an empty text."""
    return [text[start : start + size] for start in range(0, len(text), size)] or [""]
