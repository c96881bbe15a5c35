"""Answers of the viewer's addresses under ``/api``; each is made in a thread, from files only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import orjson
from aiohttp import web

from agentrl.errors import UsageError
from agentrl.message import encodable
from agentrl.observe.trajectory_index import EpisodeRow
from agentrl.trajectory import Trajectory
from agentrl.viewer.episode_list import episodes_document, outcomes_document
from agentrl.viewer.episode_view import episode_document
from agentrl.viewer.library import Library
from agentrl.viewer.metrics_table import metrics_document
from agentrl.viewer.opened_source import OpenedSource
from agentrl.viewer.queries import Query
from agentrl.viewer.run_state import read_status
from agentrl.viewer.sources import SourceKind
from agentrl.viewer.token_columns import token_columns
from agentrl.viewer.training_tables import read_token_rows

LARGEST_BODY = 64 * 1024
"""Maximum bytes of a request's body."""
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


def _opened(library: Library, request: web.Request) -> OpenedSource:
    return library[request.match_info["source"]]


def list_sources(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return all runs and evaluations."""
    return {"sources": library.lines()}


def show_source(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return one run or evaluation; its index is built from now on."""
    opened = _opened(library, request)
    if not opened.index.opened.is_set():
        opened.want_index()
    return opened.document()


def show_metrics(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return the metrics of a run."""
    return metrics_document(_opened(library, request).metrics(), after=query.integer("after"))


def list_episodes(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return a page of episodes."""
    return episodes_document(_opened(library, request), query)


def count_outcomes(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return outcomes by step, and success by type of task."""
    return outcomes_document(_opened(library, request), query)


def _read_episode(opened: OpenedSource, identity: str, *, messages: bool = False) -> tuple[EpisodeRow, Trajectory]:
    """Read an episode.

    Raises:
        NotFound: there is no such episode.
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
    opened, identity = _opened(library, request), request.match_info["episode"]
    row, trajectory = _read_episode(opened, identity, messages=True)
    images = f"/api/r/{opened.source.key}/episode/{quote(identity, safe='')}/image/"
    return episode_document(row, trajectory, opened.decoder(), run=str(opened.source.path), images=images)


def show_tokens(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return tokens of an episode as columns."""
    opened, identity = _opened(library, request), request.match_info["episode"]
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


def show_in_flight(library: Library, request: web.Request, query: Query) -> dict[str, Any]:
    """Return the running episodes; after a crash, those that were running."""
    opened = _opened(library, request)
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
    "/api/r/{source}/in-flight": show_in_flight,
}
"""Functions that answer GET requests, by address."""
