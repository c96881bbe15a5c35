"""The folder of a run and its files.

runs/NAME/
  config.yaml           the resolved config
  metrics.jsonl         one line per training step
  trajectories/         every episode, turn by turn
  tokens/               what the trainer computed for the sampled tokens of each step
  inflight/             journals of the episodes in flight, in asynchronous training
  checkpoints/          step-000010/ …
  model/                the initial model, if the run created it
  status.json           the run's current activity, and the episodes in flight; it stays after a crash
  start.json            the command, working folder, machine and versions of its start
  diagnosis.json        what is wrong with the run, after it has ended
  incidents.json        failures of rewards, environments and tools, if any, and where the rewards are defined
  rollout.json          number of groups to play, if the run has no trainer
  numerics/             dump files that reproduce skipped updates, if any
  logs/                 trackers' files
  report.md …           written by evaluation

`logs` also holds the run's own log: warnings, retries and stall reports.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import chain, count
from pathlib import Path

from agentrl.errors import AgentRLError, Outcome, UsageError, described_error
from agentrl.observe.console import VisibleFormatter
from agentrl.observe.files import first_free, read_json_lines, replace_file, writing

LATEST = "latest"
LOCK = ".lock"
"""Lock file of the process that uses a run's folder."""
LOCK_TABLE = Path("/proc/locks")
RUN_LOG = "agentrl.log"
RUN = "run"
RUN_OR_EVALUATION = "run or evaluation"
RUN_OR_CHECKPOINT = "run or checkpoint"
LISTED = 6
"""Maximum number of runs that a message lists."""


def step_name(step: int, suffix: str = "") -> str:
    """Return the name of a step's file or folder.

    >>> step_name(12, ".jsonl")
    'step-000012.jsonl'
    """
    return f"step-{step:06d}{suffix}"


def step_of(name: str, suffix: str = "") -> int | None:
    """Return the step of a name from `step_name`; ``None`` for all other names, such as those of copies.

    >>> step_of("step-000012.jsonl", ".jsonl"), step_of("step-000012-keep")
    (12, None)
    """
    found = re.fullmatch(rf"step-([0-9]{{6}}|[1-9][0-9]{{6,}}){re.escape(suffix)}", name)
    return None if found is None else int(found[1])


@contextmanager
def lock_folder(folder: Path, what: str) -> Iterator[None]:
    """Lock a folder against other processes; the system releases the lock when this process ends.

    Args:
        folder: Folder in which the lock file is created.
        what: Kind of the folder, for the message: ``run``.

    Raises:
        UsageError: another process holds the lock.
    """
    with writing(folder):
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{what} {folder} is in use",
                got="another process that uses it",
                hint="wait until that process has ended, or stop it; finished work is kept",
            ) from None
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Return True if a process of this machine holds the lock file of a folder.

    Reads the system's table of locks: an attempt to lock the file could make a run fail that starts at the same moment.
    """
    try:
        inode = str(os.stat(path).st_ino)
        lines = LOCK_TABLE.read_text().splitlines()
    except OSError:
        return False
    fields = (line.split() for line in lines if " FLOCK " in line)
    return any(inode == words[5].rpartition(":")[2] for words in fields if len(words) > 5 and words[1] == "FLOCK")


class RunDirectory:
    """Paths inside one run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        """Resolved config."""
        self.metrics_file = path / "metrics.jsonl"
        """One JSON line per training step."""
        self.diagnosis_file = path / "diagnosis.json"
        """Worst problems of a run that has ended."""
        self.rollout_file = path / "rollout.json"
        """Number of groups to play, of a run without a trainer."""
        self.trajectories = path / "trajectories"
        self.inflight = path / "inflight"
        """Journals of the episodes in flight."""
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        """Initial model, if the run created it."""
        self.numerics = path / "numerics"
        """Dump files that reproduce skipped updates."""
        self.logs = path / "logs"
        """Files of trackers."""
        self.run_log = self.logs / RUN_LOG
        self._made: list[Path] = []
        """Folders that `create` made, innermost first; empty for an existing run."""
        self._latest_before: str | None = None
        """Previous target of ``latest``."""
        self._identity: os.stat_result | None = None
        """Status of the folder that `create` made."""

    @classmethod
    def create(cls, parent: Path, name: str | None, *, prefix: str = "run") -> RunDirectory:
        """Create a new run's folder and point ``latest`` to it.

        The default name is `prefix` and the time.

        Raises:
            UsageError: the folder exists and is not empty, or cannot be created.
        """
        path = parent.absolute() / (name or _free_name(parent, prefix))  # code of users may change the working folder
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(
                f"{path} already exists",
                expected="a new folder",
                hint=f"choose another run.name, remove it, or resume it with --resume {shlex.quote(str(path))}",
            )
        run = cls(path)
        link = parent / LATEST
        run._latest_before = os.readlink(link) if link.is_symlink() else None
        run._made = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            with writing(path):
                path.mkdir(parents=True, exist_ok=True)
                run._identity = path.stat()
                _point(link, path)
        except UsageError:
            run.undo_start()
            raise
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Return an existing run's folder; ``runs/latest`` is followed.

        Raises:
            UsageError: the folder is not a run.
        """
        run = cls(Path(path).resolve())
        if not run.config_file.is_file():
            raise missing_run_error(path)
        return run

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Lock the run against other processes; the system releases the lock when this process ends.

        If the block fails without finishing anything, a run that this process created is removed: see `undo_start`.

        Raises:
            UsageError: another process uses the run.
        """
        with lock_folder(self.path, "run"):
            try:
                yield
            except BaseException:
                self.undo_start()
                raise

    def undo_start(self) -> None:
        """Remove the folders from `create` and restore ``latest``, unless a step, checkpoint or episode is finished.

        Logs of servers and ranks are kept, because error messages refer to them; ``latest`` is restored nevertheless.
        Nothing is changed for an existing run, or if the folder was moved, because another folder may now be at its
        path.
        """
        if not self._made or self._is_elsewhere() or self._holds_results():
            return
        link = self.path.parent / LATEST
        if link.is_symlink() and (link.parent / os.readlink(link)) == self.path:
            _restore_link(link, self._latest_before)
        if self._holds_foreign_logs():
            return
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in self._made[1:]:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _is_elsewhere(self) -> bool:
        """Return True if the folder that `create` made is no longer at its path."""
        if self._identity is None:
            return False
        return not self.path.exists() or not os.path.samestat(self.path.stat(), self._identity)

    def _holds_results(self) -> bool:
        """Return True if a step, a checkpoint or an episode is finished, or a file cannot be read."""
        has_metrics = self.metrics_file.is_file() and self.metrics_file.stat().st_size > 0
        if has_metrics or any(self.checkpoints.glob("step-*")):
            return True
        return any(_holds_an_episode(file) for file in self.trajectories.glob("step-*.jsonl"))

    def _holds_foreign_logs(self) -> bool:
        """Return True if other processes have written logs."""
        return any(log.name != RUN_LOG and log.stat().st_size for log in self.logs.glob("*.log"))

    def save_config(self, text: str) -> None:
        """Write ``config.yaml``."""
        replace_file(self.config_file, text.encode())


def _holds_an_episode(file: Path) -> bool:
    """Return True if an episode in a file of the trajectory store is finished, or the file cannot be read."""
    try:
        ends = (record["trajectory"]["outcome"] for record in read_json_lines(file) if record["kind"] == "end")
        return any(outcome is not None and Outcome(outcome).is_trainable for outcome in ends)
    except (OSError, ValueError, KeyError, TypeError, AgentRLError):
        return True


def find_run(path: str | Path) -> RunDirectory | None:
    """Return the run that contains a folder, such as ``runs/latest`` or a checkpoint, or the latest run in the folder.

    Returns:
        The run, or ``None`` if there is none.
    """
    folder = Path(path)
    if not folder.is_dir():
        return None
    folder = folder.resolve()
    for candidate in (folder, *folder.parents[:3], (folder / LATEST).resolve()):
        if (candidate / "config.yaml").is_file():
            return RunDirectory.open(candidate)
    return None


def require_run(path: str | Path, what: str = RUN) -> RunDirectory:
    """Return the run of `find_run`.

    Args:
        path: The folder.
        what: What the folder may be, for the message.

    Raises:
        UsageError: there is no run; the message lists those that exist.
    """
    run = find_run(path)
    if run is None:
        raise missing_run_error(path, what)
    return run


def missing_run_error(path: str | Path, what: str = RUN, *, hint: str | None = None) -> UsageError:
    """Return an error about a path that is not `what`; it lists the newest runs next to the path or in ``runs``."""
    folder = Path(path)
    runs = _newest_runs(folder.parent) or _newest_runs(Path("runs"))
    more = f", … ({len(runs)} in all)" if len(runs) > LISTED else ""
    listed = f": {', '.join(map(str, runs[:LISTED]))}{more}"
    return UsageError(
        f"{path} is not a {what}",
        got=_describe_path(folder),
        expected=f"the folder of a run{listed if runs else ', such as runs/latest'}",
        hint=hint or (None if runs else "train one: agentrl demo"),
    )


def _describe_path(path: Path) -> str:
    if (path / "episodes.jsonl").is_file():
        return "an evaluation"
    if path.is_dir():
        return "a folder without config.yaml"
    return "a file" if path.exists() else "no such folder"


def _newest_runs(parent: Path) -> list[Path]:
    """Return the runs in a folder, the newest first."""
    files = [file for file in parent.glob("*/config.yaml") if file.parent.name != LATEST]
    return [file.parent for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)]


def _free_name(parent: Path, prefix: str) -> str:
    words = re.sub(r"[^A-Za-z0-9_.-]+", "-", prefix).lstrip(".-")  # not a hidden folder or an option
    stem = f"{words}-{datetime.now():%Y%m%d-%H%M%S}"
    numbered = (parent / f"{stem}-{number}" for number in count(2))
    return first_free(chain([parent / stem], numbered)).name


def _point(link: Path, target: Path) -> None:
    """Atomically point the symbolic link `link` to its sibling `target`."""
    if link.exists() and not link.is_symlink():
        return
    _restore_link(link, os.path.relpath(target, link.parent))


def _restore_link(link: Path, target: str | None) -> None:
    """Point `link` to `target`; remove it for ``None``."""
    if target is None:
        link.unlink(missing_ok=True)
        return
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target, target_is_directory=True)
    temporary.replace(link)


OBSERVED = "agentrl.observe"
"""Logger of damaged records and failed trackers."""
DATA = ("agentrl.task", "agentrl.message")
"""Loggers of changed tasks, and of values in data files that are read differently."""


@contextmanager
def logging_to(file: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Append agentrl's log records inside the block to `file`, in addition to other handlers.

    `say` shows warnings about damaged records, failed trackers, changed tasks and data files to the user.

    An exception that ends the block is appended, too, for a diagnosis.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    log = _RunLog(file, encoding="utf-8", delay=True)
    log.addFilter(lambda record: file.parent.is_dir())  # the run's folder may have been removed
    log.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    screen = _Screen(say)
    logger, shown = logging.getLogger("agentrl"), [logging.getLogger(name) for name in (OBSERVED, *DATA)]
    logger.addHandler(log)
    for one in shown:
        one.addHandler(screen)
    try:
        yield
    except Exception as error:
        words = "the run ended with an error: %s", (described_error(error),)
        log.handle(logger.makeRecord(logger.name, logging.ERROR, "", 0, *words, None))
        raise
    finally:
        for one in shown:
            one.removeHandler(screen)
        logger.removeHandler(log)
        log.close()


class _RunLog(logging.FileHandler):
    """Log file that silently loses records while the disk is full: the run reports the full disk itself."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore errors of the disk."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # of records that could not be written
            super().close()


class _Screen(logging.Handler):
    """Log handler that shows warnings to the user by calling `say`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Show the message."""
        self._say(record.getMessage())
