"""Ranks 1, 2, … that rank 0 has started: met, watched, and never left behind, wherever they run.

When one ends by itself the others are killed at once, so that nobody waits for it in a collective for long, and this
process gets `GRACE_S` to notice; one that hangs on a GPU never would, and is ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from agentrl.errors import TrainingError
from agentrl.training.ranks.group import Ranks, join

START_S = 300.0
"""Seconds in which all ranks must have imported their libraries."""
GRACE_S = 30.0
"""Seconds after the loss of a rank in which this process must have noticed."""
POLL_S = 0.05
EXPLAIN_S = 5.0
"""How long a failed call waits for the process that may have caused it to be gone."""


class StartedRanks(ABC):
    """All ranks but this one.

    Args:
        count: Ranks, this one included.
        logs: Folder of their logs, ``rank-1.log`` and so on.
        on_loss: Called from a thread, once, when one has ended by itself.
        host: Address of this process under which they reach it.

    Attributes:
        explain_s: How long a failed call waits for the end of the rank that may have caused it.
    """

    explain_s = EXPLAIN_S

    def __init__(
        self, count: int, *, logs: Path, on_loss: Callable[[TrainingError], None] = lambda _: None, host: str
    ) -> None:
        self.count = count
        self._logs, self._on_loss, self._host = logs, on_loss, host
        self._lost: TrainingError | None = None
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)

    @abstractmethod
    def _start_rank(self, rank: int, port: int) -> None:
        """Let a rank start, to meet the others at a port of this process."""

    @abstractmethod
    def _loss(self) -> TrainingError | None:
        """Which rank has ended by itself, and what is known of that; ``None`` while all run."""

    @abstractmethod
    def _kill(self) -> None:
        """Kill all that are left, without waiting."""

    @abstractmethod
    def close(self, *, at_once: bool) -> None:
        """Wait for ranks that were dismissed, and kill what is left; idempotent.

        Args:
            at_once: Kill them without waiting.
        """

    def start(self) -> Ranks:
        """Start them, and meet them.

        Raises:
            TrainingError: one ended, or was not there in time.
        """
        patience = timedelta(seconds=START_S)
        store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=patience)
        self._logs.mkdir(parents=True, exist_ok=True)
        others = range(1, self.count)
        for rank in others:
            self._start_rank(rank, store.port)
        began = time.monotonic()
        while not store.check([_there(rank) for rank in others]):
            if (lost := self.lost()) is not None:
                raise lost
            if time.monotonic() - began > START_S:
                raise TrainingError(
                    "the ranks of the trainer did not start", got=f"{START_S:g} s", hint=f"their logs: {self._logs}"
                )
            time.sleep(POLL_S)
        ranks = join(store, rank=0, count=self.count, explain=self.explain)
        self._watcher.start()
        return ranks

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.log"

    def lost(self) -> TrainingError | None:
        """Which rank has ended by itself, and what it said; always the first one that was found."""
        if self._lost is None and not self._closing.is_set():
            self._lost = self._loss()
        return self._lost

    def explain(self) -> TrainingError | None:
        """Why a call has failed, if a rank was lost."""
        began = time.monotonic()
        while (lost := self.lost()) is None and time.monotonic() - began < self.explain_s:
            time.sleep(POLL_S)
        return lost

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            if (lost := self.lost()) is not None:
                self._kill()
                self._on_loss(lost)
                if not self._closing.wait(GRACE_S):
                    sys.stderr.write(f"{lost}\nthe run hangs in a collective, and is ended\n")
                    sys.stderr.flush()
                    os._exit(1)
                return

    def expect_end(self) -> None:
        """From now on a rank that ends is not lost."""
        self._closing.set()


def meet(host: str, port: int, *, rank: int, count: int) -> Ranks:
    """Meet the others, as a rank that was started."""
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=START_S))
    store.set(_there(rank), "there")
    return join(store, rank=rank, count=count)


def _there(rank: int) -> str:
    """The key under which a rank says that it is there."""
    return f"rank-{rank}"
