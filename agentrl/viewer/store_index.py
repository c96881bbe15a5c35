"""Indexes of the opened stores: one thread builds and updates them; any thread reads the part built so far.

    request or watcher ──want──▶ IndexBuilder (one thread, latest request first, one chunk at a time)
                                     │ writes .index.sqlite, then raises `revision`
    request ──reader()──▶ TrajectoryIndex that only reads, from a small pool

No request waits for a build: a page requested meanwhile shows the episodes found so far, and the progress.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agentrl.errors import AgentRLError, UsageError
from agentrl.observe.trajectory_index import DecodeTokens, TrajectoryIndex

_log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_READERS = 2
"""Maximum number of open readers of one index."""
MAX_CACHED = 32
"""Maximum number of cached results of one index."""
TURN_S = 0.5
"""Seconds after which the builder switches to another waiting index."""
MAX_OPEN = 2
"""Maximum number of indexes that the builder keeps open."""


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """Progress of a scan."""

    done: int = 0
    """Scanned bytes."""
    total: int = 0
    """Bytes of the store."""

    @property
    def is_complete(self) -> bool:
        """True if the whole store is scanned."""
        return self.done >= self.total


class _Preempted(Exception):
    """Interruption of an update, between two chunks."""


class StoreIndex:
    """Index of one store, as the requests use it.

    Args:
        key: Key of the source.
        check: Returns the path of the store after a check of its files; raises a `UsageError`.
        decode: Decodes token ids, to search the text of episodes that were stored without messages.
    """

    def __init__(self, key: str, check: Callable[[], Path], *, decode: DecodeTokens | None) -> None:
        self.key = key
        self.check = check
        self.decode = decode
        self.splits: dict[str, str] = {}
        """Splits by the name of their environment; may be added later."""
        self.progress = IndexProgress()
        self.revision = 0
        """Number of changes of the index since it was opened."""
        self.place: Path | None = None
        """File of the index, once it is open."""
        self.problem: AgentRLError | None = None
        """Reason why the latest update failed."""
        self.opened = threading.Event()
        """Set once the index can be read, or has failed."""
        self.scanned = threading.Event()
        """Set after the first complete scan of the store, or after its failure."""
        self.distrusted: set[int] = set()
        """Steps to scan again, because their files have changed unnoticed."""
        self._readers: list[tuple[tuple[int, int], TrajectoryIndex]] = []
        self._cached: OrderedDict[Hashable, tuple[int, object]] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False

    @contextlib.contextmanager
    def reader(self) -> Iterator[TrajectoryIndex]:
        """Lend an index that only reads.

        Raises:
            UsageError: there is no index, because the store is missing or cannot be read.
        """
        if self.place is None:
            raise self.problem or UsageError("the index is not open yet", hint="try again")
        with self._lock:
            identity, index = self._readers.pop() if self._readers else ((0, 0), None)
        if index is not None and identity != _identity(self.place):  # the run or the index was replaced
            index.close()
            index = None
        if index is None:
            identity = _identity(self.place)
            index = TrajectoryIndex(
                self.check(), splits=self.splits, decode=self.decode, is_updated=False, built_at=self.place
            )
        try:
            index.update()  # finds the files
            yield index
        except BaseException:
            index.close()
            raise
        with self._lock:
            if len(self._readers) < MAX_READERS and not self._is_closed:
                self._readers.append((identity, index))
                return
        index.close()

    def get_or_make(self, key: Hashable, make: Callable[[TrajectoryIndex], T]) -> T:
        """Return the result of `make`, cached by key until the index changes."""
        revision = self.revision
        with self._lock:
            kept = self._cached.get(key)
        if kept is not None and kept[0] == revision:
            return kept[1]  # type: ignore[return-value]
        with self.reader() as index:
            made = make(index)
        with self._lock:
            self._cached[key] = (revision, made)
            self._cached.move_to_end(key)
            if len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        return made

    def close(self) -> None:
        """Close the idle readers; readers in use are closed when they are returned."""
        with self._lock:
            self._is_closed = True
            readers, self._readers = self._readers, []
            self._cached.clear()
        for _, index in readers:
            index.close()


def _identity(place: Path) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        state = os.stat(place)
        return state.st_dev, state.st_ino
    return (0, 0)


class IndexBuilder:
    """Thread that opens and updates indexes, the most recently requested first.

    Args:
        on_change: Called in the thread after each chunk and after each update with changes.
    """

    def __init__(self, on_change: Callable[[StoreIndex], None]) -> None:
        self._on_change = on_change
        self._wanted: OrderedDict[StoreIndex, None] = OrderedDict()
        self._open: OrderedDict[StoreIndex, TrajectoryIndex] = OrderedDict()
        self._condition = threading.Condition()
        self._is_closing = False
        self._spare = tempfile.TemporaryDirectory(prefix="agentrl-view-")
        self._thread = threading.Thread(target=self._work, name="agentrl-index", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def want(self, index: StoreIndex) -> None:
        """Update an index as soon as possible."""
        with self._condition:
            self._wanted[index] = None
            self._wanted.move_to_end(index)
            self._condition.notify()

    def close(self) -> None:
        """Stop after the current chunk, and close all indexes."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._spare.cleanup()

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._wanted or self._is_closing)
                if self._is_closing:
                    break
                store, _ = self._wanted.popitem()
            try:
                self._update(store)
            except _Preempted:
                with self._condition:
                    self._wanted[store] = None
                    self._wanted.move_to_end(store, last=False)
            except Exception as error:  # a boundary: the store may be damaged or vanish in any way
                self._fail(store, error)
        for index in self._open.values():
            index.close()

    def _update(self, store: StoreIndex) -> None:
        index = self._open_index(store)
        for step in store.distrusted:
            index.distrust(step)
        store.distrusted.clear()
        began, problem = time.monotonic(), store.problem

        def advance(done: int, total: int) -> None:
            store.progress = IndexProgress(done, total)
            store.revision += 1
            store.place = index.place
            store.opened.set()
            self._on_change(store)
            with self._condition:
                is_late = bool(self._wanted) and time.monotonic() - began > TURN_S
                if self._is_closing or is_late:
                    raise _Preempted

        index.update(advance)
        store.progress = IndexProgress(store.progress.total, store.progress.total)  # an unfinished line may be left
        store.problem = None
        store.scanned.set()
        if problem is not None or not store.opened.is_set():
            store.revision += 1
            store.place = index.place
            store.opened.set()
            self._on_change(store)

    def _open_index(self, store: StoreIndex) -> TrajectoryIndex:
        path = store.check()
        index = self._open.pop(store, None)
        if index is None:
            spare = Path(self._spare.name) / f"{store.key}.sqlite"
            index = TrajectoryIndex(path, splits=store.splits, is_updated=False, spare=spare)
            store.place = index.place
            size = sum(file.stat().st_size for file in path.glob("*.jsonl")) if path.is_dir() else path.stat().st_size
            store.progress = IndexProgress(min(store.progress.done, size), size)
        self._open[store] = index
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)[1].close()
        return index

    def _fail(self, store: StoreIndex, error: Exception) -> None:
        if not isinstance(error, AgentRLError):
            _log.warning("the index of %s cannot be updated: %s: %s", store.key, type(error).__name__, error)
        if (index := self._open.pop(store, None)) is not None:
            index.close()
        store.problem = error if isinstance(error, AgentRLError) else UsageError("the store cannot be read", got=error)
        store.revision += 1
        store.opened.set()
        store.scanned.set()
        self._on_change(store)
