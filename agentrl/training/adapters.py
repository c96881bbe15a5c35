"""Training of several adapters: one trainer each, on the tokens of the adapter's roles.

    trajectories ─┬─► trainer of planner: members of its roles ─► its own update ─┬─► one report
                  └─► trainer of worker:  …                                        ┘

Each adapter has its own optimizer, algorithm, generator and step count, which is the version of its weights. Adapters
share only the frozen weights, and are trained in turn. An adapter without a trainable trajectory is not updated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.config import Config
from agentrl.config.derived import adapter_config
from agentrl.errors import TrainingError
from agentrl.training.batch import NothingToTrain, StepExtras
from agentrl.training.report import StepReport
from agentrl.training.trainer import Trainer
from agentrl.trajectory import Trajectory

COUNTED = ("train/tokens", "train/updates", "train/updates_skipped", "train/idle_sequences", "train/seconds")
"""Metrics that are summed over adapters."""
PER_ADAPTER = ("train/", "mismatch/", "groups/")
"""Prefixes of metrics that each adapter reports separately."""
SHARED_METRICS = ("trajectories/infrastructure", "trajectories/unscored")
"""Metrics that are the same for all adapters: counts of trajectories that cannot train any of them."""


class AdapterFiles:
    """Storage of several trainers' states, one folder each."""

    def __init__(self, trainers: Mapping[str, Trainer]) -> None:
        self._trainers = trainers

    def save(self, folder: Path) -> None:
        """Write the states to an existing folder."""
        for name, trainer in self._trainers.items():
            trainer.checkpoint.save(_make_state_folder(folder, name))

    def load(self, folder: Path) -> None:
        """Restore a state that `save` wrote; the weights must be loaded first."""
        for name, trainer in self._trainers.items():
            trainer.checkpoint.load(_state_folder(folder, name))

    def copy(self) -> Callable[[Path], None]:
        """Copy the state; return a function that writes the copy to a folder while training continues."""
        writers = {name: trainer.checkpoint.copy() for name, trainer in self._trainers.items()}

        def write(folder: Path) -> None:
            for name, write_one in writers.items():
                write_one(_make_state_folder(folder, name))

        return write


def _state_folder(folder: Path, name: str) -> Path:
    return folder / "trainers" / name


def _make_state_folder(folder: Path, name: str) -> Path:
    path = _state_folder(folder, name)
    path.mkdir(parents=True, exist_ok=True)
    return path


class AdapterTrainers:
    """Trainer of several adapters in place, with one `Trainer` per adapter.

    Args:
        trainers: Trainers by adapter name, in the order in which they train.
        runs: The run's config for each adapter, as plain data, for `write_dumps`.
        frozen: Adapters that do not train.
    """

    def __init__(
        self, trainers: Mapping[str, Trainer], *, runs: Mapping[str, Mapping[str, Any]], frozen: Sequence[str] = ()
    ) -> None:
        self.trainers, self._runs, self._frozen = trainers, runs, frozen
        self.checkpoint = AdapterFiles(trainers)
        self.sampled_versions: Mapping[str, int] = self.versions
        """Weight versions by adapter before the latest step."""

    @property
    def min_members(self) -> int:
        """Minimum number of trainable members of a group that provides a gradient for every adapter."""
        return max(trainer.min_members for trainer in self.trainers.values())

    @property
    def versions(self) -> Mapping[str, int]:
        """Number of steps in which each adapter was trained; 0 for frozen adapters."""
        return {name: trainer.steps for name, trainer in self.trainers.items()} | dict.fromkeys(self._frozen, 0)

    def write_dumps(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Dump skipped updates from now on, each adapter's to its own folder."""
        for name, trainer in self.trainers.items():
            trainer.watch.write_dumps(folder / name, self._runs[name])

    def configure(self, config: Config) -> None:
        """Use the settings of a config that differs only in keys that may change during training."""
        for name, trainer in self.trainers.items():
            trainer.configure(adapter_config(config, name))

    def step(
        self, trajectories: Sequence[Trajectory], *, temperature: float, extras: StepExtras | None = None
    ) -> StepReport:
        """Train every adapter on the trajectories of one step; see `Trainer.step`.

        Raises:
            TrainingError: a reward or an advantage is not finite, or no trajectory can train any adapter.
        """
        self.sampled_versions = self.versions
        reports: dict[str, StepReport] = {}
        failure: TrainingError | None = None
        for name, trainer in self.trainers.items():
            try:
                reports[name] = trainer.step(trajectories, temperature=temperature, extras=extras)
            except NothingToTrain as error:
                failure = error
        if failure is not None and not reports:
            raise failure
        ages = {name: _ages(trajectories, name, self.sampled_versions[name]) for name in reports}
        return join_reports(reports, ages)


def _ages(trajectories: Sequence[Trajectory], adapter: str, version: int) -> list[int]:
    """Compute the age in versions of the oldest token that the adapter sampled in each episode."""
    found = []
    for trajectory in (one for one in trajectories if one.is_trainable):
        sequences = (s for s in trajectory.sequences if s.turns and s.turns[0].adapter == adapter)
        if oldest := [int(own.min()) for s in sequences if (own := s.versions[s.loss_mask]).size]:
            found.append(version - min(oldest))
    return found


def join_reports(reports: Mapping[str, StepReport], ages: Mapping[str, Sequence[int]]) -> StepReport:
    """Join the reports of a step: each adapter's metrics under ``adapter/NAME/``, and the metrics over all adapters.

    Over all adapters, counts are summed, the largest of norms and other maxima is reported, and other metrics are means
    (see `combine_metric`).

    Args:
        reports: Reports by adapter.
        ages: Staleness of each adapter's part of the episodes, by adapter.
    """
    apart: dict[str, float] = {}
    for name, report in reports.items():
        own = {
            key.removeprefix("train/"): value for key, value in report.metrics.items() if key.startswith(PER_ADAPTER)
        }
        stale = ages[name]
        own |= {"staleness/mean": sum(stale) / len(stale), "staleness/max": max(stale)} if stale else {}
        apart |= {f"adapter/{name}/{key}": value for key, value in own.items()}
    names = dict.fromkeys(key for report in reports.values() for key in report.metrics)
    together = {key: combine_metric(key, [report.metrics for report in reports.values()]) for key in names}
    warnings = tuple(f"adapter {name}: {text}" for name, report in reports.items() for text in report.warnings)
    tokens = tuple(tokens for report in reports.values() for tokens in report.tokens)
    return StepReport(metrics={**together, **apart}, warnings=warnings, tokens=tokens)


def combine_metric(key: str, metrics: Sequence[Mapping[str, float]]) -> float:
    """Combine a metric of several parts of a step: a sum of counts, the largest of maxima, or a mean.

    Means of rewards are over episodes, others over tokens.
    """
    found = [one[key] for one in metrics if key in one]
    if key in COUNTED or (key.startswith(("groups/", "trajectories/")) and key not in SHARED_METRICS):
        return sum(found)
    if key in SHARED_METRICS or key.startswith(("train/grad_norm", "alarms/")) or key.endswith("max"):
        return max(found)
    size = "trajectories/trained" if key.startswith("reward/") else "train/tokens"
    weights = [one[size] for one in metrics if key in one]
    return sum(value * weight for value, weight in zip(found, weights, strict=True)) / sum(weights)
