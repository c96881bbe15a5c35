"""Results of MCP tools as text: the policy reads text, whatever a server returns."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from typing import Any

NOTHING = "[nothing]"


def result_text(result: Any) -> str:
    """Write the result of a call (`mcp.types.CallToolResult`) as text.

    Structured content is added as JSON where the content leaves a part of it out; servers should repeat it there, and
    many send a summary, or nothing.
    """
    parts = [_part_text(part) for part in result.content]
    text = "\n".join(part for part in parts if part)
    structured = result.structured_content
    if structured is not None and not _contains(text, structured):
        text = "\n".join(filter(None, [text, json.dumps(structured, ensure_ascii=False)]))
    return text


def _part_text(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource":
        return _resource_text(part.resource)
    if part.type == "resource_link":
        return f"[{part.title or part.name}: {part.uri}]" + (f" {part.description}" if part.description else "")
    return f"[{part.type}: {getattr(part, 'mime_type', None) or 'unknown'}]"


def _resource_text(resource: Any) -> str:
    """Write an embedded resource: its text, also where it was sent as bytes; otherwise its address and type."""
    text = getattr(resource, "text", None)
    if text is not None:
        return str(text)
    kind = resource.mime_type or "unknown"
    if kind.startswith("text/") or kind.partition(";")[0] == "application/json":
        try:
            return base64.b64decode(resource.blob).decode()
        except (binascii.Error, ValueError):
            pass  # its type is wrong: name it like any other
    return f"[resource: {resource.uri}, {kind}]"


def _contains(text: str, structured: Any) -> bool:
    """Return True if the text holds every value of structured content, in whatever form."""
    return all(any(form in text for form in _forms(leaf)) for leaf in _leaves(structured))


def _leaves(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        whole = waiting.pop()
        if isinstance(whole, dict | list):
            if not whole:
                yield whole
            waiting += whole.values() if isinstance(whole, dict) else whole
        else:
            yield whole


def _forms(leaf: Any) -> tuple[str, ...]:
    """Return the texts that stand for a value: as it is, and in JSON."""
    if isinstance(leaf, str):
        return leaf, json.dumps(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False)[1:-1]
    return str(leaf), json.dumps(leaf)
