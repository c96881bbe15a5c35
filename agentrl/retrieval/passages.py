"""Passages: what a retriever returns, and how a corpus file holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from agentrl.errors import UsageError


class Passage(NamedTuple):
    """One document of a corpus."""

    title: str
    text: str


def parse_passage(document: Mapping[str, Any]) -> Passage | None:
    r"""A passage from a document: ``contents`` (title and text, divided by a line break), or ``title`` and ``text``.

    >>> parse_passage({"id": "7", "contents": '"Fern"\nA plant.'})
    Passage(title='Fern', text='A plant.')
    >>> parse_passage({"id": "7"}) is None
    True
    """
    contents, title, text = document.get("contents"), document.get("title", ""), document.get("text")
    if isinstance(contents, str):
        title, _, text = contents.partition("\n")
    if not isinstance(title, str) or not isinstance(text, str):
        return None
    return Passage(title.strip().strip('"'), text.strip())


def load_corpus(path: str) -> tuple[Passage, ...]:
    """The passages of a JSONL file, one document per line.

    Raises:
        UsageError: no such file, or a line is no document.
    """
    passages = []
    for number, row in read_rows(path, "corpus"):
        passage = parse_passage(row)
        if passage is None:
            raise UsageError(
                f"line {number} of the corpus {path} is no passage",
                got=f"keys {', '.join(row)}",
                expected='"contents", or "title" and "text"',
            )
        passages.append(passage)
    if not passages:
        raise UsageError(f"the corpus {path} is empty", expected="one JSON object per line")
    return tuple(passages)


def read_rows(path: str, what: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a JSONL file with their line numbers.

    Raises:
        UsageError: no such file, or a line is no JSON object.
    """
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _read_row(line, f"line {number} of the {what} {path}")
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}", got=error.strerror, expected="a JSONL file") from error


def _read_row(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{where} is not JSON", got=error) from error
    if not isinstance(row, dict):
        raise UsageError(f"{where} is no object", got=type(row).__name__, expected="a JSON object")
    return row


def list_passages(passages: Sequence[Passage]) -> str:
    """What a search found, a numbered passage per line."""
    lines = [f'Doc {number}(Title: "{title}") {text}' for number, (title, text) in enumerate(passages, start=1)]
    return "\n".join(lines) or "Nothing was found."
