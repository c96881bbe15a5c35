"""Running baselines: numbers of roles, task types or tasks that an estimator compares with, kept over steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from agentrl.algorithms.options import check_options
from agentrl.algorithms.running_baselines import BaselineTracker
from agentrl.algorithms.traits import tracker_of
from agentrl.registry import Kind, lookup
from agentrl.training.batch import StepBatch
from agentrl.training.signals.base import SignalSetup, TokenSignal
from agentrl.trajectory import Trajectory, base_role, role_of


class RunningBaseline(TokenSignal):
    """Baselines of the step's episodes; each episode's return then changes the baseline of its role or task.

    Their numbers are part of the trainer's state.
    """

    name = "running_baseline"

    def __init__(self, tracker: BaselineTracker) -> None:
        self._tracker = tracker
        self._numbers: dict[str, Sequence[float]] = {}

    @classmethod
    def build(cls, setup: SignalSetup) -> RunningBaseline | None:
        """Build the signal, if the estimator keeps baselines."""
        estimator = lookup(Kind.ADVANTAGE, setup.algorithm.advantage)
        tracker = tracker_of(estimator)
        return None if tracker is None else cls(tracker(**check_options(estimator, setup.algorithm.advantage_options)))

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Add the baseline of each episode, in the order of the batch."""
        found = []
        for trajectory, reward in zip(batch.trajectories, batch.episodes.returns.tolist(), strict=True):
            key = self._key(trajectory)
            numbers = self._numbers.get(key, self._tracker.start)
            found.append(self._tracker.baseline(numbers))
            self._numbers[key] = self._tracker.update(numbers, reward)
        baseline = torch.tensor(found, dtype=torch.float64)
        return dataclasses.replace(batch, episodes=dataclasses.replace(batch.episodes, baseline=baseline))

    def _key(self, trajectory: Trajectory) -> str:
        parts = [trajectory.environment, base_role(role_of(trajectory))]
        of_unit = {"role": [], "kind": [trajectory.task_type or ""], "task": [trajectory.task_id]}
        return " ".join([*parts, *of_unit[self._tracker.unit]])

    def metrics(self) -> dict[str, float]:
        """Return the number of baselines."""
        return {"train/running_baselines": float(len(self._numbers))}

    def state(self) -> RunningBaseline:
        """Return the numbers of all baselines."""
        return self

    def named_state(self) -> dict[str, torch.Tensor]:
        """Return the numbers of each role or task by name."""
        return {key: torch.tensor(numbers, dtype=torch.float64) for key, numbers in self._numbers.items()}

    def allocate_state(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Allocate tensors for a saved state with these names."""
        return {name: torch.zeros(len(self._tracker.start), dtype=torch.float64) for name in names}

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors of `allocate_state` after they have been filled."""
        self._numbers = {name: tuple(numbers.tolist()) for name, numbers in state.items()}
