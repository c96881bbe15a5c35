"""The versions that servers put on tokens: labels over spans, as vLLM and SGLang both write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import EngineError

FIRST_VERSION = "default"
"""Label of the weights that a server starts with."""


def decode_versions(spans: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Version of each of `count` tokens, from spans ``[start, end)``.

    A span may be empty: SGLang writes one for an answer that was paused before its first token.

    Raises:
        EngineError: the spans do not cover the tokens one after the other, or a version is not ours.
    """
    versions: list[int] = []
    is_whole = True
    for span in spans:
        is_whole &= span["start"] == len(versions) <= span["end"]
        versions += [decode_version(span["version"])] * (span["end"] - span["start"])
    if not is_whole or len(versions) != count:
        raise EngineError(
            "the server's version spans do not cover the answer", got=list(spans), expected=f"{count} tokens"
        )
    return versions


def decode_version(label: str) -> int:
    """The version that a label means; 0 for the weights that the server started with.

    Raises:
        EngineError: somebody else named these weights.
    """
    if label == FIRST_VERSION:
        return 0
    try:
        return int(label)
    except ValueError as error:
        raise EngineError(
            "the server has weights of an unknown version", got=label, expected=f"a number or {FIRST_VERSION!r}"
        ) from error
