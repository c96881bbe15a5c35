"""Answers of the viewer's addresses under ``/api``; each is made in a thread, from files only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import orjson
from aiohttp import web

from agentrl.errors import UsageError
from agentrl.message import encodable
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
from agentrl.viewer.notes import add_note, delete_note, read_notes
from agentrl.viewer.opened_source import OpenedSource
from agentrl.viewer.queries import Query
from agentrl.viewer.run_state import read_status
from agentrl.viewer.sources import SourceKind, UnknownAddress
from agentrl.viewer.token_columns import read_token_rows, token_columns

LARGEST_BODY = 64 * 1024
"""Maximum bytes of a request's body."""
MOST_CHOICES = 100
"""Maximum number of episodes of one task to choose from."""
IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Content types of images; others are not shown."""
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def encode(document: Any) -> bytes:
    """Encode an answer; lone surrogates in texts, which JSON files may contain, become question marks."""
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
        return float(value) if abs(value) < 2**1000 else None
    return value


def _find_source(library: Library, request: web.Request) -> OpenedSource:
    return library[request.match_info["source"]]


def list_sources(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return all runs and evaluations."""
    return {"sources": library.lines()}


def show_source(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return one run or evaluation; its index is built from now on."""
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
            rows = read_token_rows(opened.folders, opened.source, row.start_step, identity)
        except (ValueError, OSError, KeyError) as error:  # a damaged file, or one that was just removed
            problem = f"the trainer's table cannot be read: {type(error).__name__}"
    number = query.integer("sequence", 0) or 0
    columns = token_columns(trajectory, rows, opened.decoder(), number=number, start=start, end=end)
    return {**columns, "overlay_problem": problem, "tokenizer_problem": opened.decoder_problem}


def show_raw(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return an episode as it is stored."""
    _, trajectory = _read_episode(_find_source(library, request), request.match_info["episode"], messages=True)
    messages = trajectory.episode_messages
    return {
        **trajectory_record(trajectory),
        **({"messages": messages.to_record()} if messages.conversations else {}),
    }


def show_prompt(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return the tokens that the model read before it gave an answer."""
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
            rows = index.select(where, descending=True, limit=MOST_CHOICES)
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
    """Return the running episodes; after a crash, those that were running."""
    opened = _find_source(library, request)
    status = read_status(opened.folders, opened.source) or {}
    state = opened.refresh()["state"]
    episodes = status.get("in_flight")
    return {"state": state, "time": status.get("time"), "in_flight": episodes if isinstance(episodes, list) else []}


READS: dict[str, Callable[[Library, web.Request, Query], Any]] = {
    "/api/sources": list_sources,
    "/api/r/{source}": show_source,
    "/api/r/{source}/metrics": show_metrics,
    "/api/r/{source}/outcomes": count_outcomes,
    "/api/r/{source}/episodes": list_episodes,
    "/api/r/{source}/episode/{episode}": show_episode,
    "/api/r/{source}/episode/{episode}/tokens": show_tokens,
    "/api/r/{source}/episode/{episode}/raw": show_raw,
    "/api/r/{source}/episode/{episode}/prompt": show_prompt,
    "/api/r/{source}/group/{group}": show_group,
    "/api/r/{source}/notes": list_notes,
    "/api/r/{source}/in-flight": show_in_flight,
    "/api/compare": show_comparison,
    "/api/compare/episodes": compare_episodes,
}
"""Functions that answer GET requests, by address."""
