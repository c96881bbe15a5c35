"""Panel of an evaluation: its tasks, samples and identity; and the file of its finished episodes."""

from __future__ import annotations

import functools
import hashlib
import logging
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from agentrl.errors import UsageError
from agentrl.observe.files import UNREADABLE, JsonLinesWriter, first_free, numbered_records, warn_damaged
from agentrl.observe.trajectory_index import TrajectoryIndex
from agentrl.observe.trajectory_record import trajectory_from_record, trajectory_record
from agentrl.rollout.runner import Assignment
from agentrl.rollout.turns import derive_seed
from agentrl.task import Task, TaskSource
from agentrl.trajectory import Trajectory

_log = logging.getLogger(__name__)

FOLDER = "evaluations"
"""Name of the folder of evaluations, in a run's folder or next to the runs."""
EPISODES_FILE = "episodes.jsonl"
"""File of an evaluation's episodes."""
RESULT_FILE = "evaluation.json"
"""File of an evaluation's result, once it is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Definition of an evaluation's episodes."""

    environment: str
    """Registry name and split, such as ``household/valid_unseen``."""
    policy: str
    """Kind of policy: ``engine``, ``expert`` or ``random``."""
    model: str | None
    """Name or path of the model; ``None`` for scripted policies."""
    n_tasks: int
    samples: int
    """Number of episodes per task."""
    seed: int
    """Seed of the choice of tasks, if the source has more than `n_tasks`, and of sampling."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other inputs that affect the episodes: agent, sampling, options, the model's fingerprint."""

    def key(self) -> str:
        """Return a short digest that ignores the panel's size: a larger panel continues a smaller one."""
        identity = {
            "environment": self.environment,
            "policy": self.policy,
            "model": self.model,
            "seed": self.seed,
            "settings": dict(self.settings),
        }
        return hashlib.blake2b(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS), digest_size=6).hexdigest()


def choose_tasks(source: TaskSource, count: int, seed: int) -> list[Task]:
    """Return the tasks that `choose_indices` chooses."""
    return [source[index] for index in choose_indices(source, count, seed)]


def choose_indices(source: TaskSource, count: int, seed: int) -> list[int]:
    """Choose the first `count` tasks of an order that depends only on the seed; a larger choice extends a smaller one.

    Raises:
        UsageError: `count` is below 1, or above the number of tasks.
    """
    if count < 1 or len(source) == 0:
        raise UsageError("nothing to evaluate", got=f"{count} tasks of {len(source)}", expected="at least one")
    if count > len(source):
        raise UsageError(
            "the split has too few tasks for the evaluation",
            got=f"{count:,} tasks",
            expected=f"at most {len(source):,}",
            hint="use fewer tasks with more samples of each, or another split",
        )
    return [*_order(len(source), seed)[:count]]


@functools.lru_cache(maxsize=4)
def _order(size: int, seed: int) -> array[int]:
    order = list(range(size))
    random.Random(f"evaluation/{seed}").shuffle(order)
    return array("q", order)


def assignments(tasks: list[Task], samples: int, seed: int) -> list[Assignment]:
    """List the episodes to play: the first sample of every task first, so that interrupted evaluations cover all tasks.

    Raises:
        UsageError: `samples` is below 1, or two tasks have the same id.
    """
    if samples < 1:
        raise UsageError("an evaluation needs samples", got=samples, expected="at least 1 per task")
    repeated = next(((one, count) for one, count in Counter(task.id for task in tasks).items() if count > 1), None)
    if repeated is not None:
        raise UsageError(
            f"{repeated[1]} tasks of environment {tasks[0].environment} have the same id",
            got=f"{repeated[0][:80]!r} among {len(tasks)} tasks",
            expected="an id for each task of a split, because results are stored and compared by it",
            hint="remove the column with the ids, or add the row's number to them, where the tasks are made",
        )
    return [
        Assignment(
            task=task, group_id=f"evaluation/{task.id}", member=sample, seed=derive_seed("evaluation", seed, task.id)
        )
        for sample in range(samples)
        for task in tasks
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEpisode:
    """Episode of one task."""

    task_id: str
    sample: int
    trajectory: Trajectory
    task: str = ""
    """Digest of the task's content."""
    played_at: float = 0.0
    """Time of the end in seconds since 1970."""

    @property
    def slot(self) -> tuple[str, int]:
        """Key of the episode in its panel."""
        return self.task_id, self.sample

    @property
    def is_measured(self) -> bool:
        """True if the episode counts in the estimates: it has no infrastructure failure."""
        outcome = self.trajectory.outcome
        return outcome is not None and not outcome.is_infrastructure

    def to_record(self) -> dict[str, Any]:
        """Return the episode as plain JSON types."""
        own = {"task_id": self.task_id, "sample": self.sample, "task": self.task, "played_at": self.played_at}
        return {**own, "trajectory": trajectory_record(self.trajectory)}


def task_digest(task: Task) -> str:
    """Return a digest of a task's content, so that episodes of earlier versions of the task are not reused."""
    return hashlib.blake2b(repr(task).encode(errors="backslashreplace"), digest_size=8).hexdigest()


def panel_hash(episodes: Iterable[EvaluatedEpisode], seed: int) -> str:
    """Return a digest of exactly what was evaluated: the content and the samples of each task, and the panel's seed.

    Two policies were measured on the same episodes if their hashes are equal; the order does not matter.
    """
    slots = sorted([one.task_id, one.task, one.sample] for one in episodes)
    return hashlib.blake2b(orjson.dumps([seed, slots]), digest_size=8).hexdigest()


class EpisodeStore:
    """Store of one evaluation's finished episodes in a JSON Lines file.

    Only measured episodes are stored; the next run retries infrastructure failures.

    `fresh` starts with an empty file; a file of earlier runs is renamed.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        if fresh and path.exists():
            path.rename(first_free(path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1)))
        self.path = path
        self._finished = stored_episodes(path) if path.exists() else {}
        self._writer = JsonLinesWriter(path)

    def find(self, task: Task, sample: int) -> EvaluatedEpisode | None:
        """Return the finished episode of a task; ``None`` if there is none or the task has changed."""
        found = self._finished.get((task.id, sample))
        return found if found is not None and found.task == task_digest(task) else None

    def add(self, episode: EvaluatedEpisode) -> None:
        """Store a finished episode."""
        self._writer.append(episode.to_record())
        self._finished[episode.slot] = episode

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def stored_episodes(path: Path) -> dict[tuple[str, int], EvaluatedEpisode]:
    """Return the latest stored episode of each slot; its tokens are read when they are used."""
    found = {}
    with TrajectoryIndex(path) as index:
        if index.damaged:
            _log.warning("%s: skipped %d damaged records", path, index.damaged)
        for row in {(row.task_id, row.member): row for row in index.select()}.values():
            episode = EvaluatedEpisode(
                task_id=row.task_id,
                sample=row.member or 0,
                trajectory=index.outline(row),
                task=row.task_digest or "",
                played_at=row.ended_at or 0.0,
            )
            found[episode.slot] = episode
    return found


def read_episodes(path: Path) -> Iterator[EvaluatedEpisode]:
    """Read the episodes of a stored evaluation; skip damaged ones with a warning."""
    damaged: list[int] = []
    for number, record in numbered_records(path, damaged):
        try:
            trajectory = trajectory_from_record(record.pop("trajectory"))
            yield EvaluatedEpisode(**record, trajectory=trajectory)
        except UNREADABLE:
            damaged.append(number)
    warn_damaged(path, sorted(damaged))
