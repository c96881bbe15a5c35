"""Trackers: where else the metrics go. One that fails never stops a run: it warns once and is left out from then on."""

from __future__ import annotations

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.registry import Kind, lookup

_log = logging.getLogger(__name__)


class Tracker(ABC):
    """Receives the metrics of a run. Made by its class with the run's folder, name and config."""

    @abstractmethod
    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The numbers of one training step."""

    @abstractmethod
    def close(self) -> None:
        """Flush and end."""


class TensorBoardTracker(Tracker):
    """Scalars as TensorBoard event files in the run's ``logs``; needs the package tensorboard (not torch)."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One event with all scalars."""
        values = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbTracker(Tracker):
    """A Weights & Biases run; needs the package wandb."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        identity = folder / "run_id"  # a resumed run goes on in the same history
        if not identity.is_file():
            identity.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project="agentrl",
            id=identity.read_text(),
            name=name,
            dir=str(folder),
            config=dict(config),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One history row."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Trackers:
    """All configured trackers, kept apart from the run: their failures are logged, once each.

    Args:
        names: Registry names.
        folder: The run's ``logs``; each tracker gets its own folder in it.
        name: The run's name.
        config: The resolved config as plain data.

    Raises:
        UnknownNameError: no tracker of this name.
    """

    def __init__(self, names: Sequence[str], *, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        self._trackers: dict[str, Tracker] = {}
        for kind in names:
            make = lookup(Kind.TRACKER, kind)
            try:
                self._trackers[kind] = make(folder / kind, name, config)
            except Exception as error:
                self._warn(kind, error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand one step's numbers to every tracker that still works."""
        for kind, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, metrics)
            except Exception as error:
                del self._trackers[kind]
                self._warn(kind, error)

    def close(self) -> None:
        """Close every tracker."""
        for kind, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                self._warn(kind, error)
        self._trackers.clear()

    def _warn(self, kind: str, error: Exception) -> None:
        hint = " (pip install 'agentrl[trackers]')" if isinstance(error, ImportError) else ""
        _log.warning("tracker %s is off: %s: %s%s; the run goes on", kind, type(error).__name__, error, hint)
