"""Run under fault injection: start, faults, resumes, and end.

    start or resume the run ─► wait for some events ─► inject a fault ─► (resume, if the run has ended) ─► … ─►
    stop the run, resume it for its last steps, and check every episode

A run is *hung* if neither its episodes nor its steps make progress for `Patience.stall_s`, if it does not end in time
after a signal, or if it leaves processes behind. Its end is *unclear* if it fails on its own without an error message,
or with a traceback.
"""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import orjson

from agentrl.config.load import dump_config, load_config
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.files import numbered_records
from agentrl.observe.run_folder import RunDirectory
from agentrl.sandbox.orphan_guard import marked_processes
from agentrl.testing.chaos.check import check_run
from agentrl.testing.chaos.damage import Damage, damage_files
from agentrl.testing.chaos.plan import FILES, MAX_EVENTS, PlannedFault, Target, plan_faults
from agentrl.testing.chaos.processes import MARK, PAUSE_S, find_processes, kill_left, send, wait_until
from agentrl.testing.chaos.result import CampaignResult, FaultRecord
from agentrl.testing.chaos.scenarios import COMMON, LIMITS, WORKER_PROCESSES, Scenario
from agentrl.testing.chaos.servers import FaultyProxy, FaultyServer, start_engine_server, start_environment_server
from agentrl.testing.chaos.world import Ledger

UNEXPECTED = "unexpected error: run the command again"
"""Text that follows the message of an unexpected exception."""
TRACEBACK = "Traceback (most recent call last)"
PER_RUN = 10
"""Faults in one run."""
LEFT_OUTPUT_S = 5.0
"""Seconds to wait for the last output of an ended process; others may hold its pipe open."""
LAST_STEPS = 2
"""Steps of a run after its last fault."""
MAX_RESUMES = 3
"""Number of consecutive errors without progress after which a run counts as not resumable."""
_PROGRESS = re.compile(
    r"step \d+/|run /|saved /|measure it|read it|report: |resume with|\w+, step \d+|kept \d+|[\d,]+ steps of "
)
"""Pattern of output lines that only report progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Time limits of a run."""

    stall_s: float = 120.0
    """Seconds without progress after which a run is hung."""
    factor: float = 1.0
    """Factor by which a busy machine scales the limits below."""
    end_s: float = 20.0
    """Seconds within which a run must end after Ctrl-C or SIGTERM, and its remaining processes after its end."""
    end_twice_s: float = 5.0
    """Seconds within which a run must end after a second Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignSettings:
    """Settings of a campaign."""

    folder: Path
    """Empty folder for runs, ledgers and outputs."""
    seed: int = 0
    words: Sequence[str] = ()
    """User's config and overrides, in addition to the defaults of this package."""
    config: str | list[str] | None = None
    environment: str | None = None
    """Environment that replaces the default one."""
    model: str | None = None
    """Model that replaces the default one, which is small and has random weights."""
    patience: Patience = field(default_factory=Patience)
    per_run: int = PER_RUN
    most_events: int = MAX_EVENTS
    """Maximum number of events of the environments between two faults."""
    program: Sequence[str] = (sys.executable, "-m", "agentrl.testing.chaos.program")
    """Command line of the program under test; its arguments are an inbox, a ledger and a command."""


class _LedgerCounts:
    """Counts of the events of a growing ledger."""

    def __init__(self, path: Path) -> None:
        self.events = self.faults = 0
        self._path, self._position = path, 0

    def read(self) -> _LedgerCounts:
        """Count the events added since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            *lines, rest = file.read().split(b"\n")
            self._position = file.tell() - len(rest)
        self.events += len(lines)
        self.faults += sum(b'"event": "fault"' in line for line in lines)
        return self


class DisturbedRun:
    """A run, its processes and its ledger."""

    def __init__(
        self,
        settings: CampaignSettings,
        scenario: Scenario,
        number: int,
        model: str,
        result: CampaignResult,
        began: float,
        say: Callable[[str], None],
    ) -> None:
        self.name = f"{number:02d}-{scenario.name}"
        self.folder = settings.folder / self.name
        self.folder.mkdir(parents=True)
        self.ledger_file, self.inbox = self.folder / "ledger.jsonl", self.folder / "inbox"
        self.inbox.mkdir()
        self.ledger_file.touch()
        self._ledger = _LedgerCounts(self.ledger_file)
        self.run = RunDirectory(self.folder / "run")
        self._settings, self._scenario, self._result, self._began, self._say = settings, scenario, result, began, say
        self._patience = settings.patience
        self._damage = Damage()
        self._process: subprocess.Popen[bytes] | None = None
        self._output: Path | None = None
        self._starts = 0
        self._read_from = 0
        self._latest: FaultRecord | None = None
        self._server: FaultyServer | None = None
        self._proxy: FaultyProxy | None = None
        self._config = self._prepare(model)

    def _prepare(self, model: str) -> Path:
        """Start the server, if the scenario has one, and write the config."""
        env_file = self.folder / "recorded.py"
        env_file.write_text(
            "from agentrl.testing.chaos.world import record_environment\n\n"
            f"SPEC = record_environment({self._settings.environment!r}, ledger={str(self.ledger_file)!r})\n"
        )
        environment, settings = f"{env_file}:SPEC", self._scenario
        overrides = [*settings.overrides, *LIMITS]
        if settings.serves_environment:
            self._server = start_environment_server(environment, self.folder / "server")
            environment = self._connect()
        else:
            overrides += WORKER_PROCESSES
            if Target.SERVER in settings.ways:
                self._server = start_engine_server(settings.name.partition("-")[0], model, self.folder / "server")
                overrides.append(f"engine.servers=[{self._connect()}]")
        witness = f"agentrl.testing.chaos.witness:record_trained: {{ledger: {str(self.ledger_file)!r}}}"
        fixed = [f"run.directory={self.folder}", "run.name=run", f"run.seed={self._settings.seed}"]
        base = load_config(
            self._settings.config,
            [
                f"environment={environment}",
                f"model={model}",
                *(() if self._settings.config else COMMON),
                *overrides,
                *self._settings.words,
                *fixed,
                f"algorithm.shaping={{{witness}}}",
            ],
        )
        self._group_size, self._batch = base.algorithm.group_size, base.trainer.tasks_per_step
        self._max_staleness = base.rollout.max_staleness
        file = self.folder / "config.yaml"
        file.write_text(dump_config(base))
        return file

    def _connect(self) -> str:
        assert self._server is not None
        ledger = Ledger(self.ledger_file)
        self._proxy = FaultyProxy(
            self._server.url, note=lambda way: ledger.append("fault", target=Target.ANSWER, way=way)
        )
        return self._proxy.url

    def play(self, count: int) -> int:
        """Inject `count` faults, finish the run, and check it; return the number of faults that happened."""
        plan = plan_faults(
            f"{self._settings.seed}/{self.name}", self._scenario.ways, most_events=self._settings.most_events
        )
        injected = failures = 0
        while injected < count and failures <= MAX_RESUMES:
            fault, before = next(plan), self._signature()
            if self._reach(fault):
                failures = 0
                injected += self._inject(fault)
            elif self._signature() == before:
                failures += 1
        if failures > MAX_RESUMES:
            self._result.unclear.append(f"{self.name}: it cannot be resumed: {self._first_message()}")
        self._settle()
        if self._finish():
            self._check()
        return injected

    def _reach(self, fault: PlannedFault) -> bool:
        """Wait until a fault is due in a running process; return False if the process ended or hung first."""
        if self._process is None:
            self._start()
        wanted = self._ledger.read().events + fault.after_events
        if not self._wait(lambda: self._ledger.read().events >= wanted):
            return False
        time.sleep(fault.delay_s)
        if fault.way.endswith("while it saves"):
            self._wait(lambda: any(self.run.checkpoints.glob(".partial-*")), poll_s=0.001)
        return self._is_running()

    def _start(self, *words: str) -> None:
        for file in self.inbox.glob("*"):
            file.unlink()
        if self._server is not None:
            self._server.unpause()
        is_new = not self.run.config_file.is_file()
        words = (str(self._config), *words) if is_new else ("--resume", str(self.run.path), *words)
        self._starts += 1
        self._output, self._read_from = self.folder / f"output-{self._starts:03d}", 0
        self._process = subprocess.Popen(
            [*self._settings.program, str(self.inbox), str(self.ledger_file), "train", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # a full disk must not hide the run's output
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._copying = threading.Thread(target=_copy, args=(self._process.stdout, self._output), daemon=True)
        self._copying.start()

    @property
    def _mark(self) -> str:
        return f"{self.name}/{self._starts}/{os.getpid()}"

    def _wait(self, condition: Callable[[], bool], *, poll_s: float = 0.02) -> bool:
        """Wait for a condition; return False if the process ends first or makes no progress for `Patience.stall_s`."""
        seen, since = self._signature(), time.monotonic()
        while not condition():
            if not self._is_running():
                return condition()
            if (now := self._signature()) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self._patience.stall_s:
                self._hang(f"no progress for {self._patience.stall_s:g} s")
                self._stop("SIGINT", "SIGINT")
                return False
            time.sleep(poll_s)
        return True

    def _signature(self) -> tuple[int, ...]:
        files = (self.ledger_file, self.run.metrics_file)
        return tuple(file.stat().st_size if file.exists() else 0 for file in files)

    def _is_running(self) -> bool:
        """Return True while the process runs; otherwise record its end."""
        if self._process is None:
            return False
        if self._process.poll() is None:
            return True
        self._note_end("")
        return False

    def _inject(self, fault: PlannedFault) -> bool:
        """Inject a fault; return False if its target does not exist."""
        self._report_latest()
        now = round(time.monotonic() - self._began, 1)
        record = self._latest = FaultRecord(run=self.name, target=fault.target, way=fault.way, time_s=now)
        if self._output is not None and self._output.exists():
            self._read_from = self._output.stat().st_size
        detail = self._apply(fault)
        if detail is None:
            self._latest = None
            return False
        record.detail = detail
        self._result.faults.append(record)
        if self._process is None and fault.target not in FILES:  # a resumed run reports the damaged file
            self._report_latest()
        return True

    def _apply(self, fault: PlannedFault) -> str | None:
        """Apply a fault; return its target, or ``None`` if the target does not exist."""
        assert self._process is not None
        rng = random.Random(fault.draw)
        match fault.target:
            case Target.TRAINER:
                return self._hit_trainer(fault.way)
            case Target.WORKER | Target.SUPERVISOR | Target.RANK:
                found = find_processes(fault.target, self._mark, self._process.pid)
                if not found:
                    return None
                send(fault.way, pid := rng.choice(found))
                return f"process {pid}"
            case Target.SERVER:
                assert self._server is not None
                return self._server.hit(fault.way)
            case Target.CONNECTION:
                assert self._proxy is not None
                self._proxy.inject(fault)
                return ""
            case Target.DISK if fault.way == "full":
                _, hard = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (1, hard))
                self._wait(lambda: False)
                return ""
            case Target.STORE | Target.METRICS | Target.CHECKPOINT:
                self._kill()
                return damage_files(fault, self.run, self._damage) or None
            case Target.ANSWER if self._proxy is not None:
                self._proxy.inject(fault)
                return self._await_effect()
            case _:
                return self._send_to_program(fault)

    def _send_to_program(self, fault: PlannedFault) -> str | None:
        file = self.inbox / "fault.json"
        partial = file.with_suffix(".partial")
        partial.write_bytes(orjson.dumps(fault))
        partial.rename(file)
        return self._await_effect()

    def _await_effect(self) -> str | None:
        """Wait until a fault in the process or proxy has taken effect; return ``None`` if the process ended first."""
        before = self._ledger.read().faults
        return "" if self._wait(lambda: self._ledger.read().faults > before) else None

    def _hit_trainer(self, way: str) -> str:
        match way:
            case "SIGSTOP":
                send(way, self._pid)
                time.sleep(PAUSE_S)
                self._kill()
            case "SIGSTOP, SIGCONT":
                send(way, self._pid)
            case "SIGINT" | "SIGTERM":
                self._stop(way)
            case "SIGINT twice":
                self._stop("SIGINT", "SIGINT")
            case _:
                self._kill()
        return ""

    @property
    def _pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _kill(self) -> None:
        if self._process is not None:
            send("SIGKILL", self._pid)
            self._process.wait()
            self._note_end("SIGKILL")

    def _stop(self, *signals: str) -> None:
        """Send the process one or two signals and wait for its end; kill it if it misses the deadline."""
        assert self._process is not None
        for number, way in enumerate(signals):
            if number:
                time.sleep(0.5)
            send(way, self._pid)
        limit_s = self._patience.end_s if len(signals) == 1 else self._patience.end_twice_s
        try:
            self._process.wait(limit_s * self._patience.factor)
        except subprocess.TimeoutExpired:
            self._hang(f"it did not end in {limit_s * self._patience.factor:g} s after {' and '.join(signals)}")
            self._kill()
            return
        self._note_end(" and ".join(signals))

    def _note_end(self, signals: str) -> None:
        """Record how the process ended, and check that none of its child processes are left.

        Args:
            signals: Names of the signals that were sent to end it; empty if it ended on its own.
        """
        assert self._process is not None
        code, mark = self._process.returncode, self._mark
        self._process = None
        self._copying.join(LEFT_OUTPUT_S)
        said, text = self._first_message(), self._text()
        if signals != "SIGKILL" and not is_clear_end(code, signals, text):
            self._result.unclear.append(f"{self.name}, output {self._starts}: exit code {code}: {said}")
        if self._latest is not None:
            self._latest.ended = self._latest.ended or ("SIGKILL" if signals == "SIGKILL" else f"exit code {code}")
            self._latest.said = said
        limit_s = self._patience.end_s * self._patience.factor
        if not wait_until(lambda: not marked_processes(mark, MARK), limit_s):
            left = kill_left([mark])
            self._hang(f"{len(left)} processes are left {limit_s:g} s after its end: {left[0][:200]}")

    def _hang(self, what: str) -> None:
        fault = "" if self._latest is None else f" after {self._latest.target}: {self._latest.way}"
        self._result.hung.append(f"{self.name}, output {self._starts}: {what}{fault}; it said: {self._first_message()}")

    def _report_latest(self) -> None:
        """Complete the record of the latest fault, and report it."""
        record, self._latest = self._latest, None
        if record is not None:
            record.ended = record.ended or "went on"
            record.said = record.said or self._first_message()
            self._say(str(record))

    def _settle(self) -> None:
        """Stop the process after its last fault, if it still runs."""
        if self._process is not None and self._is_running():
            self._wait_for_steps(1)
        if self._latest is None or self._latest.target not in FILES:  # the last process reports the damaged file
            self._report_latest()
        if self._process is not None and self._is_running():
            self._stop("SIGINT")

    def _wait_for_steps(self, count: int) -> None:
        wanted = len(self._steps()) + count
        self._wait(lambda: len(self._steps()) >= wanted)

    def _finish(self) -> bool:
        """Resume the run for its last steps; return False if it cannot be finished."""
        for _ in range(MAX_RESUMES):
            saved = {checkpoint.step for checkpoint in Checkpoints(self.run.checkpoints, keep=1).present()}
            self._start(f"trainer.steps={max(self._steps() | saved, default=0) + LAST_STEPS}")
            process = self._process
            self._wait(lambda: False)
            self._report_latest()
            if process is not None and process.returncode == 0:
                return True
        self._result.unclear.append(f"{self.name}: it cannot be finished: {self._first_message()}")
        return False

    def _check(self) -> None:
        found = check_run(
            self.run.path,
            self.ledger_file,
            group_size=self._group_size,
            max_left_over=(self._max_staleness + 1) * self._batch if self._max_staleness else 0,
            damage=self._damage,
        )
        for finding in (*found.lost, *found.duplicated, *found.mislabelled):
            self._say(f"{self.name}: {finding}")
        row = {"name": self.name, "steps": max(self._steps(), default=0), "processes": self._starts}
        self._result.runs.append({**row, "episodes_trained": found.trained, "groups": dict(found.named)})
        self._result.account.add(found)
        self._say(f"{self.name}: {row['steps']} steps in {self._starts} processes, {found.trained} episodes trained")

    def _steps(self) -> set[int]:
        file = self.run.metrics_file
        lines = numbered_records(file, []) if file.exists() else ()
        return {line.record["step"] for line in lines if isinstance(line.record.get("step"), int)}

    def _text(self) -> str:
        """Return the output since the latest fault."""
        if self._output is None or not self._output.exists():
            return ""
        return self._output.read_bytes()[self._read_from :].decode(errors="replace")

    def _first_message(self) -> str:
        """Return the error in the output since the latest fault, or else the first line that is not a progress line."""
        lines = [line.strip() for line in self._text().splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return next(iter([*errors, *(line for line in lines if not _PROGRESS.match(line))]), "")[:300]

    def close(self) -> None:
        """End all processes of the run."""
        with suppress(ProcessLookupError):
            if self._process is not None:
                os.kill(self._pid, signal.SIGKILL)
                self._process.wait()
        kill_left(self._all_marks())
        if self._proxy is not None:
            self._proxy.close()
        if self._server is not None:
            self._server.close()

    def _all_marks(self) -> Iterator[str]:
        for number in range(1, self._starts + 1):
            yield f"{self.name}/{number}/{os.getpid()}"


def is_clear_end(code: int, signals: str, text: str) -> bool:
    """Return True if a process succeeded, was ended by signals, or ended with an error message in its output."""
    _, error, after = f"\n{text}".rpartition("\nerror: ")  # a traceback may quote it within a line
    has_message = (
        bool(error) and UNEXPECTED not in text and TRACEBACK not in after
    )  # a worker's traceback may come first
    # the second signal may arrive after Python has removed its handlers
    was_stopped = code == 130 or (" and " in signals and code in (-signal.SIGINT, -signal.SIGTERM))
    return code == 0 or (code in (1, 2) and has_message) or (bool(signals) and was_stopped and TRACEBACK not in text)


def _copy(source: IO[bytes], target: Path) -> None:
    with source, target.open("wb", buffering=0) as file:
        while part := os.read(source.fileno(), 1 << 16):
            file.write(part)
