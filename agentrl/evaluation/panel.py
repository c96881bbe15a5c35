"""The panel of an evaluation: which tasks, how often each, and what makes two evaluations the same one.

The file of its finished episodes is here, too.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from agentrl.errors import UsageError
from agentrl.observe.files import UNREADABLE, JsonLinesWriter, first_free, numbered_records, warn_damaged
from agentrl.rollout.runner import Assignment
from agentrl.rollout.turns import derive_seed
from agentrl.task import Task, TaskSource
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Definition of what is measured, apart from the code that plays it."""

    environment: str
    """Registry name and split, ``household/valid_unseen``."""
    policy: str
    """``engine``, ``expert`` or ``random``."""
    model: str | None
    """The served model; ``None`` for scripted policies."""
    n_tasks: int
    samples: int
    """Episodes per task."""
    seed: int
    """Chooses the tasks, where the source has more than `n_tasks`, and seeds the sampling."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else changes the episodes: agent, sampling, options, the model's fingerprint."""

    def key(self) -> str:
        """Return a short name of this panel without its size: a larger panel continues a smaller one."""
        identity = {
            "environment": self.environment,
            "policy": self.policy,
            "model": self.model,
            "seed": self.seed,
            "settings": dict(self.settings),
        }
        return hashlib.blake2b(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS), digest_size=6).hexdigest()


def choose_tasks(source: TaskSource, count: int, seed: int) -> list[Task]:
    """Choose the first `count` tasks of an order that depends on the seed alone: a smaller choice starts a larger one.

    Raises:
        UsageError: fewer than one task is asked for, or more than there are.
    """
    if count < 1 or len(source) == 0:
        raise UsageError("nothing to evaluate", got=f"{count} tasks of {len(source)}", expected="at least one")
    if count > len(source):
        raise UsageError(
            "the split holds fewer tasks than the evaluation asks for",
            got=f"{count:,} tasks",
            expected=f"at most {len(source):,}",
            hint="take fewer tasks with more samples of each, or another split",
        )
    order = list(range(len(source)))
    random.Random(f"evaluation/{seed}").shuffle(order)
    return [source[index] for index in order[:count]]


def assignments(tasks: list[Task], samples: int, seed: int) -> list[Assignment]:
    """Make all episodes, first samples of every task first, so that an interrupted evaluation covers all tasks.

    Raises:
        UsageError: fewer than one sample, or two tasks of one id.
    """
    if samples < 1:
        raise UsageError("an evaluation needs samples", got=samples, expected="at least 1 per task")
    if len({task.id for task in tasks}) < len(tasks):
        raise UsageError("the task source has two tasks of one id", hint="task ids must be unique within a split")
    return [
        Assignment(
            task=task,
            group_id=f"evaluation/{task.id}",
            member=sample,
            seed=derive_seed("evaluation", seed, task.id),
        )
        for sample in range(samples)
        for task in tasks
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEpisode:
    """One task played once."""

    task_id: str
    sample: int
    trajectory: Trajectory
    task: str = ""
    """Digest of the task's content."""
    played_at: float = 0.0
    """When it ended, in seconds since 1970."""

    @property
    def slot(self) -> tuple[str, int]:
        """Key of the episode in its panel."""
        return self.task_id, self.sample

    @property
    def is_measured(self) -> bool:
        """True if the episode says something about the policy."""
        outcome = self.trajectory.outcome
        return outcome is not None and not outcome.is_infrastructure

    def to_record(self) -> dict[str, Any]:
        """Return the episode as plain JSON types."""
        own = {"task_id": self.task_id, "sample": self.sample, "task": self.task, "played_at": self.played_at}
        return {**own, "trajectory": self.trajectory.to_record()}


def task_digest(task: Task) -> str:
    """Return a digest of a task's content: an episode of an earlier version of the task is not reused."""
    return hashlib.blake2b(repr(task).encode(errors="backslashreplace"), digest_size=8).hexdigest()


class EpisodeStore:
    """The finished episodes of one evaluation, on disk as JSON lines.

    Only measured episodes are kept: infrastructure failures are tried again by the next run.

    Args:
        path: The file.
        fresh: Begin an empty file; the episodes of earlier runs stay in a file next to it.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        if fresh and path.exists():
            path.rename(first_free(path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1)))
        self._finished = {episode.slot: episode for episode in read_episodes(path)} if path.exists() else {}
        self.path = path
        self._writer = JsonLinesWriter(path)

    def find(self, task: Task, sample: int) -> EvaluatedEpisode | None:
        """Return the episode, if it is finished and its task is still the same."""
        found = self._finished.get((task.id, sample))
        return found if found is not None and found.task == task_digest(task) else None

    def add(self, episode: EvaluatedEpisode) -> None:
        """Keep a finished episode."""
        self._writer.append(episode.to_record())
        self._finished[episode.slot] = episode

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def read_episodes(path: Path) -> Iterator[EvaluatedEpisode]:
    """Read the episodes of a stored evaluation. Damaged ones are left out with a warning."""
    damaged: list[int] = []
    for number, record in numbered_records(path, damaged):
        try:
            trajectory = Trajectory.from_record(record.pop("trajectory"))
            yield EvaluatedEpisode(**record, trajectory=trajectory)
        except UNREADABLE:
            damaged.append(number)
    warn_damaged(path, sorted(damaged))
