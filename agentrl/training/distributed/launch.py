"""Launcher of the processes of ranks 1, 2, …, which also watches and stops them.

A rank exits after `shutdown`, when this process exits, or when it is killed.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from agentrl.errors import ConfigError, RankLost, TrainingError
from agentrl.models.cores import divide_cores, pinned_thread
from agentrl.sandbox.orphan_guard import without_mark
from agentrl.training.distributed.group import Ranks, join, leave

RANK_START_S = 300.0
HUNG_COLLECTIVE_S = 30.0
"""Seconds after the loss of a rank until this process exits by force, if it still hangs in a collective."""
RANK_POLL_S = 0.05
RANK_STOPPED_S = 10.0
"""Seconds after which a rank whose process a signal has stopped counts as lost."""
EXPLAIN_S = 5.0
"""Seconds that a failed call waits for the end of a process that may have caused the failure."""


class StartedRanks(ABC):
    """Base class of the ranks that rank 0 has started.

    Args:
        count: Number of ranks, including this one.
        logs: Folder of the ranks' logs, ``rank-1.log`` and so on.
        on_loss: Function that a thread calls once, if a rank has ended unexpectedly.
        host: Address of this process that the ranks can reach.
    """

    explain_s = EXPLAIN_S

    def __init__(
        self, count: int, *, logs: Path, on_loss: Callable[[TrainingError], None] = lambda _: None, host: str
    ) -> None:
        self.count = count
        self._logs, self._on_loss, self._host = logs, on_loss, host
        self._lost: TrainingError | None = None
        self._closing = threading.Event()

    @abstractmethod
    def _start_rank(self, rank: int, port: int) -> None:
        """Start a rank that joins the others at a port of this process."""

    @abstractmethod
    def _loss(self) -> TrainingError | None:
        """Describe a rank that has ended unexpectedly; ``None`` while all run."""

    @abstractmethod
    def _kill(self) -> None:
        """Kill all remaining ranks, without waiting."""

    @abstractmethod
    def close(self, *, at_once: bool) -> None:
        """Wait for ranks that were shut down, unless `at_once`, and kill the remaining ones; idempotent."""

    def start(self) -> Ranks:
        """Start the ranks, and join them.

        Raises:
            TrainingError: a rank has ended, or did not start in time.
        """
        patience = timedelta(seconds=RANK_START_S)
        store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=patience)
        self._logs.mkdir(parents=True, exist_ok=True)
        others = range(1, self.count)
        for rank in others:
            self._start_rank(rank, store.port)
        began = time.monotonic()
        while not store.check([_there(rank) for rank in others]):
            if (lost := self.find_lost()) is not None:
                raise lost
            if time.monotonic() - began > RANK_START_S:
                raise TrainingError(
                    "the ranks of the trainer did not start",
                    got=f"{RANK_START_S:g} s",
                    hint=f"see their logs: {self._logs}",
                )
            time.sleep(RANK_POLL_S)
        ranks = join(store, rank=0, count=self.count, explain=self.explain)
        threading.Thread(target=self._watch, args=(ranks,), name="ranks", daemon=True).start()
        return ranks

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.log"

    def find_lost(self) -> TrainingError | None:
        """Return the error of the first rank that has ended unexpectedly, if any."""
        if self._lost is None and not self._closing.is_set():
            self._lost = self._loss()
        return self._lost

    def explain(self) -> TrainingError | None:
        """Find the rank that made a call fail: one that ends within `explain_s` seconds, or one that is stopped."""
        began = time.monotonic()
        while (lost := self.find_lost()) is None and time.monotonic() - began < self.explain_s:
            time.sleep(RANK_POLL_S)
        return lost or self._find_stopped()

    def _find_stopped(self, after_s: float = 0.0) -> TrainingError | None:
        """Describe a rank whose process has been stopped for `after_s` seconds; ``None`` if this is not known."""
        return None

    def _watch(self, ranks: Ranks) -> None:
        while not self._closing.wait(RANK_POLL_S):
            if (lost := self.find_lost()) is not None:
                self._kill()
                ranks.connections.shut_down()  # a rank on a machine that hangs cannot be killed
                self._on_loss(lost)
                if not self._closing.wait(HUNG_COLLECTIVE_S):
                    sys.stderr.write(f"{lost}\nthe run hangs in a collective and is killed\n")
                    sys.stderr.flush()
                    os._exit(1)
                return

    def expect_end(self) -> None:
        """Stop treating a rank's exit as a loss."""
        self._closing.set()


def join_store(host: str, port: int, *, rank: int, count: int) -> Ranks:
    """Join the others, as a rank that was started."""
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=RANK_START_S))
    store.set(_there(rank), "there")
    return join(store, rank=rank, count=count)


def _there(rank: int) -> str:
    """Return the store's key that a rank sets after its start."""
    return f"rank-{rank}"


PROGRAM = "agentrl.builders.workers"
START = """
import ctypes, os, runpy, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL: also before and while torch is imported
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
runpy.run_module(sys.argv[2], run_name="__main__", alter_sys=True)
"""
"""Program that runs a module, and that the kernel kills when the thread that started it ends."""
HOST = "127.0.0.1"
STORE_VARIABLE = "AGENTRL_RANK_STORE"
"""Environment variable with the port of this machine where a started rank joins the others."""
RANK_END_S = 10.0
LOG_CHARACTERS = 4000
"""Maximum number of characters from the end of a lost rank's log in its error."""


class RankProcesses(StartedRanks):
    """Processes of all other ranks, on this machine; see `StartedRanks`.

    Args:
        cpus: Cores of all ranks, which share them in equal parts; any by default.
    """

    def __init__(
        self,
        count: int,
        *,
        logs: Path,
        on_loss: Callable[[TrainingError], None] = lambda _: None,
        cpus: Sequence[int] | None = None,
    ) -> None:
        super().__init__(count, logs=logs, on_loss=on_loss, host=HOST)
        self._cores = divide_cores(cpus, count)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._starts: dict[int, int] = {}
        self._stopped: dict[int, float] = {}
        """Times at which ranks were first seen stopped."""
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="ranks")
        """Thread that starts the ranks and outlives them: the kernel kills the ranks when it ends."""

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def _start_rank(self, rank: int, port: int) -> None:
        log = self._log(rank)
        threads = len(self._cores[rank]) or max(1, (os.cpu_count() or 1) // self.count)
        environment = {
            **without_mark(os.environ),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.count),
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "10000"),  # as on the command line
            STORE_VARIABLE: str(port),
        }
        with log.open("ab") as output:
            self._starts[rank] = output.tell()
            self._processes[rank] = self._starter.submit(self._run_on_cores, rank, output, environment).result()

    def _run_on_cores(self, rank: int, output: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with pinned_thread(self._cores[rank]):
            return subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(os.getpid()), PROGRAM],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C goes to the run, which shuts down its ranks
            )

    def _loss(self) -> TrainingError | None:
        ended = {rank: process.returncode for rank, process in self._processes.items() if process.poll() is not None}
        if not ended:
            return self._find_stopped(RANK_STOPPED_S)
        # a killed rank makes other ranks fail, so a signal is more likely to be the cause than an exit code
        rank = min(ended, key=lambda number: (ended[number] > 0, number))
        output = self._read_log(rank)
        kind = RankLost if ended[rank] < 0 else TrainingError
        return kind(
            f"rank {rank} of the trainer ended (process {self._processes[rank].pid})",
            got=_cause(ended[rank]) + (f", with the output:\n{output}" if output else ""),
            hint=f"see its log: {self._log(rank)}; resume the run from its newest checkpoint with --resume",
        )

    def _find_stopped(self, after_s: float = 0.0) -> TrainingError | None:
        now = time.monotonic()
        for rank, process in self._processes.items():
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state not in "Tt" or (state == "t" and after_s):  # a debugger may take its time
                    self._stopped.pop(rank, None)
                elif now - self._stopped.setdefault(rank, now) >= after_s:
                    return RankLost(
                        f"rank {rank} of the trainer does not answer (process {process.pid})",
                        got="a process that a signal or a debugger has stopped",
                        hint="resume the run from its newest checkpoint with --resume",
                    )
        return None

    def _read_log(self, rank: int) -> str:
        with self._log(rank).open("rb") as log:
            log.seek(self._starts[rank])
            return log.read().decode("utf-8", errors="replace").strip()[-LOG_CHARACTERS:]

    def _kill(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)

    def close(self, *, at_once: bool) -> None:
        """Wait for ranks that were shut down, unless `at_once`, and kill the remaining ones; idempotent."""
        self._closing.set()
        until = time.monotonic() + (0.0 if at_once else RANK_END_S)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.0))
        self._kill()
        for process in self._processes.values():
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._starter.shutdown()


@contextmanager
def open_ranks(
    count: int,
    *,
    logs: Path,
    on_loss: Callable[[TrainingError], None] = lambda _: None,
    starter: Callable[..., StartedRanks] = RankProcesses,
) -> Iterator[Ranks]:
    """Open the ranks of a run: only this process, those of its launcher (torchrun), or new ones from `starter`.

    New ranks log to the folder `logs`; a thread calls `on_loss` if one ends unexpectedly.

    Raises:
        ConfigError: a launcher has started another number of processes.
        TrainingError: a rank does not start.
    """
    launched = launched_ranks()
    if launched > 1 and count not in (1, launched):
        raise ConfigError(
            "trainer.processes differs from the number of launched processes",
            got=count,
            expected=f"{launched}, or no trainer.processes",
        )
    if launched > 1:
        with _shut_down_after(join(None, rank=0, count=launched), None) as ranks:
            yield ranks
    elif count == 1:
        yield Ranks()
    else:
        processes = starter(count, logs=logs, on_loss=on_loss)
        try:
            with _shut_down_after(processes.start(), processes) as ranks:
                yield ranks
        finally:
            processes.close(at_once=True)


@contextmanager
def _shut_down_after(ranks: Ranks, processes: StartedRanks | None) -> Iterator[Ranks]:
    try:
        yield ranks
        if processes is not None:
            processes.expect_end()
        ranks.shutdown()
        if processes is not None:
            processes.close(at_once=False)
    finally:
        leave()


def launched_ranks() -> int:
    """Return the number of processes that torchrun has started; 0 if it has not started this one."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def join_starter() -> Ranks:
    """Join the others, as a process that `RankProcesses` has started."""
    port = int(os.environ[STORE_VARIABLE])
    return join_store(HOST, port, rank=int(os.environ["RANK"]), count=int(os.environ["WORLD_SIZE"]))


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    names: Sequence[str] = [member.name for member in signal.Signals if member == -code]
    return f"signal {-code} ({names[0] if names else 'unknown'})"
