"""Reading the fields of a client's JSON, with errors that name them."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from agentrl.gateway.dialect import BadRequest
from agentrl.message import ImagePart
from agentrl.remote.listening import DEEPEST, is_deep

T = TypeVar("T")
NAME = re.compile(r"[^\s<|\\/>]{1,64}")
"""Names of participants, as OpenAI takes them."""
WORDS: Mapping[type, str] = {
    str: "text",
    dict: "an object",
    list: "a list",
    int: "a whole number",
    bool: "true or false",
}


def given(body: Mapping[str, Any], name: str) -> bool:
    """Return True if a field is there and not null: clients send null for what they leave out."""
    return body.get(name) is not None


def take(body: Mapping[str, Any], name: str, kind: type[T], path: str = "") -> T:
    """Return a required field.

    Raises:
        BadRequest: it is missing, or of another kind.
    """
    value = body.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        where = f"{path}.{name}" if path else name
        got = "it is missing" if value is None else f"got {shown(value)}"
        raise BadRequest(f"{where} must be {WORDS.get(kind, kind.__name__)}: {got}", field=where)
    return value


def optional(body: Mapping[str, Any], name: str, kind: type[T], default: T, path: str = "") -> T:
    """Return a field, or `default` where it is left out or null."""
    return take(body, name, kind, path) if given(body, name) else default


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """Return a number within bounds, or ``None`` where it is left out."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or math.isnan(value):
        raise BadRequest(f"{name} must be a number from {low:g} to {high:g}: got {shown(value)}", field=name)
    return float(value)


def settings(
    body: Mapping[str, Any], numbers: Mapping[str, tuple[float, float]], words: Iterable[str] = ()
) -> dict[str, float | str]:
    """Return how a client wants the model to answer: numbers within bounds, ``seed``, and words."""
    found: dict[str, float | str] = {}
    for name, bounds in numbers.items():
        if (value := number(body, name, *bounds)) is not None:
            found[name] = value
    if given(body, "seed"):
        found["seed"] = take(body, "seed", int)
    return found | {name: take(body, name, str) for name in words if given(body, name)}


def check_top_logprobs(body: Mapping[str, Any]) -> None:
    """Refuse the alternatives of sampled tokens, which engines are not asked for."""
    if optional(body, "top_logprobs", int, 0):
        raise BadRequest(
            "top_logprobs is not supported here: the sampled tokens are known, and not what else was likely",
            field="top_logprobs",
            code="unsupported",
        )


def positive(body: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number from 1 on, or ``None`` where it is left out."""
    if not given(body, name):
        return None
    value = take(body, name, int)
    if value < 1:
        raise BadRequest(f"{name} must be 1 or more: got {value}", field=name)
    return value


def refuse(body: Mapping[str, Any], names: Iterable[str], why: str) -> None:
    """Refuse fields that ask for what cannot be done; null, false, empty and 0 ask for nothing.

    Raises:
        BadRequest: one is there.
    """
    for name in names:
        if body.get(name):
            raise BadRequest(f"{name} is not supported here: {why}", field=name, code="unsupported")


def refuse_unknown(body: Mapping[str, Any], known: Iterable[str], path: str = "") -> None:
    """Refuse fields that this dialect does not know, unless they are null.

    Raises:
        BadRequest: one is there.
    """
    for name in sorted(set(body) - set(known)):
        if body[name] is not None:
            where = f"{path}.{name}" if path else name
            raise BadRequest(f"{where} is not known here: got {shown(body[name])}", field=where, code="unsupported")


def participant(row: Mapping[str, Any], path: str) -> str | None:
    """Return the name of who speaks in a message, or ``None``; some chat templates show it.

    Raises:
        BadRequest: it could be taken for something else than a name.
    """
    if not given(row, "name"):
        return None
    name = take(row, "name", str, path)
    if not NAME.fullmatch(name):
        where = f"{path}.name"
        raise BadRequest(
            f"{where} must be 1 to 64 characters without spaces, <, |, \\, / and >: got {shown(name)}", field=where
        )
    return name


def stop_texts(value: Any, name: str, most: int = 64) -> tuple[str, ...]:
    """Return stop texts, of which a client may give one as it is, or a list."""
    texts = [value] if isinstance(value, str) else ([] if value is None else value)
    if not isinstance(texts, list) or len(texts) > most or not all(isinstance(text, str) and text for text in texts):
        raise BadRequest(f"{name} must be text, or up to {most} texts: got {shown(value)}", field=name)
    return tuple(texts)


def arguments(text: Any, path: str) -> dict[str, Any]:
    """Return the arguments of a tool call that a client sends back as JSON text or as an object.

    Raises:
        BadRequest: they are neither.
    """
    if isinstance(text, str):
        try:
            text = json.loads(text or "{}", parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"{path} is not valid JSON: {error}", field=path) from error
        if is_deep(text):
            raise BadRequest(f"{path} has more than {DEEPEST} levels of lists and objects", field=path)
    if not isinstance(text, dict):
        raise BadRequest(f"{path} must be an object: got {shown(text)}", field=path)
    return text


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")


def image_of_url(url: str, path: str) -> ImagePart:
    """Return the image of a ``data:`` URL.

    Raises:
        BadRequest: it is another address: nothing is fetched.
    """
    head, comma, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise BadRequest(f"{path} must be a data: URL in base64: got {shown(url[:60])}", field=path)
    return image(data, head.removeprefix("data:").removesuffix(";base64"), path)


def image(data: str, media_type: str, path: str) -> ImagePart:
    """Return the image of base64 text.

    Raises:
        BadRequest: it is no base64.
    """
    try:
        return ImagePart(data=base64.b64decode(data, validate=True), media_type=media_type)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"{path} is no base64: {error}", field=path) from error


def pieces(text: str, size: int = 40) -> Sequence[str]:
    """Split text for the events of a stream; one piece at least, none of them empty unless all is."""
    return [text[start : start + size] for start in range(0, len(text), size)] or [""]


def shown(value: Any) -> str:
    """Return a value for an error message, cut short."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
