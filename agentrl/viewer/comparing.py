"""Two runs or evaluations over the tasks that both have played, and two episodes of one task."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict
from typing import Any

from agentrl.evaluation.comparison import ComparedTask, TaskScore, Verdict, compare
from agentrl.observe.trajectory_index import EpisodeFilter, TrajectoryIndex
from agentrl.viewer.opened_source import OpenedSource

MOST_TASKS = 10_000
"""Maximum number of tasks that are listed; lost and won ones come first."""
_ORDER = {Verdict.LOST: 0, Verdict.WON: 1, Verdict.SAME: 2}


def comparison_document(a: OpenedSource, b: OpenedSource, where: EpisodeFilter) -> dict[str, Any]:
    """Return the comparison of two sources: won tasks are those at which the second one did better."""
    found = compare(_scores(a, where), _scores(b, where))
    listed = sorted(found.tasks.items(), key=lambda item: _ORDER[item[1].verdict])[:MOST_TASKS]
    return {
        "tasks": [_task_document(key, task) for key, task in listed],
        "won": found.count(Verdict.WON),
        "lost": found.count(Verdict.LOST),
        "same": found.count(Verdict.SAME),
        "only_a": found.only_first,
        "only_b": found.only_second,
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
        for row in index.summarise(["environment", "task_id"], where)
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
