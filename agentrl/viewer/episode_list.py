"""Documents about several episodes: pages of a list, outcomes by step, success by type of task, groups, comparisons."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean, pstdev
from typing import Any, get_args

import numpy as np
import orjson

from agentrl.errors import UsageError
from agentrl.evaluation.comparison import ComparedTask, TaskScore, Verdict, compare, compare_panels
from agentrl.evaluation.result import MeanInterval, wilson_interval
from agentrl.observe.trajectory_index import (
    EpisodeFilter,
    EpisodeOrder,
    EpisodePage,
    EpisodeRow,
    EpisodeSummary,
    TrajectoryIndex,
)
from agentrl.trajectory import Trajectory
from agentrl.viewer.opened_source import OpenedSource
from agentrl.viewer.queries import Query
from agentrl.viewer.sources import UnknownAddress
from agentrl.viewer.token_columns import find_episode_rows

MAX_PAGE_ROWS = 1000
"""Maximum number of rows of a page."""
SEARCH_S = 0.1
"""Maximum CPU seconds of a request's text search; the next page continues it."""
_HIDDEN = "number"
"""Field of a row that is hidden, because a rebuilt index numbers rows differently."""
MAX_MEMBERS = 64
"""Maximum number of members that are compared."""
MAX_TASKS = 10_000
"""Maximum number of listed tasks; those with changed success come first."""
_ORDER = {Verdict.LOST: 0, Verdict.WON: 1, Verdict.SAME: 2}


def row_document(row: EpisodeRow) -> dict[str, Any]:
    """Return a row as JSON types."""
    return {name: value for name, value in asdict(row).items() if name != _HIDDEN}


def episodes_document(opened: OpenedSource, query: Query) -> dict[str, Any]:
    """Return a page of episodes, with the number of matches and the values of the filters."""
    where, order = query.filter(), query.text("order") or "ended"
    limit = query.integer("limit", 100, least=1, most=MAX_PAGE_ROWS) or MAX_PAGE_ROWS
    after, descending = query.integer("cursor"), query.flag("descending") or False
    if order not in get_args(EpisodeOrder):
        raise UsageError("order is not valid", got=order[:80], expected=", ".join(get_args(EpisodeOrder)))
    sort: dict[str, Any] = {"order": order, "descending": descending}
    opened.wait_for_index()
    if where.text:
        page = _search(opened, where.text, replace(where, text=None), sort, limit, after)
        total = len(page.rows) if after is None and page.last is None else None
    else:
        with opened.index.reader() as index:
            page = index.page(where, limit=limit, after=after, **sort)
        total = opened.index.get_or_make(("count", where), lambda index: index.count(where))
    return {
        "total": total,
        "unsearched": page.unsearched,
        "rows": [row_document(row) for row in page.rows],
        "cursor": None if page.last is None else str(page.last),
        "facets": opened.index.get_or_make("facets", _facets),
        "damage": opened.damage(),
        "index": opened.index_progress(),
    }


def _search(
    opened: OpenedSource, text: str, where: EpisodeFilter, sort: Mapping[str, Any], limit: int, after: int | None
) -> EpisodePage:
    """Search the matching rows for a text; they are sorted once for all pages."""
    began = time.thread_time()
    key = ("numbers", where, *sort.values())
    numbers = opened.index.get_or_make(key, lambda index: index.numbers(where, **sort))
    left = max(0.0, SEARCH_S - (time.thread_time() - began))
    with opened.index.reader() as index:
        return index.search(text, numbers, limit=limit, after=after, seconds=left)


def _facets(index: TrajectoryIndex) -> dict[str, list[str]]:
    """Return the existing values of each filter field."""
    found = index.summarize(["environment", "task_type", "outcome", "roles"])
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
    counted = index.summarize(["step", "outcome"], where)
    steps = sorted({row.values[0] for row in counted})
    place = {step: number for number, step in enumerate(steps)}
    outcomes: dict[str, list[int]] = {}
    for row in counted:
        step, outcome = row.values
        outcomes.setdefault(outcome or "unknown", [0] * len(steps))[place[step]] += row.episodes
    return {"steps": steps, "outcomes": outcomes}


def _by_task_type(index: TrajectoryIndex, where: EpisodeFilter) -> list[dict[str, Any]]:
    """Return success by environment and type of task, without infrastructure failures."""
    counted = index.summarize(["environment", "task_type"], replace(where, is_infrastructure=False))
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


def group_document(opened: OpenedSource, group: str) -> dict[str, Any]:
    """Return a group.

    Raises:
        UnknownAddress: there is no such group.
    """
    opened.wait_for_index()
    with opened.index.reader() as index:
        rows = index.select(EpisodeFilter(group_id=group), limit=MAX_MEMBERS)
        rows.sort(key=lambda row: (row.member is None, row.member, row.attempt, row.number))
        if not rows:
            raise UnknownAddress(f"no such group in {opened.source.name}", got=repr(group[:200]))
        played = [index.read(row).trajectory for row in rows]
    table: Mapping[str, Mapping[str, Any]] = {}
    problem = None
    try:
        first = min(row.start_step for row in rows)
        table = find_episode_rows(opened.folders, opened.source, first, [row.id for row in rows])
    except UsageError as error:
        problem = str(error)
    rewards = [row.reward for row in rows if row.is_trainable and row.reward is not None]
    parts = [None, *(_first_difference(played[0], other) for other in played[1:])]
    differences = [part for part in parts if part is not None]
    return {
        "group": group,
        "task": rows[0].task_id,
        "environment": rows[0].environment,
        "mean": fmean(rewards) if rewards else None,
        "std": pstdev(rewards) if rewards else None,
        "members": [
            {
                "row": row_document(row),
                "advantage": table.get(row.id, {}).get("advantage_mean"),
                "table": table.get(row.id),
                "parts_at": part,
            }
            for row, part in zip(rows, parts, strict=True)
        ],
        "first_difference": min(differences, key=_place) if differences else None,
        "overlay_problem": problem,
    }


def _place(part: Mapping[str, int | None]) -> tuple[int, int]:
    return part["sequence"] or 0, part["position"] or 0


def _first_difference(one: Trajectory, other: Trajectory) -> dict[str, int | None] | None:
    """Return the first token at which an episode differs from another; ``None`` if all are equal."""
    for number, (a, b) in enumerate(zip(one.sequences, other.sequences, strict=False)):
        common = min(len(a), len(b))
        different = np.flatnonzero(a.token_ids[:common] != b.token_ids[:common])
        if different.size or len(a) != len(b):
            position = int(different[0]) if different.size else common
            return {"sequence": number, "position": position, "turn": _turn_at(other, number, position)}
    shared = min(len(one.sequences), len(other.sequences))
    if len(one.sequences) == len(other.sequences):
        return None
    return {"sequence": shared, "position": 0, "turn": _turn_at(other, shared, 0)}


def _turn_at(trajectory: Trajectory, number: int, position: int) -> int | None:
    """Return the turn whose answer contains a token, or that follows it."""
    if number >= len(trajectory.sequences):
        return None
    turns: Sequence[Any] = trajectory.sequences[number].turns
    return next((turn.index for turn in turns if position < turn.end), turns[-1].index if turns else None)


def comparison_document(a: OpenedSource, b: OpenedSource, where: EpisodeFilter) -> dict[str, Any]:
    """Return the comparison of two sources; a task counts as won if the second source scores higher."""
    found = compare(_scores(a, where), _scores(b, where))
    panels = a.panel_hash(), b.panel_hash()
    listed = sorted(found.tasks.items(), key=lambda item: _ORDER[item[1].verdict])[:MAX_TASKS]
    return {
        "tasks": [_task_document(key, task) for key, task in listed],
        "won": found.count(Verdict.WON),
        "lost": found.count(Verdict.LOST),
        "same": found.count(Verdict.SAME),
        "only_a": found.only_first,
        "only_b": found.only_second,
        "panels": {"a": panels[0], "b": panels[1], "match": compare_panels(*panels).value},
        "test": None if found.test is None else asdict(found.test),
        "index": {"a": a.index_progress(), "b": b.index_progress()},
    }


def _scores(opened: OpenedSource, where: EpisodeFilter) -> dict[Hashable, TaskScore]:
    opened.wait_for_index()
    return opened.index.get_or_make(("tasks", where), lambda index: _score_tasks(index, where))


def _score_tasks(index: TrajectoryIndex, where: EpisodeFilter) -> dict[Hashable, TaskScore]:
    return {
        row.values: TaskScore(
            episodes=row.episodes, success=row.solved / row.judged if row.judged else None, reward=row.reward
        )
        for row in index.summarize(["environment", "task_id"], where)
    }


def _task_document(key: Hashable, task: ComparedTask) -> dict[str, Any]:
    assert isinstance(key, tuple)  # of `_score_tasks`
    return {
        "task": key[1],
        "environment": key[0],
        "a": asdict(task.first),
        "b": asdict(task.second),
        "result": task.verdict.value,
    }
