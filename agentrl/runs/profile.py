"""Profile of some training steps: torch operations, CPU time per turn by component, and the lag of the event loop.

A sampling thread reads the stack of the event loop's thread. A sample counts for the innermost agentrl module on its
stack, so that a library's time belongs to the part that called it. Samples in which the event loop waits count as idle.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from agentrl.observe.progress import RunStatus, RunWatcher
from agentrl.runs.rl import train
from agentrl.runs.start import Run
from agentrl.training.diagnostics.torch_profile import OperationTime, TorchProfile

SAMPLE_S = 0.005
"""Seconds between two samples of the event loop's thread."""
LAG_S = 0.02
"""Seconds between two measurements of the event loop's lag."""
TRACE_FILE = "profile.trace.json"
COMPONENTS: Mapping[str, str] = {
    "agentrl.rollout": "runtime",
    "agentrl.agent_loops": "agent loop",
    "agentrl.render": "rendering and parsing",
    "agentrl.engine": "engine",
    "agentrl.models": "model (engine or trainer)",
    "agentrl.serving": "engine",
    "agentrl.envs": "environment",
    "agentrl.env": "environment",
    "agentrl.remote": "environment",
    "agentrl.tools": "tools",
    "agentrl.tool": "tools",
    "agentrl.sandbox": "sandboxes",
    "agentrl.reward": "rewards",
    "agentrl.observe": "store and metrics",
    "agentrl.training": "trainer",
    "agentrl.algorithms": "trainer",
    "agentrl.weights": "weight sync",
    "agentrl.runs": "run",
    "agentrl.builders": "run",
}
"""Components by the longest matching prefix of a module."""
IDLE, OTHER = "idle", "event loop and others"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProfile:
    """Profile of the steps `first` to `last`."""

    first: int
    last: int
    seconds: float
    cpu_seconds: float
    """CPU seconds of the whole process."""
    turns: int
    components: Mapping[str, float]
    """Milliseconds of the event loop's thread per turn, by component; without idle time."""
    idle_share: float
    lag_ms: Mapping[str, float]
    """Lag of the event loop: ``p50``, ``p99`` and ``max``."""
    phases: Mapping[str, float]
    """Seconds of the phases of the steps: ``rollout``, ``train``, ``sync``, …"""
    operations: Sequence[OperationTime]
    """Torch's operations with the largest own time."""
    trace: Path

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**asdict(self), "trace": str(self.trace)}


class StackSampler(threading.Thread):
    """Daemon thread that samples which component another thread runs."""

    def __init__(self, thread: int) -> None:
        super().__init__(name="agentrl-profile", daemon=True)
        self.counts: Counter[str] = Counter()
        self._thread = thread
        self._over = threading.Event()

    def run(self) -> None:
        """Sample until `stop`."""
        while not self._over.wait(SAMPLE_S):
            frame = sys._current_frames().get(self._thread)
            if frame is not None:
                self.counts[component_of(frame)] += 1

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self.join()


def component_of(frame: FrameType) -> str:
    """Return the component that a stack runs, or `IDLE` if the event loop waits for events."""
    if frame.f_code.co_name in ("select", "poll") and frame.f_globals.get("__name__") == "selectors":
        return IDLE
    current: FrameType | None = frame
    while current is not None:
        module = current.f_globals.get("__name__", "")
        while module:
            if module in COMPONENTS:
                return COMPONENTS[module]
            module = module.rpartition(".")[0]
        current = current.f_back
    return OTHER


@dataclass(slots=True)
class _Lag:
    """Lags of an event loop, measured by a task."""

    seconds: list[float] = field(default_factory=list)

    async def measure(self) -> None:
        """Measure until cancelled."""
        while True:
            began = time.perf_counter()
            await asyncio.sleep(LAG_S)
            self.seconds.append(max(0.0, time.perf_counter() - began - LAG_S))


class Profiler(RunWatcher):
    """Watcher of a run that profiles some of its steps."""

    def __init__(self, watcher: RunWatcher, *, first: int, last: int) -> None:
        self.profile: RunProfile | None = None
        self._watcher, self._first, self._last = watcher, first, last
        self._lines: list[Mapping[str, float]] = []

    def on_start(self, folder: Path, status: RunStatus) -> None:
        """Pass the event on, and begin if the first step is profiled."""
        self._folder = folder
        self._watcher.on_start(folder, status)
        if self._first == 1:
            self._begin()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Begin after the step before the first one, and end after the last one."""
        self._watcher.on_step(step, metrics)
        if self._first <= step <= self._last:
            self._lines.append(metrics)
        if step == self._first - 1:
            self._begin()
        elif step == self._last:
            self._end()

    def _begin(self) -> None:
        self._sampler, self._lag = StackSampler(threading.get_ident()), _Lag()
        self._measuring = asyncio.get_running_loop().create_task(self._lag.measure())
        self._torch = TorchProfile()
        self._sampler.start()
        self._began, self._cpu_before = time.perf_counter(), time.process_time()

    def _end(self) -> None:
        seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu_before
        self._sampler.stop()
        self._measuring.cancel()
        trace = self._folder / TRACE_FILE
        operations = self._torch.stop(trace)
        turns = round(sum(line.get("turns/mean", 0.0) * line["episodes"] for line in self._lines))
        counts = self._sampler.counts
        sampled = max(1, counts.total())
        per_sample = 1000 * seconds / sampled / max(1, turns)
        lags = 1000 * np.array(self._lag.seconds or [0.0])
        self.profile = RunProfile(
            first=self._first,
            last=self._last,
            seconds=seconds,
            cpu_seconds=cpu,
            turns=turns,
            components={name: count * per_sample for name, count in counts.most_common() if name != IDLE},
            idle_share=counts[IDLE] / sampled,
            lag_ms={"p50": float(np.median(lags)), "p99": float(np.percentile(lags, 99)), "max": float(lags.max())},
            phases=_phases(self._lines),
            operations=operations,
            trace=trace,
        )

    def on_status(self, status: RunStatus) -> None:
        """Pass the event on."""
        self._watcher.on_status(status)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the event on."""
        self._watcher.on_evaluation(step, metrics)

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Pass the event on."""
        self._watcher.on_checkpoint(step, folder)

    def on_message(self, text: str) -> None:
        """Pass the event on."""
        self._watcher.on_message(text)


def _phases(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = ("rollout", "train", "sync", "evaluate")
    sums = {name: sum(line.get(f"time/{name}_s", 0.0) for line in lines) for name in names}
    return {name: seconds for name, seconds in sums.items() if seconds}


def profile_run(run: Run, *, first: int, last: int, watcher: RunWatcher) -> RunProfile | None:
    """Train a run, and return the profile of the steps `first` to `last`; ``None`` if it was stopped before."""
    profiler = Profiler(watcher, first=first, last=last)
    train(run, watcher=profiler)
    return profiler.profile
