"""Pages of episodes, and what is counted over all of them: outcomes by step, success by type of task."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, get_args

import orjson

from agentrl.errors import UsageError
from agentrl.evaluation.result import MeanInterval, wilson_interval
from agentrl.observe.trajectory_index import EpisodeFilter, EpisodeOrder, EpisodeRow, EpisodeSummary, TrajectoryIndex
from agentrl.viewer.opened_source import OpenedSource
from agentrl.viewer.queries import Query

LONGEST_PAGE = 1000
"""Maximum number of rows of a page."""
SEARCH_S = 0.1
"""Seconds that a request searches for a text; the next page continues."""
_HIDDEN = "number"
"""Field of a row that is not shown: a rebuilt index has other numbers."""


def row_document(row: EpisodeRow) -> dict[str, Any]:
    """Return a row as JSON types."""
    return {name: value for name, value in asdict(row).items() if name != _HIDDEN}


def episodes_document(opened: OpenedSource, query: Query) -> dict[str, Any]:
    """Return a page of episodes, with the number of all that match and the values to filter by."""
    where, order = query.filter(), query.text("order") or "ended"
    limit = query.integer("limit", 100, least=1, most=LONGEST_PAGE)
    after, descending = query.integer("cursor"), query.flag("descending") or False
    if order not in get_args(EpisodeOrder):
        raise UsageError("order is not valid", got=order[:80], expected=", ".join(get_args(EpisodeOrder)))
    opened.wait_for_index()
    known = replace(where, text=None)
    with opened.index.reader() as index:
        page = index.page(
            where,
            order=order,  # type: ignore[arg-type]
            descending=descending,
            limit=limit or LONGEST_PAGE,
            after=after,
            seconds=SEARCH_S,
        )
    found_all = where.text is not None and after is None and page.last is None
    if where.text is None:
        total = opened.index.get_or_make(("count", known), lambda index: index.count(known))
    return {
        "total": len(page.rows) if found_all else total if where.text is None else None,
        "unsearched": page.unsearched,
        "rows": [row_document(row) for row in page.rows],
        "cursor": None if page.last is None else str(page.last),
        "facets": opened.index.get_or_make("facets", _facets),
        "index": opened.index_progress(),
    }


def _facets(index: TrajectoryIndex) -> dict[str, list[str]]:
    """Return the values that occur, for each field of a filter."""
    found = index.summarise(["environment", "task_type", "outcome", "roles"])
    environments = sorted({row.values[0] for row in found})
    return {
        "environments": environments,
        "splits": sorted({index.splits[name] for name in environments if name in index.splits}),
        "outcomes": sorted({row.values[2] for row in found if row.values[2]}),
        "roles": sorted({role for row in found for role in orjson.loads(row.values[3])}),
        "task_types": sorted({row.values[1] for row in found if row.values[1]}),
    }


def outcomes_document(opened: OpenedSource, query: Query) -> dict[str, Any]:
    """Return the outcomes of each step, and success by type of task."""
    where = query.filter()
    opened.wait_for_index()
    return {
        **opened.index.get_or_make(("outcomes", where), lambda index: _outcomes(index, where)),
        "by_task_type": opened.index.get_or_make(("types", where), lambda index: _by_task_type(index, where)),
        "index": opened.index_progress(),
    }


def _outcomes(index: TrajectoryIndex, where: EpisodeFilter) -> dict[str, Any]:
    counted = index.summarise(["step", "outcome"], where)
    steps = sorted({row.values[0] for row in counted})
    place = {step: number for number, step in enumerate(steps)}
    outcomes: dict[str, list[int]] = {}
    for row in counted:
        step, outcome = row.values
        outcomes.setdefault(outcome or "unknown", [0] * len(steps))[place[step]] += row.episodes
    return {"steps": steps, "outcomes": outcomes}


def _by_task_type(index: TrajectoryIndex, where: EpisodeFilter) -> list[dict[str, Any]]:
    """Return success by environment and type of task, without infrastructure failures."""
    counted = index.summarise(["environment", "task_type"], replace(where, is_infrastructure=False))
    return [
        {
            "environment": row.values[0],
            "task_type": row.values[1],
            "split": index.splits.get(row.values[0]),
            "episodes": row.episodes,
            **success_document(row),
            "reward": row.reward,
        }
        for row in counted
    ]


def success_document(row: EpisodeSummary) -> dict[str, float | None]:
    """Return the success with Wilson's interval over episodes; ``None`` if it is unknown."""
    found: MeanInterval | None = wilson_interval(row.solved, row.judged) if row.judged else None
    if found is None:
        return {"success": None, "low": None, "high": None}
    return {"success": found.mean, "low": found.low, "high": found.high}
