"""Speed and memory of every installed environment, in one process on one core, for the tables of the documentation.

agentrl bench environments --json docs/environments/figures.json
"""

from __future__ import annotations

import gc
import platform
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.env.lookup import resolve_environment
from agentrl.errors import AgentRLError
from agentrl.registry import Kind, names
from agentrl.task import Task
from agentrl.testing.env_rules.resources import quantile
from agentrl.testing.env_session import EnvSession, Policy, expert_policy, play, random_policy
from agentrl.testing.env_subject import until

EPISODES = 40
"""Number of tasks whose episodes are recorded and replayed."""
RECORDING_S = 30.0
ROUNDS = 5
"""Number of rounds, of which the fastest is reported."""
RESETS = 200
INSTANCES = 20
LIMIT = 100

Script = tuple[Task, Sequence[str]]


def run() -> dict[str, Any]:
    """Return figures per environment, and the conditions of the measurement."""
    return {
        "conditions": {
            "processor": _processor(),
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        },
        "environments": {name: _measure_or_explain(name) for name in names(Kind.ENVIRONMENT)},
    }


def _measure_or_explain(name: str) -> dict[str, Any]:
    """Return figures, or the reason why the environment cannot be measured."""
    try:
        return {figure: float(f"{value:.4g}") for figure, value in _measure(name).items()}
    except AgentRLError as error:
        return {"not_measured": error.what}


def _measure(name: str) -> dict[str, float]:
    spec = resolve_environment(name)
    source = spec.tasks(spec.splits[0], **spec.options)
    limit = spec.max_turns or LIMIT
    start = time.process_time()
    session = EnvSession(spec.make, spec.options)
    tasks = [source[number] for number in range(min(EPISODES, len(source)))]
    session.reset(tasks[0])
    figures = {"first_reset_s": time.process_time() - start}
    scripts = {"random": _record(session, tasks, random_policy(0), limit)}
    if session.find("expert") is not None:
        scripts["expert"] = [
            script for task in until(RECORDING_S, tasks) for script in _record(session, [task], expert_policy(), limit)
        ]
    resets = [_seconds_of_reset(session, source[number]) for number in range(min(RESETS, len(source)))]
    for policy, recorded in scripts.items():
        figures[f"{policy}_steps_per_s"] = max(_steps_per_second(session, recorded) for _ in range(ROUNDS))
    figures |= {"reset_p50_ms": 1000 * quantile(resets, 0.5), "reset_p99_ms": 1000 * quantile(resets, 0.99)}
    session.close()
    return {**figures, "bytes_per_instance": _bytes_per_instance(spec.make, spec.options, tasks)}


def _record(session: EnvSession, tasks: Sequence[Task], policy: Policy, limit: int) -> list[Script]:
    return [(task, play(session, task, policy, limit).actions) for task in tasks]


def _seconds_of_reset(session: EnvSession, task: Task) -> float:
    start = time.process_time()
    session.reset(task)
    return time.process_time() - start


def _steps_per_second(session: EnvSession, scripts: Sequence[Script]) -> float:
    """Return steps per CPU second, without resets."""
    seconds, steps = 0.0, 0
    for task, actions in scripts:
        session.reset(task)
        start = time.process_time()
        for action in actions:
            session.step(action)
        seconds += time.process_time() - start
        steps += len(actions)
    return steps / seconds


def _bytes_per_instance(make: Any, options: Mapping[str, Any], tasks: Sequence[Task]) -> float:
    """Return the Python memory of an additional environment during an episode."""
    gc.collect()
    tracemalloc.start()
    sessions = [EnvSession(make, options) for _ in range(INSTANCES)]
    for number, session in enumerate(sessions):
        session.reset(tasks[number % len(tasks)])
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for session in sessions:
        session.close()
    return used / len(sessions)


def _processor() -> str:
    """Return the name of the processor, if the system reports it."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.is_file() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    for name, figures in run()["environments"].items():
        print(name, figures)
