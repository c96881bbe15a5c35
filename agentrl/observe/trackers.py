"""Trackers: where else the metrics go.

A tracker whose package is missing ends the start (`check_trackers`). One that fails later never stops a run: it says so
once and is left out from then on.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from agentrl.errors import ConfigError, UsageError
from agentrl.registry import Kind, lookup, names

_log = logging.getLogger(__name__)


class Tracker(ABC):
    """Receives the metrics of a run. Made by its class with the run's folder, name and config."""

    package: ClassVar[str | None] = None
    """The package that it needs besides agentrl; its name is the same for ``pip install`` and for ``import``."""

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

    package = "tensorboard"

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

    package = "wandb"

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


def check_trackers(chosen: Sequence[str]) -> None:
    """Check that every named tracker can be made.

    Raises:
        UnknownNameError: no tracker of this name.
        UsageError: its package is missing, or the name stands for something else.
    """
    for name in chosen:
        found = lookup(Kind.TRACKER, name)
        if not (isinstance(found, type) and issubclass(found, Tracker)):
            raise ConfigError(
                f"trackers names {name}, which is not a tracker",
                got=repr(found),
                expected="a subclass of agentrl.observe.trackers.Tracker",
            )
        if found.package is not None and not _is_importable(found.package):
            raise _missing(name, found.package)


def tracker_states() -> dict[str, str]:
    """Each registered tracker with ``present``, or with what is missing and how to install it."""
    states = {}
    for name in names(Kind.TRACKER):
        try:
            check_trackers([name])
            states[name] = "present"
        except UsageError as error:
            states[name] = f"missing; {error.hint}" if error.hint else f"cannot be used: {error}"
    return states


def _is_importable(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _missing(name: str, package: str) -> UsageError:
    return UsageError(
        f"tracker {name} needs the package {package}",
        got="no such package here",
        expected=f"{package} installed, or trackers without {name}",
        hint=f"to install it: pip install {package}",
    )


class Trackers:
    """All configured trackers, kept apart from the run: when one fails, this is said once, and the run goes on.

    Args:
        chosen: Registry names.
        folder: The run's ``logs``; each tracker gets its own folder in it.
        name: The run's name.
        config: The resolved config as plain data.

    Raises:
        UnknownNameError: no tracker of this name.
        UsageError: a tracker cannot be imported.
    """

    def __init__(self, chosen: Sequence[str], *, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        check_trackers(chosen)
        self._trackers: dict[str, Tracker] = {}
        for kind in chosen:
            make = lookup(Kind.TRACKER, kind)
            try:
                self._trackers[kind] = make(folder / kind, name, config)
            except ImportError as error:
                self.close()
                raise UsageError(f"tracker {kind} cannot be imported", got=error, expected="its packages") from error
            except Exception as error:
                self._give_up(kind, error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand one step's numbers to every tracker that still works."""
        for kind, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, metrics)
            except Exception as error:
                del self._trackers[kind]
                self._give_up(kind, error)

    def close(self) -> None:
        """Close every tracker."""
        for kind, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                self._give_up(kind, error)
        self._trackers.clear()

    def _give_up(self, kind: str, error: Exception) -> None:
        _log.warning(
            "tracker %s failed and is off; the run goes on without it: %s: %s", kind, type(error).__name__, error
        )
