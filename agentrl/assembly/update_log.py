"""Where a run that only learns (from demonstrations, or from pairs) writes what its updates were."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from agentrl.assembly.runs import Run
from agentrl.observe.metrics import MetricsFile
from agentrl.observe.progress import RunStatus, RunWatcher
from agentrl.observe.trackers import Trackers


class UpdateLog:
    """The run's metrics file, its trackers and its watcher, which are told of every update; open as a context.

    Args:
        run: Its folder and config.
        status: Of the run; kept up to date.
        watcher: Is told.

    Raises:
        UsageError: the disk is full.
    """

    def __init__(self, run: Run, status: RunStatus, watcher: RunWatcher) -> None:
        self.last: dict[str, float] = {}
        """The metrics of the newest update."""
        self._run, self._status, self._watcher = run, status, watcher
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Open the file and the trackers."""
        folder, config = self._run.folder, self._run.config
        self._metrics = MetricsFile(folder.metrics_file)
        self._stack.callback(self._metrics.close)
        values = config.model_dump(mode="json")
        self._trackers = Trackers(config.trackers, folder=folder.logs, name=folder.path.name, config=values)
        self._stack.callback(self._trackers.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close them."""
        self._stack.close()

    def record(self, update: int, metrics: Mapping[str, float], *, updates: int, skipped: bool) -> None:
        """Write an update down.

        Args:
            update: Its number, from 1.
            metrics: By their final names.
            updates: How many there will be.
            skipped: It changed nothing, because gradients were not finite.
        """
        self.last = dict(metrics)
        self._metrics.append(update, self.last)
        self._trackers.log(update, self.last)
        self._status.step, self._status.steps, self._status.metrics = update, updates, self.last
        if skipped:
            self._watcher.on_message(f"update {update} skipped: gradients are not finite")
        self._watcher.on_step(update, self.last)
