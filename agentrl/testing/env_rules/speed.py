"""How long resets and steps take."""

from __future__ import annotations

import time

from agentrl.env import Isolation
from agentrl.testing.env_session import EnvSession, random_policy
from agentrl.testing.env_subject import Broken, Finding, Subject, until

INLINE_STEP_MS = 2.0
"""Median milliseconds of a step from which an environment must not run inside the event loop."""
_EPISODES = 1000
_STEPS = 20


def is_as_fast_as_it_says(subject: Subject) -> Finding:
    """Inside the event loop only what takes far less than a model's turn may run."""
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
    if subject.spec.isolation_under(subject.options) is Isolation.INLINE and middle > INLINE_STEP_MS:
        raise Broken(f"a step takes {middle:.2f} ms: declare isolation THREAD or PROCESS")
    parts = [
        f"{what} p50 {figures[f'{what}_p50_ms']:.3g} ms, p99 {figures[f'{what}_p99_ms']:.3g} ms of {len(times):,}"
        for what, times in (("reset", resets), ("step", steps))
    ]
    return Finding(detail="; ".join(parts), figures=figures)


def quantile(times: list[float], share: float) -> float:
    """The time within which a share of them lies."""
    return sorted(times)[min(int(share * len(times)), len(times) - 1)]


def _time(session: EnvSession, subject: Subject, number: int, resets: list[float], steps: list[float]) -> None:
    """Milliseconds of a reset and of the first steps of random play; choosing the actions is not counted."""
    task = subject.source[number]
    policy = random_policy(task.seed)
    start = time.perf_counter()
    session.reset(task)
    resets.append(1000 * (time.perf_counter() - start))
    for _ in range(min(subject.limit, _STEPS)):
        action = policy(session, "")
        start = time.perf_counter()
        done = session.step(action).done
        steps.append(1000 * (time.perf_counter() - start))
        if done:
            break
