"""Conversion of what MCP tools return, results and errors, to text and images for the policy."""

from __future__ import annotations

import base64
import binascii
import io
import json
import re
from collections.abc import Iterator, Sequence, Set
from typing import Any

from PIL import Image

from agentrl.message import ImagePart
from agentrl.tool.results import as_text

from .mcp_arguments import EXTRA

NOTHING = "[nothing]"
MAX_VALUES = 100
"""Maximum number of places in one text where JSON is looked for."""
_OPENING = re.compile(r"[{\[]")
_BETWEEN_WORDS = re.compile(r"[:=,;\s]+")


def result_text(result: Any) -> str:
    """Write the result of a call (`mcp.types.CallToolResult`) as text.

    Structured content is added as JSON unless the content repeats all of it. Servers should repeat it there, but many
    send a summary or nothing.
    """
    return "\n".join(map(as_text, _parts(result)))


def result_value(result: Any) -> str | list[str | ImagePart]:
    """Write the result of a call as text, or as a list of texts and images if it contains images."""
    parts = _parts(result)
    return parts if any(isinstance(part, ImagePart) for part in parts) else result_text(result)


def _parts(result: Any) -> list[str | ImagePart]:
    parts = [part for one in result.content if (part := _part(one))]
    structured = result.structured_content
    if structured is not None and any(isinstance(part, ImagePart) for part in parts):
        blocks = [one for one in result.content if one.type in ("image", "text")]
        structured = _without_blocks(structured, {getattr(one, "data", None) or one.text for one in blocks})
    if structured is not None and not _repeats([part for part in parts if isinstance(part, str)], structured):
        parts.append(json.dumps(structured, ensure_ascii=False))
    return parts


def _without_blocks(structured: Any, known: Set[str]) -> Any:
    """Remove blocks of the content, and its images, from structured content; ``None`` if nothing is left.

    Servers with a return type of blocks repeat them there, and base64 is long.
    """
    if isinstance(structured, str):
        return None if structured.rpartition(",")[2] in known else structured
    if isinstance(structured, list):
        return [left for one in structured if (left := _without_blocks(one, known)) is not None] or None
    if not isinstance(structured, dict):
        return structured
    own = [structured[name] for name in ("data", "text") if isinstance(structured.get(name), str)]
    if "type" in structured and known & set(own):
        return None
    found = {name: _without_blocks(value, known) for name, value in structured.items()}
    return {name: value for name, value in found.items() if value is not None or structured[name] is None} or None


def error_text(error: Any) -> str:
    """Write a JSON-RPC error: its message, and its data, as text or JSON, if they add to it."""
    data = "" if error.data in (None, "", [], {}) else as_text(error.data)
    return "\n".join(filter(None, [error.message, "" if data in error.message else data])) or f"error {error.code}"


def complete_result(error: Any) -> Any:
    """Complete a result that was refused because it lacks ``content``, which other MCP packages do not require."""
    if not isinstance(error, EXTRA.load("pydantic").ValidationError):
        return None
    lacks = [one["input"] for one in error.errors() if (one["type"], one["loc"]) == ("missing", ("content",))]
    if error.error_count() != 1 or not lacks:
        return None
    return EXTRA.load("mcp.types").CallToolResult.model_validate({**lacks[0], "content": []})


def first_problem(error: Any) -> str:
    """Describe the first problem of a `pydantic.ValidationError`."""
    found = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"


def _part(part: Any) -> str | ImagePart:
    if part.type == "image":
        return _image(part)
    if part.type == "text":
        return str(part.text)
    if part.type == "resource":
        return _resource_text(part.resource)
    if part.type == "resource_link":
        return f"[{part.title or part.name}: {part.uri}]" + (f" {part.description}" if part.description else "")
    return _notice(part)


def _notice(part: Any) -> str:
    return f"[{part.type}: {getattr(part, 'mime_type', None) or 'unknown'}]"


def _image(part: Any) -> str | ImagePart:
    """Read an image; one that is not base64, or that no model can read, such as SVG, becomes a notice."""
    try:
        data = base64.b64decode("".join(part.data.split()), validate=True)
        with Image.open(io.BytesIO(data)):
            return ImagePart(data=data, media_type=part.mime_type)
    except (OSError, ValueError, Image.DecompressionBombError):
        return _notice(part)


def _resource_text(resource: Any) -> str:
    """Write an embedded resource: its text, even if it was sent as bytes; otherwise its address and type."""
    text = getattr(resource, "text", None)
    if text is not None:
        return str(text)
    kind = resource.mime_type or "unknown"
    if kind.startswith("text/") or kind.partition(";")[0] == "application/json":
        try:
            return base64.b64decode(resource.blob).decode()
        except (binascii.Error, ValueError):
            pass  # its type is wrong: treat it like other binary resources
    return f"[resource: {resource.uri}, {kind}]"


def _repeats(parts: Sequence[str], structured: Any) -> bool:
    """Return True if the parts certainly repeat all of the structured content.

    They do so as JSON that has every field, as nothing but fields and values (``3 rows``), or, if a server wrapped a
    plain value as ``{"result": value}``, as that value or as the items of that list.
    """
    wanted = [structured]
    if isinstance(structured, dict) and list(structured) == ["result"]:
        wanted.append(structured["result"])
    try:
        found = [value for part in parts for value in _json_values(part)]
        if any(_covers(value, one) for value in found for one in wanted):
            return True
        return _is_plain_value(parts, wanted[-1]) or _is_fields_only("\n".join(parts), structured)
    except RecursionError:
        return False


def _json_values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text: the whole text, or the objects and lists in it."""
    try:
        yield json.loads(text)
        return
    except ValueError:
        pass
    decoder, place = json.JSONDecoder(), 0
    for _ in range(MAX_VALUES):
        start = _OPENING.search(text, place)
        if start is None:
            return
        try:
            value, place = decoder.raw_decode(text, start.start())
        except ValueError:
            place = start.end()
        else:
            yield value


def _covers(found: Any, wanted: Any) -> bool:
    """Return True if a JSON value has all fields of another one, with the same values."""
    if isinstance(wanted, dict):
        is_object = isinstance(found, dict) and wanted.keys() <= found.keys()
        return is_object and all(_covers(found[name], value) for name, value in wanted.items())
    if isinstance(wanted, list):
        is_list = isinstance(found, list) and len(found) == len(wanted)
        return is_list and all(map(_covers, found, wanted))
    return isinstance(found, bool) == isinstance(wanted, bool) and bool(found == wanted)


def _is_plain_value(parts: Sequence[str], value: Any) -> bool:
    """Return True if the parts are a plain value, or the items of a list in their order."""
    values = value if isinstance(value, list) else [value]
    return len(values) == len(parts) > 0 and all(map(_is_one, parts, values))


def _is_one(text: str, value: Any) -> bool:
    return text == value or any(_covers(found, value) for found in _json_values(text))


def _is_fields_only(text: str, structured: Any) -> bool:
    """Return True if a text consists of the fields of an object, each before or after its value."""
    if not isinstance(structured, dict) or any(isinstance(value, dict | list) for value in structured.values()):
        return False
    pairs = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in structured.items()]
    words = _words(text)
    return bool(pairs) and words in (
        [word for name, value in pairs for word in (*_words(name), *_words(value))],
        [word for name, value in pairs for word in (*_words(value), *_words(name))],
    )


def _words(text: str) -> list[str]:
    return _BETWEEN_WORDS.sub(" ", text).split()
