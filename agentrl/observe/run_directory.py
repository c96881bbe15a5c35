"""The folder of a run: where everything about it lies.

runs/NAME/
  config.yaml           the resolved config
  metrics.jsonl         one line per training step
  trajectories/         every episode, turn by turn
  checkpoints/          step-000010/ …
  model/                the model that the run started from, when it made its own
  numerics/             what repeats updates that were left out, if any were
  logs/                 trackers' files
  report.md …           written by evaluation
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from agentrl.errors import UsageError
from agentrl.observe.disk import replace_file, writing

LATEST = "latest"
LOCK = ".lock"
"""Held by the process that works in a run."""


def step_name(step: int, suffix: str = "") -> str:
    """Name what belongs to a step.

    >>> step_name(12, ".jsonl")
    'step-000012.jsonl'
    """
    return f"step-{step:06d}{suffix}"


def step_of(name: str, suffix: str = "") -> int | None:
    """Read the step out of a name that `step_name` gave; ``None`` for all other names, such as those of copies.

    >>> step_of("step-000012.jsonl", ".jsonl"), step_of("step-000012-keep")
    (12, None)
    """
    found = re.fullmatch(rf"step-([0-9]{{6}}|[1-9][0-9]{{6,}}){re.escape(suffix)}", name)
    return None if found is None else int(found[1])


class RunDirectory:
    """Paths inside one run's folder.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, parent: Path, name: str | None, *, prefix: str = "run") -> RunDirectory:
        """Make a new run's folder and point ``latest`` at it.

        Args:
            parent: Folder of all runs.
            name: The run's name; `prefix` and the time when left out.
            prefix: What the made-up name starts with.

        Raises:
            UsageError: the folder holds a run already, or cannot be made, or the name leads out of `parent`.
        """
        if name and (Path(name).is_absolute() or ".." in Path(name).parts):
            raise UsageError(
                "run.name leads elsewhere",
                got=repr(name),
                expected="a name",
                hint="run.directory says where runs lie",
            )
        path = parent / (name or _free_name(parent, prefix))
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(
                f"{path} exists already",
                expected="a new folder",
                hint=f"choose another run.name, remove it, or go on with: agentrl train --resume {path}",
            )
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            _point(parent / LATEST, path)
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """An existing run's folder; ``runs/latest`` is followed.

        Raises:
            UsageError: no run lies there.
        """
        run = cls(Path(path).resolve())
        if not run.config_file.is_file():
            raise UsageError(
                f"no run in {path}",
                got="no config.yaml" if run.path.is_dir() else "no such folder",
                expected="the folder of a run, such as runs/latest",
            )
        return run

    @property
    def config_file(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        """One JSON line per training step."""
        return self.path / "metrics.jsonl"

    @property
    def trajectories(self) -> Path:
        """Folder of the trajectory store."""
        return self.path / "trajectories"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """Folder of the model that this run made for itself."""
        return self.path / "model"

    @property
    def numerics(self) -> Path:
        """Folder of the files that repeat updates that were left out."""
        return self.path / "numerics"

    @property
    def logs(self) -> Path:
        """Folder of the trackers' files."""
        return self.path / "logs"

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep other processes from working in this run; the system lets go of it however this process ends.

        Raises:
            UsageError: another process works in it.
        """
        with writing(self.path):
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise UsageError(
                f"run {self.path} is in use",
                got="another process that trains in it",
                hint="wait until it has ended, or stop it",
            ) from None
        try:
            yield
        finally:
            os.close(descriptor)

    def save_config(self, text: str) -> None:
        """Write ``config.yaml``."""
        replace_file(self.config_file, text.encode())


def _free_name(parent: Path, prefix: str) -> str:
    stem = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', prefix)}-{datetime.now():%Y%m%d-%H%M%S}"
    name, number = stem, 2
    while (parent / name).exists():
        name, number = f"{stem}-{number}", number + 1
    return name


def _point(link: Path, target: Path) -> None:
    """Let the symbolic link `link` point at its neighbour `target`, without a moment in which it is absent."""
    if link.exists() and not link.is_symlink():
        return
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    temporary.replace(link)
