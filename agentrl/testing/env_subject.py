"""Subject of the environment check: the environment, the tasks that are played, and transcripts of their episodes."""

from __future__ import annotations

import base64
import enum
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentrl.env import EnvironmentSpec
from agentrl.task import Task, TaskSource
from agentrl.testing.env_session import (
    LONG_CALL,
    CallFailed,
    EnvSession,
    Played,
    Policy,
    StepSnapshot,
    asking,
    expert_policy,
    play,
    random_policy,
    run_watched,
    watched_calls,
)
from agentrl.testing.report import Missing

_SAID = 200
"""Bytes of the standard output that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubprocessPlay:
    """Result of playing in a new process."""

    moments: Sequence[StepSnapshot] = ()
    said: str = ""
    """The beginning of what was written to standard output there."""
    unknown: str = ""
    """Why the process does not know the environment."""
    failure: str = ""
    """What the environment raised there."""
    end: str = ""
    """How it ended the process, or which call did not return."""


def transcript(
    make: Callable[..., Any], options: Mapping[str, Any], tasks: Sequence[Task], steps: int
) -> list[StepSnapshot]:
    """Record what random play of some tasks shows, one after the other in one environment."""
    return _play_all(EnvSession(make, options), tasks, steps)


def _play_all(session: EnvSession, tasks: Sequence[Task], steps: int) -> list[StepSnapshot]:
    try:
        return [
            moment for task in tasks for moment in play(session, task, random_policy(task.seed), limit=steps).moments
        ]
    finally:
        session.close()


def transcript_of_new_process(
    make: Callable[..., Any], options: Mapping[str, Any], tasks: Sequence[Task], steps: int
) -> SubprocessPlay:
    """Make the `transcript` in a new Python process with another hash seed."""
    calls = watched_calls()
    try:
        request = base64.b64encode(pickle.dumps((calls.limit_s, list(tasks), steps))) + b"\n"
        request += base64.b64encode(pickle.dumps((make, dict(options))))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return SubprocessPlay(unknown=f"the environment cannot be sent to a new process: {error}")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as errors:
        asked.write(request)
        asked.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": path},
        )
        calls.processes.append(child)
        with child:
            answer = b"" if child.stdout is None else child.stdout.readline()
        if answer:
            found = json.loads(answer)
            return SubprocessPlay(**found | {"moments": [StepSnapshot(*row) for row in found.get("moments", ())]})
        errors.seek(0)
        reason = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    said = f": {reason[0]}" if reason else ""
    return SubprocessPlay(end=f"the environment ended the process that played it (exit code {child.returncode}){said}")


def main() -> None:
    """Answer the request on standard input with a line of JSON, and exit, whatever threads there are."""
    answer = os.dup(1)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 1)
        limit, request = (base64.b64decode(line) for line in sys.stdin.buffer.read().splitlines())
        limit_s, tasks, steps = pickle.loads(limit)
        try:
            found = run_watched(lambda: _play_requested(request, tasks, steps), limit_s)
        except CallFailed as failed:
            found = {"end": str(failed)}
        except KeyboardInterrupt:
            os._exit(1)
        with suppress(ValueError):  # the environment may have closed it
            sys.stdout.flush()
        found["said"] = os.pread(said.fileno(), _SAID, 0).decode(errors="replace")
    with os.fdopen(answer, "w") as stream:
        stream.write(f"{json.dumps(found)}\n")
    os._exit(0)


def _play_requested(request: bytes, tasks: Sequence[Task], steps: int) -> dict[str, Any]:
    session = None
    try:
        with asking("importing the environment", times=LONG_CALL):
            make, options = pickle.loads(request)
        session = EnvSession(make, options)
        return {"moments": _play_all(session, tasks, steps)}
    except CallFailed:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return {"failure": reason} if session else {"unknown": f"a new process cannot make the environment: {reason}"}


class CheckDepth(enum.StrEnum):
    """Amount of play."""

    QUICK = "quick"
    """A second or two for a fast environment: for tests."""
    FULL = "full"
    """Up to a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Numbers behind a thoroughness; the defaults are those of a full check. Seconds end what would take longer."""

    split_tasks: int = 100_000
    """Tasks per split that are compared with those of other splits."""
    split_s: float = 3.0
    openings: int = 200
    """Tasks whose openings are compared with each other, and with those of other splits."""
    openings_s: float = 3.0
    scored: int = 200
    """Episodes of a score."""
    scored_s: float = 5.0
    lazy_s: float = 2.0
    """Seconds of play by each policy that does no work."""
    timed_s: float = 3.0
    """Seconds of timed play."""
    growth_episodes: int = 1000
    """Episodes over which memory is watched."""
    growth_s: float = 15.0
    call_s: float = 30.0
    """Seconds within which a call of the environment must return."""


EFFORTS: Mapping[CheckDepth, Effort] = {
    CheckDepth.QUICK: Effort(
        split_tasks=300,
        split_s=0.2,
        openings=16,
        openings_s=0.2,
        scored=0,
        scored_s=0.0,
        lazy_s=0.1,
        timed_s=0.1,
        growth_s=0.2,
        call_s=10.0,
    ),
    CheckDepth.FULL: Effort(),
}
SIDE_BY_SIDE = 4
"""Episodes that are played at the same time."""
SIDE_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Environment and tasks under check. What several rules look at is played once."""

    spec: EnvironmentSpec
    options: Mapping[str, Any]
    split: str
    source: TaskSource
    """All tasks of the split."""
    tasks: Sequence[Task]
    """Those that are played; at least one."""
    limit: int
    """Steps after which play stops."""
    effort: Effort
    plays_elsewhere: bool
    """Whether a rule needs the play of a new process; that plays first, because the environment may end it."""

    @contextmanager
    def session(self) -> Iterator[EnvSession]:
        """A new environment, closed at the end."""
        session = EnvSession(self.spec.make, self.options)
        try:
            yield session
        finally:
            session.close()

    def play(self, policy_of: Callable[[Task], Policy], tasks: Iterable[Task] | None = None) -> list[Played]:
        """An episode of each task, in one environment; of `tasks` that are given, as many as time allows."""
        with self.session() as session:
            if tasks is None:
                return [play(session, task, policy_of(task), self.limit) for task in self.tasks]
            timed = until(self.effort.scored_s, tasks)
            return [play(session, task, policy_of(task), self.limit) for task in timed]

    @cached_property
    def random_episodes(self) -> list[Played]:
        """An episode of each task by the random policy."""
        return self.play(lambda task: random_policy(task.seed))

    @cached_property
    def expert_episodes(self) -> list[Played]:
        """An episode of each task by the expert.

        Raises:
            Missing: there is none.
        """
        with self.session() as session:
            if session.find("expert") is None:
                raise Missing("no expert()")
        return self.play(lambda _task: expert_policy())

    @cached_property
    def transcript(self) -> list[StepSnapshot]:
        """Record what random play of the tasks shows, one after the other."""
        return transcript(self.spec.make, self.options, self.tasks, self.limit)

    @cached_property
    def elsewhere(self) -> SubprocessPlay:
        """Record what the same play shows in a new process."""
        return transcript_of_new_process(self.spec.make, self.options, self.tasks, self.limit)

    @cached_property
    def alone(self) -> list[Played]:
        """The first random steps of some tasks, each in an environment of its own."""
        episodes = []
        for task in self.tasks[:SIDE_BY_SIDE]:
            with self.session() as session:
                episodes.append(play(session, task, random_policy(task.seed), min(self.limit, SIDE_STEPS)))
        return episodes


def until(seconds: float, items: Iterable[Any]) -> Iterator[Any]:
    """The items that can be had within some seconds; at least one."""
    end = time.perf_counter() + seconds
    for item in items:
        yield item
        if time.perf_counter() > end:
            return
