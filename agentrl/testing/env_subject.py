"""Subject of the environment check: the environment, the played tasks, and transcripts of their episodes."""

from __future__ import annotations

import base64
import enum
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agentrl.env import EnvironmentSpec
from agentrl.task import Task, TaskSource
from agentrl.testing.env_session import (
    LONG_CALL,
    CallFailed,
    EnvSession,
    PlayedEpisode,
    Policy,
    StepSnapshot,
    asking,
    expert_policy,
    play,
    random_policy,
    run_watched,
    watched_calls,
)
from agentrl.testing.report import RuleSkipped

_OUTPUT_BYTES = 200
"""Maximum number of bytes of standard output that are kept."""
SIDE_BY_SIDE = 4
"""Number of concurrent episodes."""
SIDE_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SubprocessPlay:
    """Result of play in a new process."""

    moments: Sequence[StepSnapshot] = ()
    output: str = ""
    """Beginning of the process's standard output."""
    unknown: str = ""
    """Reason why the process cannot make the environment; empty if it can."""
    failure: str = ""
    """Exception of the environment; empty without one."""
    end: str = ""
    """End of the process by the environment, or the call that did not return."""


def transcript(
    make: Callable[..., Any], options: Mapping[str, Any], tasks: Sequence[Task], steps: int
) -> list[StepSnapshot]:
    """Record random play of tasks, one after another in one environment."""
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
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with tempfile.TemporaryFile() as requests, tempfile.TemporaryFile() as errors:
        requests.write(request)
        requests.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import main; main()"],
            stdin=requests,
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
    detail = f": {reason[0]}" if reason else ""
    return SubprocessPlay(end=f"the environment ended its process (exit code {child.returncode}){detail}")


def main() -> None:
    """Answer the request on standard input with a line of JSON, and exit even if threads still run."""
    answer = os.dup(1)
    with tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 1)
        limit, request = (base64.b64decode(line) for line in sys.stdin.buffer.read().splitlines())
        limit_s, tasks, steps = pickle.loads(limit)
        try:
            found = run_watched(lambda: _play_requested(request, tasks, steps), limit_s)
        except CallFailed as failed:
            found = {"end": str(failed)}
        except KeyboardInterrupt:
            os._exit(1)
        with suppress(ValueError):  # the environment may have closed standard output
            sys.stdout.flush()
        found["output"] = os.pread(output.fileno(), _OUTPUT_BYTES, 0).decode(errors="replace")
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


def process_settings() -> dict[str, object]:
    """Return settings that all threads of this process share; those of PyTorch have defaults if it is not imported."""
    torch = sys.modules.get("torch")
    return {
        "the current folder": os.getcwd(),
        "logging.disable": logging.root.manager.disable,
        "torch.set_default_dtype": str(torch.get_default_dtype()) if torch else "torch.float32",
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled() if torch else False,
    }


class CheckDepth(enum.StrEnum):
    """Amount of play in a check."""

    QUICK = "quick"
    """One or two seconds for a fast environment, for tests."""
    FULL = "full"
    """Up to a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Numbers of a `CheckDepth`; the defaults are those of a full check. Fields in seconds are time limits."""

    split_tasks: int = 100_000
    """Maximum number of tasks per split that are compared with those of other splits."""
    split_s: float = 3.0
    openings: int = 200
    """Maximum number of tasks whose openings are compared with each other and with those of other splits."""
    openings_s: float = 3.0
    scored: int = 200
    """Maximum number of episodes for a score."""
    scored_s: float = 5.0
    lazy_s: float = 2.0
    """Seconds of play by each policy that does no work."""
    timed_s: float = 3.0
    """Seconds of timed play."""
    growth_episodes: int = 1000
    """Maximum number of episodes over which memory is measured."""
    growth_s: float = 15.0
    call_s: float = 30.0
    """Deadline of a call of the environment."""


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


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Environment and tasks under check; episodes that several rules use are played once."""

    spec: EnvironmentSpec
    options: Mapping[str, Any]
    split: str
    source: TaskSource
    """All tasks of the split."""
    tasks: Sequence[Task]
    """Played tasks; at least one."""
    limit: int
    """Maximum number of steps of an episode."""
    effort: Effort
    plays_elsewhere: bool
    """True if a rule needs play in a new process; it comes first, because the environment may end its process."""
    settings: Mapping[str, object] = field(default_factory=process_settings)
    """Settings of this process before any play."""

    @contextmanager
    def session(self) -> Iterator[EnvSession]:
        """Make a session with a new environment, and close it at the end."""
        session = EnvSession(lambda **options: self.spec.make_under(options), self.options)
        try:
            yield session
        finally:
            session.close()

    def play(self, policy_of: Callable[[Task], Policy], tasks: Iterable[Task] | None = None) -> list[PlayedEpisode]:
        """Play an episode of each task in one environment; of given `tasks`, as many as time allows."""
        with self.session() as session:
            if tasks is None:
                return [play(session, task, policy_of(task), self.limit) for task in self.tasks]
            timed = until(self.effort.scored_s, tasks)
            return [play(session, task, policy_of(task), self.limit) for task in timed]

    @cached_property
    def random_episodes(self) -> list[PlayedEpisode]:
        """Episodes of the random policy, one per task."""
        return self.play(lambda task: random_policy(task.seed))

    @cached_property
    def expert_episodes(self) -> list[PlayedEpisode]:
        """Episodes of the expert, one per task.

        Raises:
            RuleSkipped: the environment has no expert.
        """
        with self.session() as session:
            if session.find("expert") is None:
                raise RuleSkipped("no expert()")
        return self.play(lambda _task: expert_policy())

    @cached_property
    def tool_episodes(self) -> list[PlayedEpisode]:
        """Episodes of the expert through the environment's tools, as in a run; `expert_episodes` without tools.

        Raises:
            RuleSkipped: the environment has no expert.
        """
        if not self.has_tool_messages:
            return self.expert_episodes
        return self.play(lambda _task: expert_policy(through_tools=True))

    @cached_property
    def has_tool_messages(self) -> bool:
        """True if the expert can act through the environment's tools."""
        with self.session() as session:
            return session.find("tool_message") is not None

    @cached_property
    def transcript(self) -> list[StepSnapshot]:
        """Record of random play of all tasks, one after another."""
        return transcript(self.spec.make, self.options, self.tasks, self.limit)

    @cached_property
    def elsewhere(self) -> SubprocessPlay:
        """Record of the same play in a new process."""
        return transcript_of_new_process(self.spec.make, self.options, self.tasks, self.limit)

    @cached_property
    def single_episodes(self) -> list[PlayedEpisode]:
        """Episodes of the first random steps of some tasks, each in its own environment."""
        episodes = []
        for task in self.tasks[:SIDE_BY_SIDE]:
            with self.session() as session:
                episodes.append(play(session, task, random_policy(task.seed), min(self.limit, SIDE_STEPS)))
        return episodes


def until(seconds: float, items: Iterable[Any]) -> Iterator[Any]:
    """Yield items until the time is over; at least one."""
    end = time.perf_counter() + seconds
    for item in items:
        yield item
        if time.perf_counter() > end:
            return
