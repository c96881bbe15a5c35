"""Progress of training runs in benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from agentrl.observe.progress import RunWatcher


class ProgressPrinter(RunWatcher):
    """Prints the progress of a run, and keeps the mean reward of each training step.

    Args:
        name: Name of the run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.rewards: list[float] = []

    def on_message(self, text: str) -> None:
        """Print a line."""
        print(f"{self._name}: {text}", file=sys.stderr)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the mean reward of a training step."""
        if (reward := metrics.get("reward/mean")) is not None:
            self.rewards.append(reward)
            self.on_message(f"step {step}: mean reward {reward:.3f}")
