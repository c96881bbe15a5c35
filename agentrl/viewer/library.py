"""All opened sources, and the thread that watches their files."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl.errors import AgentRLError
from agentrl.observe.run_status import STATUS_FILE
from agentrl.viewer.opened_source import OpenedSource
from agentrl.viewer.run_state import SourceState
from agentrl.viewer.sources import OpenedFolders, SourceFolder, UnknownAddress
from agentrl.viewer.store_index import IndexBuilder, StoreIndex

_log = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two checks of the files."""
SEARCH_EVERY_S = 5.0
"""Seconds between two searches for new runs."""
STATE_EVERY_S = 5.0
"""Seconds after which the state of an unfinished run is read again, because a crash changes no file."""
LINES_S = 2.0
"""Seconds for which a request for the list reads runs; with thousands of runs, it does not wait for all of them."""

Publish = Callable[[str, str, dict[str, Any]], None]
"""Receiver of events: kind, key of the source, body. It is called in other threads."""
_SHOWN = ("phase", "step", "steps", "time")
"""Fields of a status that its event contains."""
_OVER = (SourceState.FINISHED.value, SourceState.INTERRUPTED.value, SourceState.CRASHED.value)


class Library:
    """The opened sources by their keys.

    Args:
        folders: Opened folders.
        publish: Receives events about changes.
    """

    def __init__(self, folders: OpenedFolders, publish: Publish) -> None:
        self.folders = folders
        self._publish = publish
        self._builder = IndexBuilder(self._on_index)
        self._sources: dict[str, OpenedSource] = {}
        self._seen: dict[str, dict[Path, tuple[int, int] | None]] = {}
        self._read_at: dict[str, float] = {}
        self._searching = threading.Lock()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="agentrl-watch", daemon=True)

    def start(self) -> None:
        """Find the sources, and start the threads."""
        self.search()
        self._builder.start()
        self._watcher.start()

    def close(self) -> None:
        """End the threads and close the indexes."""
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join()
        self._builder.close()
        for opened in self._sources.values():
            opened.close()

    def __getitem__(self, key: str) -> OpenedSource:
        """Return a source.

        Raises:
            UnknownAddress: there is none with this key.
        """
        found = self._sources.get(key)
        if found is None:
            raise UnknownAddress("no such run or evaluation", got=repr(key[:200]), hint="the list of all is at /")
        return found

    def newest_first(self) -> list[OpenedSource]:
        """Return all sources, the newest first."""
        return sorted(self._sources.values(), key=lambda one: -(one.line.get("updated") or 0.0))

    def sole(self) -> OpenedSource | None:
        """Return the run or evaluation that the user named or that is the only one in the folder, else ``None``."""
        opened = list(self._sources.values())
        named = [one for one in opened if self.folders.roots == (one.source.path,)]
        return next(iter(named or (opened if len(opened) == 1 else [])), None)

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the first page, the newest first; without those that are not read after `LINES_S`.

        The watcher reads the rest, and announces them.
        """
        deadline = time.monotonic() + LINES_S
        unread = [key for key, opened in list(self._sources.items()) if not opened.line]
        for key in sorted(unread, key=self._changed_at, reverse=True):
            if time.monotonic() > deadline:
                break
            if (opened := self._sources.get(key)) is not None:
                self._refresh(key, opened)
        return [{**opened.line, "index": opened.index_progress()} for opened in self.newest_first() if opened.line]

    @property
    def unread(self) -> int:
        """Number of sources without a line yet."""
        return sum(not opened.line for opened in list(self._sources.values()))

    def _changed_at(self, key: str) -> int:
        return max((state[1] for state in self._seen.get(key, {}).values() if state is not None), default=0)

    def search(self) -> bool:
        """Search for new and removed sources; return True if there are any."""
        with self._searching:
            found = {source.key: source for source in self.folders.discover()}
            known = {key: opened.source for key, opened in self._sources.items()}
            if found == known:
                return False
            kept = {key: opened for key, opened in self._sources.items() if found.get(key) == known[key]}
            removed = [opened for key, opened in self._sources.items() if key not in kept]
            self._sources = {key: kept.get(key) or self._open(source) for key, source in found.items()}
        for opened in removed:
            opened.close()
        return True

    def _open(self, source: SourceFolder) -> OpenedSource:
        opened = OpenedSource(self.folders, source, self._builder)
        self._seen[source.key] = _states_of(opened)  # before any page reads the files
        return opened

    def _watch(self) -> None:
        searched = time.monotonic()
        while not self._closing.wait(POLL_S):
            try:
                if time.monotonic() - searched >= SEARCH_EVERY_S:
                    searched = time.monotonic()
                    if self.search():
                        self._publish("sources", "", {})
                for key, opened in list(self._sources.items()):
                    if self._closing.is_set():
                        return
                    self._look_at(key, opened)
            except Exception:  # a boundary: files may vanish or be damaged in any way
                _log.warning("the opened folders cannot be watched", exc_info=True)

    def _look_at(self, key: str, opened: OpenedSource) -> None:
        found, before = _states_of(opened), self._seen[key]
        self._seen[key] = found
        changed = {path for path in found if found[path] != before.get(path)}
        is_old = time.monotonic() - self._read_at.get(key, 0.0) > STATE_EVERY_S
        if changed or not opened.line or (is_old and opened.line.get("state") not in _OVER):
            self._read_at[key] = time.monotonic()
            self._refresh(key, opened)
        if opened.source.run.metrics_file in changed:
            self._publish("metrics", key, {"step": opened.line.get("step")})
        if opened.source.path / STATUS_FILE in changed:
            status = self.folders.read_status(opened.source)
            self._publish("status", key, {name: getattr(status, name, None) for name in _SHOWN})
        if opened.index.opened.is_set() and any(_is_of_store(path, opened) for path in changed):
            opened.want_index()

    def _refresh(self, key: str, opened: OpenedSource) -> None:
        before = dict(opened.line)
        try:
            after = opened.refresh()
        except (AgentRLError, OSError) as error:
            after = opened.line = opened.failed_line(str(error))
        if {**before, "index": None} != {**after, "index": None}:
            self._publish("sources", key, {"state": after["state"], "step": after["step"]})

    def _on_index(self, index: StoreIndex) -> None:
        progress = index.progress
        self._publish("index", index.key, {"done_bytes": progress.done, "total_bytes": progress.total})
        self._publish("episodes", index.key, {"revision": index.revision})


def _is_of_store(path: Path, opened: OpenedSource) -> bool:
    store = opened.source.store
    return path == store or path.parent == store


def _states_of(opened: OpenedSource) -> dict[Path, tuple[int, int] | None]:
    """Return the size and the time of change of each watched file of a source."""
    return {path: _state_of(path) for path in opened.watched_files()}


def _state_of(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        state = path.stat()
        return state.st_size, state.st_mtime_ns
    return None


def open_library(folders: Sequence[Path], publish: Publish) -> Library:
    """Open folders.

    Raises:
        UsageError: a folder does not exist.
    """
    return Library(OpenedFolders(folders), publish)
