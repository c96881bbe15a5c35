"""Several adapters that train at once: a trainer for each, on the tokens of its roles.

    trajectories ─┬─► trainer of planner: members of the roles that it plays ─► its own update ─┬─► one report
                  └─► trainer of worker:  …                                                      ┘

Each adapter has an optimizer, an algorithm, a generator and a count of its steps, which is the version of its weights.
They share the frozen weights alone, and train one after the other. An adapter without a trajectory that can train stays
as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agentrl.errors import TrainingError
from agentrl.training.batch import NothingToTrain, StepExtras
from agentrl.training.report import StepReport
from agentrl.training.trainer import Trainer
from agentrl.trajectory import Trajectory

COUNTED = ("train/tokens", "train/updates", "train/updates_skipped", "train/idle_sequences", "train/seconds")
"""Metrics that are sums over adapters."""
APART = ("train/", "mismatch/", "groups/")
"""Beginnings of the names of metrics that each adapter has by itself."""
OF_ALL = ("trajectories/infrastructure", "trajectories/unscored")
"""Metrics that all adapters have alike: what cannot train for one cannot for any."""


class TrainerFiles(Protocol):
    """Saves and loads a trainer's state."""

    def save(self, folder: Path) -> None:
        """Write the state into an existing folder."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, after the weights were loaded."""

    def copy(self) -> Callable[[Path], None]:
        """Copy what `save` writes; gives what writes the copy while training goes on."""


class AdapterFiles:
    """States of several trainers, in a folder each."""

    def __init__(self, trainers: Mapping[str, Trainer]) -> None:
        self._trainers = trainers

    def save(self, folder: Path) -> None:
        """Write the states into an existing folder."""
        for name, trainer in self._trainers.items():
            trainer.checkpoint.save(_made(folder, name))

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, after the weights were loaded."""
        for name, trainer in self._trainers.items():
            trainer.checkpoint.load(_place(folder, name))

    def copy(self) -> Callable[[Path], None]:
        """Copy what `save` writes; gives what writes the copy while training goes on."""
        writers = {name: trainer.checkpoint.copy() for name, trainer in self._trainers.items()}

        def write(folder: Path) -> None:
            for name, write_one in writers.items():
                write_one(_made(folder, name))

        return write


def _place(folder: Path, name: str) -> Path:
    return folder / "trainers" / name


def _made(folder: Path, name: str) -> Path:
    place = _place(folder, name)
    place.mkdir(parents=True, exist_ok=True)
    return place


class AdapterTrainers:
    """Trains several adapters in place, each by a `Trainer` of its roles.

    Args:
        trainers: By the name of the adapter, in the order in which they train.
        runs: The run's config as it is for each adapter, as plain data for what `write_dumps` writes.
        frozen: Adapters that stay as they are.
    """

    def __init__(
        self, trainers: Mapping[str, Trainer], *, runs: Mapping[str, Mapping[str, Any]], frozen: Sequence[str] = ()
    ) -> None:
        self.trainers, self._runs, self._frozen = trainers, runs, frozen
        self.checkpoint = AdapterFiles(trainers)
        self.sampled_versions: Mapping[str, int] = self.versions
        """Versions before the latest step."""

    @property
    def least_members(self) -> int:
        """Trainable members that a group needs to teach all adapters anything."""
        return max(trainer.least_members for trainer in self.trainers.values())

    @property
    def versions(self) -> Mapping[str, int]:
        """Steps in which each adapter has learned; 0 for those that do not."""
        return {name: trainer.steps for name, trainer in self.trainers.items()} | dict.fromkeys(self._frozen, 0)

    def write_dumps(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Write what repeats an update that changed nothing, each adapter's into its own folder."""
        for name, trainer in self.trainers.items():
            trainer.watch.write_dumps(folder / name, self._runs[name])

    def step(
        self, trajectories: Sequence[Trajectory], *, temperature: float, pad_id: int, extras: StepExtras | None = None
    ) -> StepReport:
        """Train every adapter on the trajectories of one step; see `Trainer.step`.

        Raises:
            TrainingError: numbers that are not finite, or no trajectory can train any adapter.
        """
        self.sampled_versions = self.versions
        reports: dict[str, StepReport] = {}
        failure: TrainingError | None = None
        for name, trainer in self.trainers.items():
            try:
                reports[name] = trainer.step(trajectories, temperature=temperature, pad_id=pad_id, extras=extras)
            except NothingToTrain as error:
                failure = error
        if failure is not None and not reports:
            raise failure
        ages = {name: _ages(trajectories, name, self.sampled_versions[name]) for name in reports}
        return joined(reports, ages)


def _ages(trajectories: Sequence[Trajectory], adapter: str, version: int) -> list[int]:
    """Versions that the oldest token of each episode is behind, of those that the adapter sampled."""
    found = []
    for trajectory in (one for one in trajectories if one.is_trainable):
        sequences = (s for s in trajectory.sequences if s.turns and s.turns[0].adapter == adapter)
        if oldest := [int(own.min()) for s in sequences if (own := s.versions[s.loss_mask]).size]:
            found.append(version - min(oldest))
    return found


def joined(reports: Mapping[str, StepReport], ages: Mapping[str, Sequence[int]]) -> StepReport:
    """Join the reports of a step: each adapter's metrics under ``adapter/NAME/``, and those of all together.

    Together, counts are sums, norms and other maxima are the largest, and the rest are means by the adapters' tokens.

    Args:
        reports: By adapter.
        ages: Staleness of each adapter's part of the episodes.
    """
    apart: dict[str, float] = {}
    for name, report in reports.items():
        own = {key.removeprefix("train/"): value for key, value in report.metrics.items() if key.startswith(APART)}
        stale = ages[name]
        own |= {"staleness/mean": sum(stale) / len(stale), "staleness/max": max(stale)} if stale else {}
        apart |= {f"adapter/{name}/{key}": value for key, value in own.items()}
    names = dict.fromkeys(key for report in reports.values() for key in report.metrics)
    together = {key: _together(key, [report.metrics for report in reports.values()]) for key in names}
    warnings = tuple(f"adapter {name}: {said}" for name, report in reports.items() for said in report.warnings)
    return StepReport(metrics={**together, **apart}, warnings=warnings)


def _together(key: str, metrics: Sequence[Mapping[str, float]]) -> float:
    found = [one[key] for one in metrics if key in one]
    if key in COUNTED or (key.startswith(("groups/", "trajectories/")) and key not in OF_ALL):
        return sum(found)
    if key in OF_ALL or key.startswith(("train/grad_norm", "alarms/")) or key.endswith("max"):
        return max(found)
    weights = [one["train/tokens"] for one in metrics if key in one]
    return sum(value * weight for value, weight in zip(found, weights, strict=True)) / sum(weights)
