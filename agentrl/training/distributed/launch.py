"""The processes of ranks 1, 2, …: started by this one, watched, and never left behind.

A rank ends on request, when its standard input closes because this process is gone, or when it is killed here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from agentrl.errors import ConfigError, TrainingError
from agentrl.training.distributed.group import Ranks, join, leave

START_S = 300.0
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
        """Find the rank that has ended by itself, and what is known of that; ``None`` while all run."""

    @abstractmethod
    def _kill(self) -> None:
        """Kill all that are left, without waiting."""

    @abstractmethod
    def close(self, *, at_once: bool) -> None:
        """Wait for ranks that were dismissed, unless `at_once`, and kill what is left; idempotent."""

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
        """Find the rank that has ended by itself, and what it said; always the first one that was found."""
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


PROGRAM = "agentrl.builders.workers"
HOST = "127.0.0.1"
STORE_VARIABLE = "AGENTRL_RANK_STORE"
"""Where a rank that was started here finds the others: a port of this machine."""
END_S = 10.0
SHOWN_CHARACTERS = 4000


class RankProcesses(StartedRanks):
    """The processes of all ranks but this one, on this machine; see `StartedRanks`."""

    def __init__(self, count: int, *, logs: Path, on_loss: Callable[[TrainingError], None] = lambda _: None) -> None:
        super().__init__(count, logs=logs, on_loss=on_loss, host=HOST)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._starts: dict[int, int] = {}

    @property
    def pids(self) -> dict[int, int]:
        """The processes by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def _start_rank(self, rank: int, port: int) -> None:
        log = self._log(rank)
        threads = max(1, (os.cpu_count() or 1) // self.count)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.count),
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "10000"),  # as the command line has it
            STORE_VARIABLE: str(port),
        }
        with log.open("ab") as output:
            self._starts[rank] = output.tell()
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the run, which tells its ranks
            )

    def _loss(self) -> TrainingError | None:
        ended = {rank: process.returncode for rank, process in self._processes.items() if process.poll() is not None}
        if not ended:
            return None
        # one that was killed makes others fail, too; and what a rank says of others says less than a signal
        rank = min(ended, key=lambda number: (ended[number] > 0, number))
        said = self._said(rank)
        return TrainingError(
            f"rank {rank} of the trainer ended (process {self._processes[rank].pid})",
            got=_cause(ended[rank]) + (f", after it said:\n{said}" if said else ""),
            hint=f"its whole log: {self._log(rank)}; go on from the newest checkpoint with agentrl train --resume",
        )

    def _said(self, rank: int) -> str:
        with self._log(rank).open("rb") as log:
            log.seek(self._starts[rank])
            return log.read().decode("utf-8", errors="replace").strip()[-SHOWN_CHARACTERS:]

    def _kill(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)

    def close(self, *, at_once: bool) -> None:
        """Wait for ranks that were dismissed, and kill what is left; idempotent."""
        self._closing.set()
        until = time.monotonic() + (0.0 if at_once else END_S)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.0))
        self._kill()
        for process in self._processes.values():
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


@contextmanager
def open_ranks(
    count: int,
    *,
    logs: Path,
    on_loss: Callable[[TrainingError], None] = lambda _: None,
    starter: Callable[..., StartedRanks] = RankProcesses,
) -> Iterator[Ranks]:
    """The ranks of a run: this process alone, those of the launcher that has started it (torchrun), or new ones.

    New ones are made by `starter`, log into a folder, and `on_loss` is called from a thread when one ends by itself.

    Raises:
        ConfigError: a launcher has started another number.
        TrainingError: one does not start.
    """
    launched = launched_ranks()
    if launched > 1 and count not in (1, launched):
        raise ConfigError(
            "trainer.processes is another number than that of the processes which were launched",
            got=count,
            expected=f"{launched}, or nothing",
        )
    if launched > 1:
        with _joined(join(None, rank=0, count=launched), None) as ranks:
            yield ranks
    elif count == 1:
        yield Ranks()
    else:
        processes = starter(count, logs=logs, on_loss=on_loss)
        try:
            with _joined(processes.start(), processes) as ranks:
                yield ranks
        finally:
            processes.close(at_once=True)


@contextmanager
def _joined(ranks: Ranks, processes: StartedRanks | None) -> Iterator[Ranks]:
    try:
        yield ranks
        if processes is not None:
            processes.expect_end()
        ranks.dismiss()
        if processes is not None:
            processes.close(at_once=False)
    finally:
        leave()


def launched_ranks() -> int:
    """Count the processes that torchrun has started; 0 where it has not started this one."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def meet_starter() -> Ranks:
    """Meet the others, as a process that `RankProcesses` has started."""
    port = int(os.environ[STORE_VARIABLE])
    return meet(HOST, port, rank=int(os.environ["RANK"]), count=int(os.environ["WORLD_SIZE"]))


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    names: Sequence[str] = [member.name for member in signal.Signals if member == -code]
    return f"signal {-code} ({names[0] if names else 'unknown'})"
