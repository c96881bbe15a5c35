"""Handlers of the viewer's routes under ``/api``; each runs in a thread and reads only files.

The viewer writes nothing except notes on episodes: one JSON line each in ``notes.jsonl`` in the folder of the run or
evaluation.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import orjson
from aiohttp import web

from agentrl.errors import UsageError
from agentrl.message import encodable
from agentrl.observe.files import write_fully, writing
from agentrl.observe.trajectory_index import EpisodeFilter, EpisodeRow
from agentrl.observe.trajectory_record import trajectory_record
from agentrl.trajectory import Trajectory
from agentrl.viewer.episode_list import (
    comparison_document,
    episodes_document,
    group_document,
    outcomes_document,
    row_document,
)
from agentrl.viewer.episode_view import episode_document, find_image
from agentrl.viewer.library import Library
from agentrl.viewer.metrics_table import metrics_document
from agentrl.viewer.opened_source import OpenedSource
from agentrl.viewer.queries import FILTERS, Query
from agentrl.viewer.sources import OpenedFolders, SourceFolder, SourceKind, UnknownAddress
from agentrl.viewer.token_columns import find_token_rows, token_columns

MAX_BODY_BYTES = 64 * 1024
"""Maximum bytes of a request's body."""
MAX_CHOICES = 100
"""Maximum number of episodes of one task that are offered for comparison."""
IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Content types of the images that are served."""
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_STRICT_INTEGER
NOTES_FILE = "notes.jsonl"
MAX_NOTE_CHARS = 10_000
"""Maximum number of characters of a note."""
MAX_NOTES_BYTES = 16 * 2**20
"""Maximum bytes of all notes of a source."""
_NOTES_LOCK = threading.Lock()


def encode(document: Any) -> bytes:
    """Encode an answer as JSON for browsers.

    Lone surrogates, which JSON files may contain, become question marks. Integers that browsers would round, such as
    ids in the arguments of tools, become texts.
    """
    try:
        return orjson.dumps(document, option=_OPTIONS)
    except TypeError:
        return orjson.dumps(_encodable(document), option=_OPTIONS)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        return {_encodable(name): _encodable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(inner) for inner in value]
    if isinstance(value, int) and not -(2**53) <= value <= 2**53:
        return str(value) if abs(value) < 2**1000 else None
    return value


def _find_source(library: Library, request: web.Request) -> OpenedSource:
    return library[request.match_info["source"]]


def list_sources(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return the runs and evaluations, and how many others are not read yet."""
    return {"sources": library.lines(), "unread": library.unread}


def show_source(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return one run or evaluation, and start to build its index."""
    opened = _find_source(library, request)
    if not opened.index.opened.is_set():
        opened.want_index()
    return opened.document()


def show_metrics(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return the metrics of a run."""
    return metrics_document(_find_source(library, request).metrics(), after=query.integer("after"))


def list_episodes(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return a page of episodes."""
    return episodes_document(_find_source(library, request), query)


def count_outcomes(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return outcomes by step, and success by type of task."""
    return outcomes_document(_find_source(library, request), query)


def _read_episode(opened: OpenedSource, identity: str, *, messages: bool = False) -> tuple[EpisodeRow, Trajectory]:
    """Read an episode.

    Raises:
        UnknownAddress: there is no such episode.
        UsageError: it cannot be read, because the store has just changed.
    """
    opened.wait_for_index()
    with opened.index.reader() as index:
        row = opened.find_row(index, identity)
        try:
            return row, index.read(row, messages=messages).trajectory
        except UsageError:
            opened.index.distrusted.add(row.start_step)
            opened.want_index()
            raise


def show_episode(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return the document of an episode."""
    opened, identity = _find_source(library, request), request.match_info["episode"]
    return _episode_document(opened, identity)


def _episode_document(opened: OpenedSource, identity: str) -> dict[str, Any]:
    row, trajectory = _read_episode(opened, identity, messages=True)
    images = f"/api/r/{opened.source.key}/episode/{quote(identity, safe='')}/image/"
    notes = [note for note in read_notes(opened.folders, opened.source) if note["episode"] == identity]
    document = episode_document(row, trajectory, opened.decoder(), run=str(opened.source.path), images=images)
    return {**document, "notes": notes, "tokenizer_problem": opened.decoder_problem}


def show_tokens(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return tokens of an episode as columns."""
    opened, identity = _find_source(library, request), request.match_info["episode"]
    start = query.integer("from", 0) or 0
    end = query.integer("to", start + 4000) or 0
    row, trajectory = _read_episode(opened, identity)
    rows, problem = None, None
    if opened.source.kind is SourceKind.RUN:
        try:
            rows = find_token_rows(opened.folders, opened.source, row.start_step, identity)
        except UsageError as error:
            problem = str(error)
    number = query.integer("sequence", 0) or 0
    columns = token_columns(trajectory, rows, opened.decoder(), number=number, start=start, end=end)
    return {**columns, "overlay_problem": problem, "tokenizer_problem": opened.decoder_problem}


def show_raw(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return the stored record of an episode."""
    _, trajectory = _read_episode(_find_source(library, request), request.match_info["episode"], messages=True)
    messages = trajectory.episode_messages
    return {
        **trajectory_record(trajectory),
        **({"messages": messages.to_record()} if messages.conversations else {}),
    }


def show_prompt(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return the prompt tokens of a turn's answer."""
    opened, number = _find_source(library, request), query.integer("turn", 0)
    _, trajectory = _read_episode(opened, request.match_info["episode"])
    decoder = opened.decoder()
    for sequence in trajectory.sequences:
        for turn in sequence.turns:
            if turn.index == number:
                ids = sequence.ids_list()[: turn.start]
                return {"text": None if decoder is None else decoder.text(ids), "ids": ids}
    raise UnknownAddress("the episode has no such turn", got=number, expected=f"less than {len(trajectory.turns)}")


def show_group(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return the members of a group."""
    return group_document(_find_source(library, request), request.match_info["group"])


def show_comparison(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return the comparison of two sources."""
    a, b = (library[query.required_text(name)] for name in ("a", "b"))
    return comparison_document(a, b, replace(query.filter(), is_infrastructure=False))


def compare_episodes(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return two episodes of one task: the newest ones, or those with the ids ``episode_a`` and ``episode_b``."""
    task, environment = query.required_text("task"), query.text("environment")
    found: dict[str, Any] = {}
    for side in ("a", "b"):
        opened, identity = library[query.required_text(side)], query.text(f"episode_{side}")
        opened.wait_for_index()
        with opened.index.reader() as index:
            where = EpisodeFilter(task_id=task, environment=environment)
            rows = index.select(where, descending=True, limit=MAX_CHOICES)
        chosen = identity or (rows[0].id if rows else None)
        found[side] = None if chosen is None else _episode_document(opened, chosen)
        found[f"episodes_{side}"] = [row_document(row) for row in rows]
    return found


def list_notes(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return the notes of a source."""
    opened = _find_source(library, request)
    return {"notes": read_notes(opened.folders, opened.source)}


def create_note(library: Library, request: web.Request, body: Mapping[str, Any]) -> dict[str, Any]:
    """Store a note on an episode."""
    opened, episode = _find_source(library, request), body.get("episode")
    if not isinstance(episode, str):
        raise UsageError("the note's episode is not valid", got=repr(episode)[:80], expected="an id")
    opened.wait_for_index()
    with opened.index.reader() as index:
        opened.find_row(index, episode)
    return add_note(opened.folders, opened.source, body)


def remove_note(library: Library, request: web.Request, body: Mapping[str, Any]) -> dict[str, Any]:
    """Delete a note."""
    opened = _find_source(library, request)
    delete_note(opened.folders, opened.source, request.match_info["note"])
    return {}


def find_episode_image(library: Library, request: web.Request) -> tuple[bytes, str]:
    """Return an image of an episode and its content type."""
    _, trajectory = _read_episode(_find_source(library, request), request.match_info["episode"], messages=True)
    image = find_image(trajectory, request.match_info["checksum"])
    if image is None:
        raise UnknownAddress("the episode has no such image")
    return image.data, image.media_type if image.media_type in IMAGE_TYPES else "application/octet-stream"


def show_in_flight(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return the running episodes; after a crash, the interrupted ones."""
    opened = _find_source(library, request)
    status = opened.folders.read_status(opened.source)
    state = opened.refresh()["state"]
    return {
        "state": state,
        "time": None if status is None else status.time,
        "in_flight": [] if status is None else list(status.in_flight),
        "live": None if status is None else status.live,
    }


def read_notes(folders: OpenedFolders, source: SourceFolder) -> list[dict[str, Any]]:
    """Return the notes of a source, oldest first; damaged lines are skipped."""
    path = folders.file(source, NOTES_FILE)
    data = b""
    with suppress(OSError):
        if path is not None and path.stat().st_size <= MAX_NOTES_BYTES:
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
    if not isinstance(text, str) or not text.strip() or len(text) > MAX_NOTE_CHARS:
        got = f"{len(text)} characters" if isinstance(text, str) else repr(text)[:80]
        raise UsageError("the note's text is not valid", got=got, expected=f"1 to {MAX_NOTE_CHARS} characters")
    if turn is not None and (isinstance(turn, bool) or not isinstance(turn, int) or not 0 <= turn < 2**31):
        raise UsageError("the note's turn is not valid", got=repr(turn)[:80], expected="a number of a turn, or null")
    note = {
        "id": secrets.token_hex(8),
        "episode": str(body.get("episode")),
        "turn": turn,
        "text": encodable(text),
        "time": time.time(),
    }
    _append_note(folders, source, note)
    return note


def delete_note(folders: OpenedFolders, source: SourceFolder, identity: str) -> None:
    """Delete a note.

    Raises:
        UnknownAddress: there is no such note.
        UsageError: the folder cannot be written.
    """
    if not any(note["id"] == identity for note in read_notes(folders, source)):
        raise UnknownAddress("no such note", got=repr(identity[:80]))
    _append_note(folders, source, {"deleted": identity})


def _append_note(folders: OpenedFolders, source: SourceFolder, record: Mapping[str, Any]) -> None:
    path = source.path / NOTES_FILE
    folders.check(path)
    line = orjson.dumps(record) + b"\n"
    with _NOTES_LOCK, writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size + len(line) > MAX_NOTES_BYTES:
                raise UsageError(f"{path} is full", got=f"{size} bytes", expected=f"at most {MAX_NOTES_BYTES}")
            torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
            write_fully(descriptor, b"\n" + line if torn else line)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Address:
    """Route for GET requests."""

    answer: Callable[[Library, web.Request, Query], Any]
    """Handler, which runs in a thread."""
    parameters: tuple[str, ...] = ()
    """Names of its query parameters."""


READS = {
    "/api/sources": Address(list_sources),
    "/api/r/{source}": Address(show_source),
    "/api/r/{source}/metrics": Address(show_metrics, ("after",)),
    "/api/r/{source}/outcomes": Address(count_outcomes, FILTERS),
    "/api/r/{source}/episodes": Address(list_episodes, (*FILTERS, "order", "descending", "limit", "cursor")),
    "/api/r/{source}/episode/{episode}": Address(show_episode),
    "/api/r/{source}/episode/{episode}/tokens": Address(show_tokens, ("sequence", "from", "to")),
    "/api/r/{source}/episode/{episode}/raw": Address(show_raw),
    "/api/r/{source}/episode/{episode}/prompt": Address(show_prompt, ("turn",)),
    "/api/r/{source}/group/{group}": Address(show_group),
    "/api/r/{source}/notes": Address(list_notes),
    "/api/r/{source}/in-flight": Address(show_in_flight),
    "/api/compare": Address(show_comparison, (*FILTERS, "a", "b")),
    "/api/compare/episodes": Address(compare_episodes, ("a", "b", "task", "environment", "episode_a", "episode_b")),
}
"""Routes for GET requests."""
