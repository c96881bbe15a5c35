"""Runs and evaluations in the opened folders, and the check that no file outside them is read."""

from __future__ import annotations

import enum
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import UsageError
from agentrl.evaluation.panel import EPISODES_FILE, FOLDER, RESULT_FILE
from agentrl.observe.run_folder import RunDirectory, find_run
from agentrl.observe.run_status import STATUS_FILE, RunSnapshot, read_status
from agentrl.observe.trajectory_store import step_files

DEEPEST = 4
"""Maximum depth below an opened folder at which runs are found."""
MAX_FOLDERS = 20_000
"""Maximum number of searched folders."""
_CONTENTS = {"trajectories", "checkpoints", "inflight", "model", "logs", "tokens", "numerics"}
"""Folders of a run that contain no other runs."""
_STARTED = ("metrics.jsonl", "trajectories", "checkpoints", "status.json")
"""Files of a run's folder in addition to its config; a run has at least one of them."""


class UnknownAddress(UsageError):
    """An address names a run, episode, group or note that does not exist."""


class SourceKind(enum.StrEnum):
    """Kind of a folder that the viewer shows."""

    RUN = "run"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFolder:
    """A run or an evaluation that the viewer shows."""

    key: str
    """Name in addresses, made from the path relative to the opened folder."""
    kind: SourceKind
    path: Path
    """Absolute path of the folder."""
    name: str
    """Path relative to the opened folder; the folder's name if it is the opened one."""

    @property
    def run(self) -> RunDirectory:
        """Paths of the run; an evaluation has only some of them."""
        return RunDirectory(self.path)

    @property
    def store(self) -> Path:
        """Trajectory store of a run, or file of an evaluation's episodes."""
        return self.path / ("trajectories" if self.kind is SourceKind.RUN else EPISODES_FILE)

    @property
    def result_file(self) -> Path:
        """File of an evaluation's result."""
        return self.path / RESULT_FILE


class OpenedFolders:
    """Folders that the user has opened.

    Args:
        folders: Runs, evaluations, or folders that contain them; a checkpoint opens its run.

    Raises:
        UsageError: a folder does not exist.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                got = "a file" if folder.exists() else "no such folder"
                hint = "show the runs in the folder runs: agentrl view"
                raise UsageError(f"{folder} cannot be opened", got=got, expected="a folder with runs", hint=hint)
        self.roots = tuple(dict.fromkeys(_root_of(folder) for folder in folders))
        """Absolute paths without symbolic links."""

    def check(self, path: Path) -> Path:
        """Resolve all symbolic links of a path, and return it if it is inside the opened folders.

        Raises:
            UsageError: it is outside them.
        """
        resolved = path.resolve()
        if not any(resolved.is_relative_to(root) for root in self.roots):
            raise UsageError(
                f"{path} is outside the opened folders",
                got=f"a symbolic link to {resolved}",
                expected=f"a file inside {' or '.join(map(str, self.roots))}",
                hint=f"open that folder too: agentrl view {self.roots[0]} {resolved.parent}",
            )
        return path

    def file(self, source: SourceFolder, name: str) -> Path | None:
        """Return a file of a source; ``None`` if it does not exist.

        Raises:
            UsageError: it is outside the opened folders.
        """
        path = source.path / name
        return self.check(path) if path.is_file() else None

    def read_status(self, source: SourceFolder) -> RunSnapshot | None:
        """Return the status of a source; ``None`` if it is missing or cannot be read.

        Raises:
            UsageError: it is outside the opened folders.
        """
        return None if self.file(source, STATUS_FILE) is None else read_status(source.path)

    def check_store(self, source: SourceFolder) -> Path:
        """Return the store of a source, if its files are inside the opened folders.

        Raises:
            UnknownAddress: it does not exist.
            UsageError: one of its files is outside the opened folders.
        """
        store = source.store
        if not store.exists():
            raise UnknownAddress(
                f"{source.name} has no episodes", got=f"no {store.name}", hint="episodes appear while they are played"
            )
        self.check(store)
        for file in step_files(store) if store.is_dir() else ():
            if file.is_symlink():
                self.check(file)
        return store

    def discover(self) -> list[SourceFolder]:
        """Return the runs and evaluations, in the order of their paths."""
        found: dict[Path, tuple[Path, SourceKind]] = {}
        for root in self.roots:
            for path, kind in _search(root, is_opened=True):
                found.setdefault(path, (root, kind))
        sources, taken = [], set[str]()
        for path, (root, kind) in sorted(found.items()):
            name = root.name if path == root else path.relative_to(root).as_posix()
            key = _key(name)
            key = key if key not in taken else _key(str(path))
            taken.add(key)
            sources.append(SourceFolder(key=key, kind=kind, path=path, name=name))
        return sources


def _root_of(folder: Path) -> Path:
    """Return the folder to open: the run for one of its checkpoints or other parts."""
    resolved = folder.resolve()
    if (resolved / EPISODES_FILE).is_file() or resolved.name == FOLDER:
        return resolved
    run = find_run(resolved)
    return run.path if run is not None and resolved.is_relative_to(run.path) else resolved


def _search(folder: Path, depth: int = DEEPEST, *, is_opened: bool = False) -> Iterator[tuple[Path, SourceKind]]:
    """Yield the runs and evaluations in a folder; symbolic links are not followed."""
    queue, seen = [(folder, depth, is_opened)], 0
    while queue and seen < MAX_FOLDERS:
        current, left, is_named = queue.pop()
        seen += 1
        entries = _entries(current)
        if EPISODES_FILE in entries:
            yield current, SourceKind.EVALUATION
            continue
        is_run = "config.yaml" in entries and (is_named or any(name in entries for name in _STARTED))
        if is_run:
            yield current, SourceKind.RUN
        for name, is_folder in entries.items():
            if is_folder and left and not name.startswith(".") and not (is_run and name in _CONTENTS):
                queue.append((current / name, left - 1, False))


def _entries(folder: Path) -> dict[str, bool]:
    """Return the names in a folder, each with True if it is a folder and not a link to one."""
    found: dict[str, bool] = {}
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found[entry.name] = entry.is_dir(follow_symlinks=False)
    return found


def _key(name: str) -> str:
    """Return a short name for addresses; a name with other characters gets a digest.

    >>> _key("demo"), _key("demo/evaluations/engine-4f0c")
    ('demo', 'demo-evaluations-engine-4f0c-332688')
    """
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", name):
        return name
    words = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[-60:]
    return f"{words}-{hashlib.blake2b(os.fsencode(name), digest_size=3).hexdigest()}"
