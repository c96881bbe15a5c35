"""Session of the environment check: drives one environment, with deadlines for calls and a guard against exits."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import inspect
import json
import random
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from agentrl.env import AnyEnv, EnvironmentSpec, StepResult, maybe_await, optional_part
from agentrl.errors import AgentRLError, is_addressed_to, running_task
from agentrl.errors.foreign import DaemonThreads
from agentrl.message import Content, ImagePart
from agentrl.rollout.env_returns import (
    check_actions,
    check_environment,
    check_expert,
    check_expert_action,
    check_final_reward,
    check_part,
    check_tool_message,
    explain_reset,
    unpack_reset,
    unpack_step,
)
from agentrl.rollout.env_workers import call_own_tool, sample_text
from agentrl.task import Task, copy_options
from agentrl.testing.fair_clock import FairClock
from agentrl.testing.report import RuleFailed
from agentrl.tool import Tool, ToolResult
from agentrl.tool.random_call import COMMON_WORDS, random_arguments

T = TypeVar("T")

LONG_CALL = 6
"""Factor of the deadline of making an environment, which loads data, over that of other calls."""
_CALL_POLL_S = 0.1
_THREADS = DaemonThreads("environment check")
Policy: TypeAlias = Callable[["EnvSession", Content], str]
_CALL = "\x1fcall "
"""Prefix of an action that calls a tool of the environment instead of `step`."""
_CALLS_AT_RANDOM = 3
"""Maximum number of tool calls in an episode of random play; each may take as long as a program in a sandbox."""
_READ_AT_RESET = ("tools", "action_hint", "state_key")
"""Parts of an environment that a run reads when an episode starts."""
_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "admissible_actions": check_actions,
    "expert": check_expert,
    "final_reward": check_final_reward,
    "tool_message": check_tool_message,
}
"""Checks of what optional methods return, as in a run."""


class CallFailed(RuleFailed):
    """A call of the environment did not return, or tried to end the process; the message names the call."""


@dataclass(slots=True, kw_only=True)
class WatchedCalls:
    """Running calls of an environment, and the processes that they started."""

    limit_s: float
    """Deadline of a call in seconds."""
    clock: FairClock = field(default_factory=FairClock)
    """Clock of the deadlines, which advances slowly on a busy machine."""
    under_way: dict[object, tuple[str, float, float]] = field(default_factory=dict)
    """Name, deadline in seconds, and end time of each running call."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Processes that are killed when the watch ends."""
    raised: str = ""
    """Name of the call that raised the latest exception."""
    is_over: bool = False
    """True when the watch has ended and new calls are rejected."""

    def overdue(self) -> str | None:
        """Describe the first call that missed its deadline; ``None`` if there is none."""
        now = self.clock.tick()
        late = [(end, name, limit) for name, limit, end in list(self.under_way.values()) if end < now]
        return f"{min(late)[1]} did not return within {min(late)[2]:g} s" if late else None


_CALLS: contextvars.ContextVar[WatchedCalls | None] = contextvars.ContextVar("calls")


def watched_calls() -> WatchedCalls:
    """Return the current watch; outside a watch, one without a deadline."""
    return _CALLS.get(None) or WatchedCalls(limit_s=float("inf"))


@contextmanager
def asking(name: str, times: int = 1, at_least_s: float = 0.0) -> Iterator[None]:
    """Watch a call of the environment; `name` is for messages.

    The deadline is `times` the watch's deadline, but at least `at_least_s` seconds.

    Raises:
        CallFailed: the call tried to end the process.
    """
    calls, key = watched_calls(), object()
    if calls.is_over:
        raise CallFailed("the check has ended")
    limit_s = max(times * calls.limit_s, at_least_s)
    calls.under_way[key] = (name, limit_s, calls.clock.read() + limit_s)
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # the user's interrupt: only the main thread receives one
        raise CallFailed(f"{name} ended the process ({type(error).__name__})") from error
    except asyncio.CancelledError as error:
        if is_addressed_to(running_task(), error):
            raise
        raise CallFailed(f"{name} raised {type(error).__name__} without being cancelled") from error
    except Exception:
        calls.raised = name
        raise
    finally:
        calls.under_way.pop(key, None)


def run_watched(work: Callable[[], T], limit_s: float) -> T:
    """Run `work` in a thread, and watch its calls of environments (in `asking`) from this one; return its result.

    A thread whose call does not return keeps running, but does not keep the process alive.

    Raises:
        CallFailed: a call did not return within `limit_s` seconds, without most of the time it waited for a core.
    """
    calls = WatchedCalls(limit_s=limit_s)

    def run() -> T:
        _CALLS.set(calls)
        return work()

    ended = _THREADS.submit(contextvars.copy_context().run, run)
    try:
        while not wait([ended], timeout=_CALL_POLL_S).done:
            if overdue := calls.overdue():
                raise CallFailed(overdue)
        return ended.result()
    finally:
        calls.is_over = True
        for process in calls.processes:
            process.kill()
            process.wait()


class StepSnapshot(NamedTuple):
    """Result of a reset or a step as plain data that can be compared between processes."""

    action: str
    observation: str
    reward: float
    terminated: bool
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """Played episode."""

    moments: tuple[StepSnapshot, ...]
    """Result of the reset, then those of all steps."""
    results: tuple[StepResult, ...]

    @property
    def actions(self) -> tuple[str, ...]:
        """All actions in order."""
        return tuple(moment.action for moment in self.moments[1:])

    @property
    def total(self) -> float:
        """Return of the episode: the sum of its rewards."""
        return sum(result.reward for result in self.results)

    @property
    def done(self) -> bool:
        """True if the environment ended the episode."""
        return bool(self.results) and self.results[-1].done

    def is_solved(self, spec: EnvironmentSpec) -> bool | None:
        """Return True if the task was solved; ``None`` if the environment does not report it."""
        success = self.results[-1].info.get("success") if self.results else None
        if success is None and spec.success_threshold is not None:
            return self.total >= spec.success_threshold
        return None if success is None else bool(success)


class EnvSession:
    """Session with an environment, made by calling `make` with `options`; its methods may be coroutines."""

    def __init__(self, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.env = check_environment(make_environment(make, options))
        self._runner = asyncio.Runner()
        self._longest_step_s = 0.0

    def reset(self, task: Task) -> Content:
        """Start a task's episode, and return the first observation."""
        return self.start(task)[0]

    def start(self, task: Task) -> tuple[Content, Mapping[str, Any]]:
        """Start a task's episode, and return the first observation and the info."""
        try:
            returned = self.ask("reset", self.env.reset, seed=task.seed, options=copy_options(task.options))
        except TypeError as error:
            raise explain_reset(self.env, error) from error
        opening = unpack_reset(returned)
        for part in _READ_AT_RESET:
            self.find(part)
        requested = opening[1].get("step_timeout_s", 0.0)
        self._longest_step_s = float(requested) if isinstance(requested, int | float) else 0.0
        return opening

    def step(self, action: str) -> StepResult:
        """Take an action: a text, or a tool call made by `call_action`."""
        if is_call(action):
            return self._runner.run(_call(self.find("tools"), action, self._longest_step_s))
        with asking("step", at_least_s=self._longest_step_s):
            return unpack_step(self._result_of(self.env.step(action)))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call an optional method and check its result; return ``None`` if the environment does not have it."""
        method = self.find(name)
        if method is None:
            return None
        result = self.ask(name, method, *arguments)
        check = _CHECKS.get(name)
        return result if check is None else check(result)

    def call_tool(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the environment, and return its answer or its error text."""
        return plain_text(self.step(call_action(tool, arguments)).observation)

    def own_tools(self) -> list[Tool]:
        """Return the episode's tools that can be called outside a run."""
        return [tool for tool in self.find("tools") or () if not (tool.is_stateful or tool.dependencies)]

    def find(self, name: str) -> Any:
        """Return an optional attribute through Gymnasium's wrappers; ``None`` if the environment does not have it."""
        return check_part(name, optional_part(self.env, name))

    def close(self) -> None:
        """Close the environment."""
        self.ask("close", self.env.close)
        self._runner.close()

    def ask(self, name: str, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a method, and await the result if it is a coroutine."""
        with asking(name):
            return self._result_of(method(*arguments, **named))

    def _result_of(self, value: Any) -> Any:
        return self._runner.run(maybe_await(value)) if inspect.isawaitable(value) else value


def make_environment(make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Make an environment, with a deadline."""
    with asking("making the environment", times=LONG_CALL):
        return make(**copy_options(options))


def call_action(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Return the action that calls a tool of the environment."""
    return f"{_CALL}{json.dumps([tool.name, dict(arguments)])}"


def is_call(action: str) -> bool:
    """Return True if an action calls a tool."""
    return action.startswith(_CALL)


async def _call(tools: Sequence[Tool], action: str, at_least_s: float = 0.0) -> StepResult:
    """Call a tool, and return its answer or its error text as the result of a step."""
    name, arguments = json.loads(action.removeprefix(_CALL))
    tool = next(tool for tool in tools if tool.name == name)
    with asking(f"tool {tool.name}", at_least_s=at_least_s):
        try:
            result = await call_own_tool(tool, arguments)
        except AgentRLError as error:
            result = ToolResult(str(error))
    ended = result.stop or tool.stop
    info = {} if result.success is None else {"success": result.success}
    return StepResult(
        observation=result.content,
        reward=result.reward,
        terminated=ended,
        truncated=result.truncated and not ended,
        info=info,
    )


def play(session: EnvSession, task: Task, policy: Policy, limit: int) -> PlayedEpisode:
    """Play one episode of a task with at most `limit` steps."""
    observation = session.reset(task)
    moments = [opening_of(observation)]
    results: list[StepResult] = []
    while len(results) < limit and not (results and results[-1].done):
        action = policy(session, observation)
        result = session.step(action)
        observation = result.observation
        results.append(result)
        moments.append(moment_of(action, result))
    return PlayedEpisode(moments=tuple(moments), results=tuple(results))


def replay_in(session: EnvSession, task: Task, actions: Sequence[str]) -> Iterator[StepSnapshot]:
    """Replay actions in a task's episode, outside an event loop; yield the result of the reset and of each action."""
    yield opening_of(session.reset(task))
    for action in actions:
        yield moment_of(action, session.step(action))


async def replay(env: AnyEnv, task: Task, actions: Sequence[str]) -> list[StepSnapshot]:
    """Replay actions in a task's episode; other coroutines may run before each action."""
    returned: Any
    with asking("reset"):
        returned = await maybe_await(env.reset(seed=task.seed, options=copy_options(task.options)))
    observation, _ = unpack_reset(returned)
    moments = [opening_of(observation)]
    for action in actions:
        await asyncio.sleep(0)
        if is_call(action):
            moments.append(moment_of(action, await _call(optional_part(env, "tools"), action)))
            continue
        with asking("step"):
            returned = await maybe_await(env.step(action))
        moments.append(moment_of(action, unpack_step(returned)))
    return moments


def opening_of(observation: Content) -> StepSnapshot:
    """Return the result of a reset as plain data."""
    return StepSnapshot("", plain_text(observation), 0.0, False, False)


def moment_of(action: str, result: StepResult) -> StepSnapshot:
    """Return the result of a step as plain data."""
    reward = float(result.reward)
    return StepSnapshot(action, plain_text(result.observation), reward, bool(result.terminated), bool(result.truncated))


def plain_text(content: Content) -> str:
    """Return content as text, with checksums for images and ``str`` for other objects."""
    if not isinstance(content, tuple):
        return str(content)
    return "\n".join(
        hashlib.sha256(part.data).hexdigest() if isinstance(part, ImagePart) else getattr(part, "text", str(part))
        for part in content
    )


def random_policy(seed: int) -> Policy:
    """Return a policy that chooses an admissible action, samples the action space, or else chooses a common word.

    If the environment has tools, the policy calls some of them in between, with arguments that fit their schemas; it
    begins with calls if the environment describes no action besides them.
    """
    generator = random.Random(seed)
    calls_left = _CALLS_AT_RANDOM

    def choose(session: EnvSession, observation: Content) -> str:
        nonlocal calls_left
        calls = calls_left and session.find("tools") and (generator.random() < 0.5 or not session.find("action_hint"))
        if calls and (tools := session.own_tools()):
            calls_left -= 1
            tool = generator.choice(tools)
            return call_action(tool, random_arguments(tool.schema, generator, plain_text(observation)))
        admissible = session.call("admissible_actions")
        if admissible:
            return str(generator.choice(admissible))
        space = session.find("action_space")
        if space is None:
            return generator.choice(COMMON_WORDS)
        space.seed(generator.randrange(2**31))
        return str(session.ask("sample of the action space", sample_text, space))

    return choose


def expert_policy(*, mistakes: float = 0.0, seed: int = 0, through_tools: bool = False) -> Policy:
    """Return a policy that follows a new expert of the environment.

    `mistakes` is the fraction of actions before which the expert makes a mistake. With `through_tools`, the policy
    calls the environment's tools for actions that `tool_message` turns into calls, as a run with tools does.
    """
    experts: list[Any] = []
    deferred: list[str] = []
    rng = random.Random(seed)

    def act(session: EnvSession, observation: Content) -> str:
        if not experts:
            experts.append(session.call("expert"))
        if deferred:
            return deferred.pop()
        action = check_expert_action(session.ask("act of the expert", experts[0].act, observation))
        mistake = session.ask("mistake of the expert", experts[0].mistake, rng) if rng.random() < mistakes else None
        if mistake is None:
            return action
        deferred.append(action)
        return str(mistake)

    calls: list[str] = []

    def choose(session: EnvSession, observation: Content) -> str:
        if not calls:
            action = act(session, observation)
            calls.extend(_calls_of(session, action) if through_tools else ())
            if not calls:
                return action
        return calls.pop(0)

    return choose


def _calls_of(session: EnvSession, action: str) -> list[str]:
    """Return the calls that take an expert's action; none if it is text for `step`.

    Raises:
        RuleFailed: the expert calls a tool that the environment does not have.
    """
    message = session.call("tool_message", action)
    tools = {tool.name: tool for tool in session.find("tools") or ()}
    found = () if message is None else message.tool_calls
    if unknown := [call.name for call in found if call.name not in tools]:
        raise RuleFailed(f"tool_message() calls a tool that the environment does not have: {', '.join(unknown)}")
    return [call_action(tools[call.name], call.arguments) for call in found]
