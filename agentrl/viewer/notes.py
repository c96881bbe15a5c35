"""Notes on episodes: one JSON line each in ``notes.jsonl`` in the folder of the run or evaluation."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson

from agentrl.errors import UsageError
from agentrl.message import encodable
from agentrl.observe.files import write_fully, writing
from agentrl.viewer.sources import OpenedFolders, SourceFolder, UnknownAddress

NOTES_FILE = "notes.jsonl"
LONGEST_NOTE = 10_000
"""Maximum number of characters of a note."""
LARGEST_FILE = 16 * 2**20
"""Maximum bytes of all notes of a source."""
_LOCK = threading.Lock()


def read_notes(folders: OpenedFolders, source: SourceFolder) -> list[dict[str, Any]]:
    """Return the notes of a source, the oldest first; damaged lines are left out."""
    path = folders.file(source, NOTES_FILE)
    data = b""
    with suppress(OSError):
        if path is not None and path.stat().st_size <= LARGEST_FILE:
            data = path.read_bytes()
    notes: dict[str, dict[str, Any]] = {}
    for line in data.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            record = orjson.loads(line)
            if "deleted" in record:
                notes.pop(record["deleted"], None)
            else:
                notes[record["id"]] = {name: record[name] for name in ("id", "episode", "turn", "text", "time")}
    return list(notes.values())


def add_note(folders: OpenedFolders, source: SourceFolder, body: Mapping[str, Any]) -> dict[str, Any]:
    """Store a note, and return it.

    Args:
        folders: Opened folders.
        source: The run or evaluation.
        body: ``{"episode": id, "turn": number or null, "text": text}``.

    Raises:
        UsageError: the note is not valid, there are too many, or the folder cannot be written.
    """
    text, turn = body.get("text"), body.get("turn")
    if not isinstance(text, str) or not text.strip() or len(text) > LONGEST_NOTE:
        got = f"{len(text)} characters" if isinstance(text, str) else repr(text)[:80]
        raise UsageError("the note's text is not valid", got=got, expected=f"1 to {LONGEST_NOTE} characters")
    if turn is not None and (isinstance(turn, bool) or not isinstance(turn, int) or not 0 <= turn < 2**31):
        raise UsageError("the note's turn is not valid", got=repr(turn)[:80], expected="a number of a turn, or null")
    note = {
        "id": secrets.token_hex(8),
        "episode": str(body.get("episode")),
        "turn": turn,
        "text": encodable(text),
        "time": time.time(),
    }
    _append(folders, source, note)
    return note


def delete_note(folders: OpenedFolders, source: SourceFolder, identity: str) -> None:
    """Delete a note.

    Raises:
        UnknownAddress: there is no such note.
        UsageError: the folder cannot be written.
    """
    if not any(note["id"] == identity for note in read_notes(folders, source)):
        raise UnknownAddress("no such note", got=repr(identity[:80]))
    _append(folders, source, {"deleted": identity})


def _append(folders: OpenedFolders, source: SourceFolder, record: Mapping[str, Any]) -> None:
    path = source.path / NOTES_FILE
    folders.check(path)
    line = orjson.dumps(record) + b"\n"
    with _LOCK, writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size + len(line) > LARGEST_FILE:
                raise UsageError(f"{path} is full", got=f"{size} bytes", expected=f"at most {LARGEST_FILE}")
            torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
            write_fully(descriptor, b"\n" + line if torn else line)
        finally:
            os.close(descriptor)
