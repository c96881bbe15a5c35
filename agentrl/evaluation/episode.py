"""A finished episode of an evaluation, and the file that keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.observe.json_lines import UNREADABLE, JsonLinesWriter, numbered_records, warn_damaged
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEpisode:
    """One task played once."""

    task_id: str
    sample: int
    trajectory: Trajectory

    @property
    def slot(self) -> tuple[str, int]:
        """Which episode of the panel this is."""
        return self.task_id, self.sample

    @property
    def is_measured(self) -> bool:
        """Whether it says something about the policy."""
        outcome = self.trajectory.outcome
        return outcome is not None and not outcome.is_infrastructure

    def to_record(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"task_id": self.task_id, "sample": self.sample, "trajectory": self.trajectory.to_record()}


class EpisodeStore:
    """The finished episodes of one evaluation, on disk as JSON lines.

    Only measured episodes are kept: what the machinery failed is tried again by the next run.

    Args:
        path: The file; what it holds counts as finished.
    """

    def __init__(self, path: Path) -> None:
        self._finished = {episode.slot: episode for episode in read_episodes(path)} if path.exists() else {}
        self._writer = JsonLinesWriter(path)

    def find(self, task_id: str, sample: int) -> EvaluatedEpisode | None:
        """The episode, if it is finished."""
        return self._finished.get((task_id, sample))

    def add(self, episode: EvaluatedEpisode) -> None:
        """Keep a finished episode.

        Raises:
            UsageError: the disk is full.
        """
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
