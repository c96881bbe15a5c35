"""Rules about resources: open files, threads, processes, memory, and the time of resets and steps."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.env import AsyncEnv, Isolation
from agentrl.models.memory import resident_bytes
from agentrl.task import Task
from agentrl.testing.env_session import EnvSession, play, random_policy
from agentrl.testing.env_subject import Subject, until
from agentrl.testing.fair_clock import FairClock
from agentrl.testing.report import CheckFinding, RuleFailed, RuleSkipped, RuleWarned, rule

_RELEASE_S = 2.0
"""Seconds to wait for the end of threads and processes, and for objects to be freed."""
_OPEN_FILES = Path("/proc/self/fd"), Path("/dev/fd")
_TASKS = Path("/proc/self/task")


class OpenResources(NamedTuple):
    """Numbers of open resources; 0 if the system does not report them."""

    open_files: int
    threads: int
    processes: int

    def over(self, before: OpenResources) -> str:
        """Describe the resources that have increased; empty if none have."""
        extra = [now - then for now, then in zip(self, before, strict=True)]
        names = (name.replace("_", " ") for name in self._fields)
        return ", ".join(f"{count} {name}" for count, name in zip(extra, names, strict=True) if count > 0)


def count_resources() -> OpenResources:
    """Count the open resources of this process."""
    folder = next((path for path in _OPEN_FILES if path.is_dir()), None)
    return OpenResources(
        open_files=len(os.listdir(folder)) if folder else 0,
        threads=threading.active_count(),
        processes=sum(len(path.read_text().split()) for path in _TASKS.glob("*/children")),
    )


def settled_resources() -> OpenResources:
    """Count the open resources once their numbers no longer change; threads of earlier episodes may still be ending."""
    clock, now = FairClock(), count_resources()
    while clock.tick() < _RELEASE_S:
        time.sleep(0.02)
        last, now = now, count_resources()
        if now == last:
            break
    return now


def await_resources(before: OpenResources) -> OpenResources:
    """Count the open resources; repeat until there are no more than before, or until the timeout."""
    clock = FairClock()
    now = count_resources()
    while now.over(before) and clock.tick() < _RELEASE_S:
        time.sleep(0.02)
        now = count_resources()
    return now


MIN_EPISODES = 32
"""Minimum number of episodes; with fewer, one-time allocations look like a leak."""
SLACK_BYTES = 4096
"""Growth that does not count as a leak: tables grow in steps."""
SLACK_BYTES_PER_EPISODE = 64
"""Growth per episode that does not count as a leak: 64 MB in a million episodes."""
SLACK_RESIDENT_BYTES = 32 << 20
_STEPS = 10
_WARM_ROUNDS = 2
"""Number of rounds after which caches are mostly filled."""
_DOUBTS = 4
"""Number of repeated measurements before growth counts as a leak: caches that fill late stop growing."""


@rule("close files, threads and processes in `close`, even without a reset; keep no list of instances")
def releases_everything(subject: Subject) -> str:
    """After `close` at any time no open file, thread or child process is left, and the object is freed."""
    lives = (None, 2, subject.limit)
    for steps in lives:  # resources that all environments of a process share are made once
        _live(subject, steps)
    with _new_garbage_only():
        before = settled_resources()
        references = [_live(subject, steps) for steps in lives]
        gc.collect()
    if more := await_resources(before).over(before):
        raise RuleFailed(f"left after close of {len(lives)} environments: {more}")
    if kept := _await_freed(references):
        raise RuleFailed(f"{kept} of {len(lives)} closed environments are still in memory: something references them")
    return f"nothing left of {len(lives)} environments"


def _await_freed(references: Sequence[weakref.ref[Any] | None]) -> int:
    """Count the objects that are still in memory; repeat until none is, or until the timeout.

    The thread of the last call refers to it for a moment after it has returned.
    """
    clock = FairClock()
    while kept := sum(reference is not None and reference() is not None for reference in references):
        if clock.tick() >= _RELEASE_S:
            break
        time.sleep(0.02)
    return kept


def _live(subject: Subject, steps: int | None) -> weakref.ref[Any] | None:
    """Make an environment, play `steps` steps (``None``: not even a reset), and close it; return a reference to it."""
    task = subject.tasks[0]
    with subject.session() as session:
        if steps is not None:
            play(session, task, random_policy(task.seed), steps)
        bare = getattr(session.env, "unwrapped", session.env)
        return weakref.ref(bare) if hasattr(bare, "__weakref__") else None


class _Reading(NamedTuple):
    """Memory in use, in bytes."""

    allocated: int
    """Memory of Python's allocator."""
    resident: int
    """Resident memory of the process."""


@rule("release the data of an episode in `reset`; limit the size of caches")
def keeps_memory_constant(subject: Subject) -> CheckFinding:
    """Memory does not grow when the first steps of the same episodes are repeated, up to 1,000 times in total."""
    limit = min(subject.limit, _STEPS)
    with subject.session() as session:
        scripts = [(task, play(session, task, random_policy(task.seed), limit).actions) for task in subject.tasks]
    with _new_garbage_only(), _tracing(), subject.session() as session:
        for _ in range(_WARM_ROUNDS):
            _round(session, scripts)
        readings = [_read()]
        rounds = _rounds_in_time(session, scripts, subject)
        if (episodes := 2 * rounds * len(scripts)) < MIN_EPISODES:
            raise RuleSkipped(f"only {episodes} episodes in the available time")
        readings.append(_read())
        for _ in range(1 + _DOUBTS):
            for _ in range(rounds):
                _round(session, scripts)
            readings.append(_read())
            suspicion = _suspicion(readings[-3:], episodes)
            if suspicion is None:
                break
    if suspicion is not None:
        raise suspicion
    grown = readings[-1].allocated - readings[-3].allocated
    figures = {"episodes": float(episodes), "growth_bytes": float(grown)}
    return CheckFinding(f"{grown:+,} bytes over {episodes:,} episodes", figures)


def _rounds_in_time(session: EnvSession, scripts: Sequence[tuple[Task, Sequence[str]]], subject: Subject) -> int:
    """Play rounds for half of the available time, and return their number."""
    rounds, most = 0, max(1, subject.effort.growth_episodes // len(scripts) // 2)
    end = time.perf_counter() + subject.effort.growth_s / 2
    while rounds < most and (rounds == 0 or time.perf_counter() < end):
        _round(session, scripts)
        rounds += 1
    return rounds


def _suspicion(readings: Sequence[_Reading], episodes: int) -> RuleFailed | RuleWarned | None:
    """Describe a suspected leak (memory grew in both halves of the measurement); return ``None`` if there is none."""
    start, middle, end = readings
    allocated, resident = end.allocated - start.allocated, end.resident - start.resident
    halves = middle.allocated - start.allocated, end.allocated - middle.allocated
    if min(halves) > max(SLACK_BYTES, SLACK_BYTES_PER_EPISODE * episodes // 2):
        return RuleFailed(f"memory grows by {allocated / episodes:,.0f} bytes per episode, over {episodes:,} episodes")
    if min(middle.resident - start.resident, end.resident - middle.resident) > SLACK_RESIDENT_BYTES / 2:
        return RuleWarned(
            f"the process grew by {resident >> 20} MiB over {episodes:,} episodes, outside Python's memory"
        )
    return None


def _round(session: EnvSession, scripts: Sequence[tuple[Task, Sequence[str]]]) -> None:
    for task, actions in scripts:
        session.reset(task)
        for action in actions:
            session.step(action)


def _read() -> _Reading:
    gc.collect()
    _clear_method_cache()
    return _Reading(allocated=tracemalloc.get_traced_memory()[0], resident=resident_bytes())


def _clear_method_cache() -> None:
    """Clear the interpreter's method cache, which keeps up to 4,096 names of attribute look-ups.

    ``finditer`` and ``getattr`` with new strings fill it slowly, which looks like a leak.
    """
    clear = getattr(sys, "_clear_internal_caches", None) or getattr(sys, "_clear_type_cache", None)
    if clear is not None:
        clear()


@contextmanager
def _new_garbage_only() -> Iterator[None]:
    """Exclude existing objects from garbage collections, which are slow in a process with large libraries."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _tracing() -> Iterator[None]:
    """Trace allocations unless they are already traced."""
    if tracemalloc.is_tracing():
        yield
        return
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


INLINE_STEP_MS = 2.0
"""Maximum median milliseconds of a step for an environment that runs in the event loop."""
_EPISODES = 1000
_TIMED_STEPS = 20


@rule("state `isolation=Isolation.THREAD` or `PROCESS`, or make steps faster")
def steps_are_fast_enough(subject: Subject) -> CheckFinding:
    """An environment that runs in the event loop has steps that take far less time than a model's turn."""
    resets: list[float] = []
    steps: list[float] = []
    with subject.session() as session:
        for number in until(subject.effort.timed_s, range(min(len(subject.source), _EPISODES))):
            _time(session, subject, number, resets, steps)
    figures = {
        "reset_p50_ms": quantile(resets, 0.5),
        "reset_p99_ms": quantile(resets, 0.99),
        "step_p50_ms": quantile(steps, 0.5),
        "step_p99_ms": quantile(steps, 0.99),
    }
    middle = figures["step_p50_ms"]
    is_inline = subject.spec.isolation_under(subject.options) is Isolation.INLINE
    if is_inline and not isinstance(session.env, AsyncEnv) and middle > INLINE_STEP_MS:
        raise RuleFailed(f"a step takes {middle:.2f} ms: declare isolation THREAD or PROCESS")
    parts = [
        f"{what} p50 {figures[f'{what}_p50_ms']:.3g} ms, p99 {figures[f'{what}_p99_ms']:.3g} ms of {len(times):,}"
        for what, times in (("reset", resets), ("step", steps))
    ]
    return CheckFinding("; ".join(parts), figures)


def quantile(times: list[float], share: float) -> float:
    """Return the quantile of the times for a share between 0 and 1."""
    return sorted(times)[min(int(share * len(times)), len(times) - 1)]


def _time(session: EnvSession, subject: Subject, number: int, resets: list[float], steps: list[float]) -> None:
    """Add the times in milliseconds of a reset and of the first random steps, without the time of choosing actions."""
    task = subject.source[number]
    policy = random_policy(task.seed)
    start = time.perf_counter()
    session.reset(task)
    resets.append(1000 * (time.perf_counter() - start))
    for _ in range(min(subject.limit, _TIMED_STEPS)):
        action = policy(session, "")
        start = time.perf_counter()
        done = session.step(action).done
        steps.append(1000 * (time.perf_counter() - start))
        if done:
            break
