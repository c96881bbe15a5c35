"""Validation of an environment's tasks, one by one: each must be solvable, and not by doing nothing.

The solution of a task is the environment's expert or, without one, the task's `ground_truth` as the only answer.
"""

from __future__ import annotations

import enum
import math
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import AgentRLError, UsageError, described_error
from agentrl.errors.foreign import DaemonThreads
from agentrl.message import Content
from agentrl.task import Task
from agentrl.testing.env_check import ENDLESS
from agentrl.testing.env_session import (
    CallFailed,
    EnvSession,
    PlayedEpisode,
    Policy,
    StepSnapshot,
    expert_policy,
    play,
    run_watched,
    watched_calls,
)

CALL_S = 30.0
"""Default deadline in seconds of a call of the environment."""
_RESULT_POLL_S = 0.2
_SHOWN = 80
_THREADS = DaemonThreads("task validation")


class TaskStatus(enum.StrEnum):
    """Result of a task's validation."""

    VALID = "valid"
    INVALID = "invalid"
    UNKNOWN = "unknown"
    """The task has no solution to play, or the environment does not report success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskValidation:
    """Result of one task."""

    task_id: str
    status: TaskStatus
    problems: tuple[str, ...] = ()
    """Reasons why it is not valid."""
    remarks: tuple[str, ...] = ()
    """Differences that do not change the result."""
    type: str | None = None
    total: float | None = None
    """Return of the solution."""
    steps: int = 0
    """Number of steps of the solution."""
    seconds: float = 0.0

    def to_plain(self) -> dict[str, Any]:
        """Return the result in plain JSON types."""
        return {**asdict(self), "status": self.status.value}

    @staticmethod
    def from_plain(record: Mapping[str, Any]) -> TaskValidation:
        """Return the result that `to_plain` made; other fields are ignored.

        Raises:
            KeyError: a field is missing.
            ValueError: the status is unknown.
        """
        found = {field.name: record[field.name] for field in fields(TaskValidation)}
        lists = {name: tuple(found[name]) for name in ("problems", "remarks")}
        return TaskValidation(**{**found, **lists, "status": TaskStatus(found["status"])})


def validate_tasks(
    spec: EnvironmentSpec,
    options: Mapping[str, Any],
    tasks: Iterable[Task],
    *,
    concurrency: int = 1,
    call_timeout_s: float = CALL_S,
) -> Iterator[TaskValidation]:
    """Validate tasks; yield each result as soon as it is known.

    A call that does not return fails only its own task; the other tasks are played in a new environment. Environments
    that need worker processes are played one at a time.

    Args:
        spec: The environment.
        options: All options of the environment.
        tasks: Tasks to validate.
        concurrency: Maximum number of tasks at a time, each in a thread and an environment of its own.
        call_timeout_s: Deadline in seconds of each call of the environment, or longer if the environment asks for it;
            making the environment may take six times as long.

    Raises:
        UsageError: a model plays a role in the environment, such as its user.
        AgentRLError: the environment cannot be made or closed.
    """
    if roles := spec.roles_under(options):
        raise UsageError(
            f"tasks of {spec.name} cannot be validated with a role that a model plays",
            got=f"the roles {', '.join(roles)}",
            expected="options with which the environment plays alone",
            hint="leave out the option that adds the role, or measure how often a model solves the tasks: agentrl env "
            f"probe {spec.name}",
        )
    most = 1 if spec.isolation_under(options) is Isolation.PROCESS else concurrency
    lanes = _Lanes(spec, options, tasks, call_timeout_s)
    running = [_THREADS.submit(lanes.run) for _ in range(most)]
    try:
        while not (all(lane.done() for lane in running) and lanes.results.empty()):
            try:
                yield lanes.results.get(timeout=_RESULT_POLL_S)
            except queue.Empty:
                continue
        for lane in running:
            lane.result()
    finally:
        lanes.stop.set()


class _Lanes:
    """Threads that take tasks from one iterator and put their results into one queue."""

    def __init__(
        self, spec: EnvironmentSpec, options: Mapping[str, Any], tasks: Iterable[Task], call_timeout_s: float
    ) -> None:
        self.results: queue.SimpleQueue[TaskValidation] = queue.SimpleQueue()
        self.stop = threading.Event()
        self._spec, self._options, self._call_timeout_s = spec, options, call_timeout_s
        self._tasks, self._lock = iter(tasks), threading.Lock()

    def run(self) -> None:
        """Validate tasks until there are none left; continue with a new environment after a failed call."""
        current: list[Task] = []
        while True:
            began = time.perf_counter()
            try:
                run_watched(lambda current=current: self._play_all(current), self._call_timeout_s)  # type: ignore[misc]
                return
            except CallFailed as failed:
                if not current:
                    raise AgentRLError(f"environment {self._spec.name} cannot be used", got=str(failed)) from failed
                self.results.put(_invalid(current[0], str(failed), time.perf_counter() - began))
                current = []  # a thread that returns late keeps the old list

    def _play_all(self, current: list[Task]) -> None:
        try:
            self._play_tasks(current)
        except (CallFailed, AgentRLError):
            raise
        except Exception as error:
            got = f"{watched_calls().raised} raised {described_error(error)}"
            raise AgentRLError(f"environment {self._spec.name} cannot be used", got=got) from error

    def _play_tasks(self, current: list[Task]) -> None:
        session = EnvSession(lambda **options: self._spec.make_under(options), self._options)
        while not self.stop.is_set():
            with self._lock:
                task = next(self._tasks, None)
            if task is None:
                break
            current[:] = [task]
            found = validate_task(session, self._spec, task, self._options)
            if watched_calls().is_over:  # the lane went on without this thread
                return
            self.results.put(found)
            current.clear()
        session.close()


def validate_task(session: EnvSession, spec: EnvironmentSpec, task: Task, options: Mapping[str, Any]) -> TaskValidation:
    """Play a task's solution twice, and empty answers once.

    Raises:
        CallFailed: a call of the environment did not return.
        UsageError: the environment needs more than the seed of a task that has only a seed, as all others then do.
    """
    began = time.perf_counter()
    try:
        return _validate(session, spec, task, options, began)
    except CallFailed:
        raise
    except Exception as error:
        if isinstance(error, UsageError) and not task.options:
            raise
        call = f"{watched_calls().raised} raised " if watched_calls().raised else ""
        return _invalid(task, f"{call}{type(error).__name__}: {error}", time.perf_counter() - began)


def _validate(
    session: EnvSession, spec: EnvironmentSpec, task: Task, options: Mapping[str, Any], began: float
) -> TaskValidation:
    limit = min(filter(None, (spec.turns_under(options), task.max_turns)), default=ENDLESS)
    policies = [_solution(session, task) for _ in range(2)]
    idle = play(session, task, lambda _session, _observation: "", limit)
    if None in policies:
        problem = "there is no solution to play: the environment has no expert(), and the task has no ground_truth"
        return _unknown(task, problem, time.perf_counter() - began)
    first, second = (play(session, task, policy, limit) for policy in policies if policy is not None)
    solved, lazy = _is_solved(first, spec), _is_solved(idle, spec)
    problems = [*_solution_problems(first, solved), *_differences(first, second, spec)]
    if lazy or (lazy is None and idle.total > first.total):
        problems.append(f"doing nothing solves it: its return is {idle.total:g}, that of the solution {first.total:g}")
    elif idle.moments[0] != first.moments[0]:
        problems.append("two resets give different observations")
    found = TaskValidation(
        task_id=task.id,
        status=TaskStatus.INVALID if problems else TaskStatus.VALID,
        problems=tuple(problems),
        remarks=tuple(_remarks(first, second)),
        type=task.type,
        total=first.total,
        steps=len(first.results),
        seconds=time.perf_counter() - began,
    )
    if solved is None and not problems:
        reason = "the environment neither reports success nor states a maximum return"
        return _unknown(task, reason, found.seconds)
    return found


def _solution(session: EnvSession, task: Task) -> Policy | None:
    """Return a policy that plays the task's solution; ``None`` if there is none."""
    if session.find("expert") is not None:
        return expert_policy(through_tools=True)
    if task.ground_truth is None:
        return None
    answer = str(task.ground_truth)
    return lambda _session, _observation: answer


def _is_solved(episode: PlayedEpisode, spec: EnvironmentSpec) -> bool | None:
    """Return True if the task was solved; without a report of success, by the maximum return, if it is stated."""
    verdict, (least, most) = episode.is_solved(spec), spec.reward_range
    if verdict is not None or not least < most < math.inf:
        return verdict
    return episode.total >= most - 1e-9


def _solution_problems(episode: PlayedEpisode, solved: bool | None) -> Iterator[str]:
    if solved is False:
        end = "" if episode.done else ", and the episode did not end"
        played = f"return {episode.total:g} after {len(episode.results)} steps{end}"
        yield f"the solution does not solve it: {played}: {_shorten(episode.moments[-1].observation)}"


def _differences(first: PlayedEpisode, second: PlayedEpisode, spec: EnvironmentSpec) -> Iterator[str]:
    """Describe how the results of two plays of the solution differ."""
    if first.moments[0] != second.moments[0]:
        yield "two resets give different observations"
    if repr(first.total) != repr(second.total):
        yield f"the solution has a return of {first.total:g} the first time and {second.total:g} the second time"
    elif first.is_solved(spec) != second.is_solved(spec):
        yield "the solution solves it in one of two attempts"


def _remarks(first: PlayedEpisode, second: PlayedEpisode) -> Iterator[str]:
    if len(first.moments) != len(second.moments):
        yield f"the solution takes {len(first.results)} steps the first time and {len(second.results)} the second time"
        return
    later: Sequence[tuple[StepSnapshot, StepSnapshot]] = list(zip(first.moments, second.moments, strict=True))[1:]
    different = [number for number, (one, other) in enumerate(later, start=1) if one != other]
    if different:
        first_one = f"the first one after step {different[0]}"
        yield f"{len(different)} of {len(later)} observations differ the second time, {first_one}"


def _shorten(content: Content) -> str:
    text = " ".join(str(content).split())
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…")


def _invalid(task: Task, problem: str, seconds: float) -> TaskValidation:
    return TaskValidation(
        task_id=task.id, status=TaskStatus.INVALID, problems=(problem,), type=task.type, seconds=seconds
    )


def _unknown(task: Task, reason: str, seconds: float) -> TaskValidation:
    return TaskValidation(
        task_id=task.id, status=TaskStatus.UNKNOWN, problems=(reason,), type=task.type, seconds=seconds
    )
