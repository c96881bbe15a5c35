"""Environments and where they run: in the event loop, or in a thread.

`EnvAdapter` calls the environment and checks what it returns. It runs next to the environment, in a backend: inline, a
thread, or a worker process (`env_processes`), which runs calls one after another. The deadline of a call starts when
the worker starts it. A thread that hangs is abandoned and replaced.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import os
import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar, cast

import gymnasium

from agentrl.env import (
    AnyEnv,
    AsyncEnv,
    Expert,
    ExpertAction,
    FallibleExpert,
    maybe_await,
    optional_part,
    run_coroutine,
)
from agentrl.errors import (
    AgentRLError,
    EnvironmentFailure,
    ToolError,
    UsageError,
    boundary,
    failure_of,
    is_addressed_to,
    running_task,
)
from agentrl.errors.deadlines import async_boundary
from agentrl.errors.foreign import await_or_abandon, cause_of, end_forked_copy
from agentrl.message import Content, Message
from agentrl.remote.env_methods import OPTIONAL_PARTS, FinalReward, ResetResult, StepReply, restore_generator
from agentrl.rollout.env_returns import (
    check_action_hint,
    check_actions,
    check_environment,
    check_expert,
    check_expert_action,
    check_final_reward,
    check_method,
    check_reset,
    check_state_key,
    check_step,
    check_tool_message,
    check_tools,
    explain_reset,
    explain_unpacking,
    require_actions,
)
from agentrl.task import copy_options
from agentrl.tool import Tool, ToolResult

W = TypeVar("W")
Work: TypeAlias = Callable[[], Any]
_Inbox: TypeAlias = "SimpleQueue[tuple[WorkerCall[Work], asyncio.Future[Any]] | None]"
_COUNTS, _INNER = "steps_of_wrappers", "environment"
"""Keys of the snapshots of environments whose wrappers count steps."""
MAX_SAMPLE_CHARS = 256
"""Maximum length in characters of a text space whose samples random play uses unchanged."""
RANDOM_CHARACTERS = 32
"""Maximum length in characters of a random action in a text space that allows more than `MAX_SAMPLE_CHARS`."""


class EnvAdapter:
    """Adapter of one environment: makes it, calls it, and checks what it returns.

    All methods are coroutines, for synchronous and asynchronous environments alike; with a synchronous environment they
    never suspend.
    """

    def __init__(self, make: Callable[..., AnyEnv], options: Mapping[str, Any]) -> None:
        self.env: AnyEnv = check_environment(make(**copy_options(options)))
        self._expert: Expert | None = None
        self._deferred_action: str | None = None
        """Expert action to take after a mistake."""
        self._random: random.Random | None = None
        self._sampled: tuple[Any, Any] = (None, None)

    @property
    def is_async(self) -> bool:
        """True if the environment's own methods are coroutines."""
        own = getattr(self.env, "unwrapped", self.env)
        methods = (getattr(own, name, None) for name in ("reset", "step"))
        return isinstance(self.env, AsyncEnv) or any(map(inspect.iscoroutinefunction, methods))

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `agentrl.remote.env_methods`: the adapter's own, or else the environment's."""
        own = getattr(self, method, None)
        if own is not None:
            return await own(*arguments)
        return await maybe_await(self._require(method)(*arguments))

    async def reset(self, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Start an episode. The environment gets a copy of the options, which it may change."""
        self._expert = self._random = self._deferred_action = None
        try:
            returned = await maybe_await(self.env.reset(seed=seed, options=copy_options(options)))
        except TypeError as error:
            raise explain_reset(self.env, error) from error
        observation, info = check_reset(returned)
        return ResetResult(
            observation=observation,
            info=info,
            state_key=await self.state_key(),
            action_hint=await self.action_hint(),
            tools=check_tools(self._optional("tools")),
        )

    async def snapshot(self) -> Any:
        """Return the environment's state, including the step counts of Gymnasium's `TimeLimit` wrappers."""
        inner = await maybe_await(self._require("snapshot")())
        counts = [layer._elapsed_steps for layer in _time_limits(self.env)]
        return {_COUNTS: counts, _INNER: inner} if counts else inner

    async def step(self, action: str) -> StepReply:
        """Take an action."""
        try:
            returned = await maybe_await(self.env.step(action))
        except (TypeError, ValueError) as error:
            raise explain_unpacking(error) from error
        result = check_step(returned)
        return StepReply(result=result, state_key=await self.state_key())

    async def final_reward(self) -> FinalReward | None:
        """Judge the state that an unfinished episode leaves; ``None`` if the environment does not."""
        method = self._method("final_reward")
        return None if method is None else check_final_reward(await maybe_await(method()))

    async def admissible_actions(self) -> list[str] | None:
        """List the actions that the environment accepts now; ``None`` if it cannot list them."""
        method = self._method("admissible_actions")
        actions = None if method is None else await maybe_await(method())
        return check_actions(actions)

    async def expert_action(self, observation: Content, seed: int = 0, mistakes: float = 0.0) -> ExpertAction:
        """Return the next action of the environment's expert.

        With probability `mistakes`, drawn with `seed`, the action is a mistake, unless the previous action was one or
        the expert knows of no mistake here.
        """
        expert = self._expert or await self._begin_expert()
        if self._deferred_action is not None:
            action, self._deferred_action = self._deferred_action, None
            return ExpertAction(text=action)
        action = check_expert_action(await maybe_await(expert.act(observation)))
        rng = random.Random(seed)
        if rng.random() < mistakes:
            if not hasattr(expert, "mistake"):
                raise UsageError(
                    "the environment's expert makes no mistakes",
                    got=f"sft.mistakes {mistakes}",
                    expected="an expert with a mistake(rng) method",
                    hint="set sft.mistakes=0",
                )
            mistake = await maybe_await(cast("FallibleExpert", expert).mistake(rng))
            if mistake is not None:
                self._deferred_action = action
                return ExpertAction(text=str(mistake), is_mistake=True)
        return ExpertAction(text=action)

    async def tool_message(self, action: str) -> Message | None:
        """Convert a text action to a message that calls the environment's tools; ``None`` without tools."""
        method = self._method("tool_message")
        return None if method is None else check_tool_message(await maybe_await(method(action)))

    async def random_action(self, seed: int) -> str:
        """Draw a random admissible action, or sample the action space if the environment cannot list actions."""
        actions = await self.admissible_actions()
        if actions is not None:
            if self._random is None:
                self._random = random.Random(seed)
            return self._random.choice(require_actions(actions))
        space = self._optional("action_space")
        if space is None:
            raise UsageError(
                "the environment does not say what random actions are",
                got="no admissible_actions() and no action_space",
                expected="one of them, for random play: a policy, or the text from which a new model learns its words",
                hint="add to the class: action_space = gymnasium.spaces.Text(200)",
            )
        if self._random is None:
            self._random = random.Random(seed)
            self._sampled = space, _own_space(space)
            self._sampled[1].seed(seed % 2**32)
        if space is not self._sampled[0]:  # the environment has changed its actions
            self._sampled = space, _own_space(space)
        return await sample_text(self._sampled[1])

    async def expert(self) -> bool:
        """Request the environment's expert for later calls of `expert_action`; return True if it can make mistakes."""
        return hasattr(await self._begin_expert(), "mistake")

    async def expert_mistake(self, random_state: Sequence[Any]) -> tuple[str | None, list[Any]]:
        """Replace the expert's last action by a random mistake; return the mistake and the generator's new state."""
        rng = restore_generator(random_state)
        mistake = await maybe_await(cast("FallibleExpert", self._expert).mistake(rng))
        version, numbers, gauss = rng.getstate()
        return None if mistake is None else str(mistake), [version, list(numbers), gauss]

    async def sample(self, seed: int | None) -> str:
        """Sample the action space; seed it first unless `seed` is ``None``."""
        space = self._optional("action_space")
        if seed is not None:
            space.seed(seed)
        return await sample_text(space)

    async def action_hint(self) -> str:
        """Return the line that tells the model what an action is; empty if the environment has none."""
        return check_action_hint(self._optional("action_hint"))

    async def parts(self) -> frozenset[str]:
        """Return the optional parts that the environment has."""
        return frozenset(part for part in OPTIONAL_PARTS if self._optional(part) is not None)

    async def restore(self, data: Any) -> str | None:
        """Restore a snapshot, and return the key of its state."""
        if limits := _time_limits(self.env):
            for layer, count in zip(limits, data[_COUNTS], strict=True):
                layer._elapsed_steps = count
            data = data[_INNER]
        await maybe_await(self._require("restore")(data))
        return await self.state_key()

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call one of the environment's tools; only worker processes use this, other callers hold the tool itself."""
        return await call_own_tool(next(tool for tool in self._optional("tools") if tool.name == name), arguments)

    async def close(self) -> None:
        """Release the environment."""
        await maybe_await(self.env.close())

    async def state_key(self) -> str | None:
        """Return the key of the current state; ``None`` if the environment has no keys."""
        method = self._method("state_key")
        return None if method is None else check_state_key(await maybe_await(method()))

    async def _begin_expert(self) -> Expert:
        method = self._method("expert")
        if method is None:
            raise UsageError("the environment has no expert", hint="give it an expert() method, or another policy")
        self._expert, self._deferred_action = check_expert(await maybe_await(method())), None
        return self._expert

    def _optional(self, name: str) -> Any:
        return optional_part(self.env, name)

    def _method(self, name: str) -> Any:
        return check_method(name, self._optional(name))

    def _require(self, name: str) -> Any:
        method = self._method(name)
        if method is None:
            raise UsageError(f"the environment has no {name}()")
        return method


def _own_space(space: Any) -> Any:
    """Copy a space of Gymnasium, which may be a class attribute that concurrent episodes share."""
    return copy.deepcopy(space) if isinstance(space, gymnasium.Space) else space


def _time_limits(env: Any) -> list[Any]:
    """Return the wrappers that count an environment's steps, such as `gymnasium.wrappers.TimeLimit`."""
    found = []
    while env is not getattr(env, "unwrapped", env):
        if "_elapsed_steps" in vars(env):
            found.append(env)
        env = env.env
    return found


async def sample_text(space: Any) -> str:
    """Sample an action space as text; the sample is short if a text space allows very long texts."""
    least, most = getattr(space, "min_length", 0), getattr(space, "max_length", 0)
    if most <= MAX_SAMPLE_CHARS:
        return str(await maybe_await(space.sample()))
    length = int(space.np_random.integers(least, max(least, RANDOM_CHARACTERS) + 1))
    return str(await maybe_await(space.sample((length, None))))


async def call_own_tool(tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
    """Call a tool next to its environment, for a policy in another process.

    Raises:
        ToolError: the arguments are wrong, or the tool failed; the policy reads it.
        EnvironmentFailure: the environment is lost.
    """
    caller = running_task()
    async with AsyncExitStack() as stack:
        try:
            checked = tool.validate(arguments)
            return await tool.run(await tool.open(stack), checked)
        except AgentRLError:
            raise
        except BaseException as error:
            if is_addressed_to(caller, error):
                raise
            raise ToolError(f"{tool.name} failed ({type(cause_of(error)).__name__})") from error


@dataclass(slots=True)
class WorkerCall(Generic[W]):
    """Call in the queue of a worker."""

    work: W
    what: str
    """Description for messages, such as ``"step of household (task 17)"``."""
    deadline_s: float
    failure: type[EnvironmentFailure] = EnvironmentFailure
    """Type of the error that a failure of the call becomes."""
    result: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SerialWorker(ABC, Generic[W]):
    """Worker that runs jobs in order of submission; a started job runs to its end or deadline even if cancelled."""

    def __init__(self) -> None:
        self._jobs: deque[WorkerCall[W]] = deque()
        self._pump: asyncio.Task[None] | None = None

    @abstractmethod
    async def execute(self, job: WorkerCall[W]) -> Any:
        """Run one job."""

    @abstractmethod
    async def stop(self, reason: str) -> None:
        """Abandon the running job; the next job gets a new thread or process."""

    async def close(self) -> None:
        """Release the worker; nothing may be running."""
        await self.stop("it was stopped")

    async def submit(
        self, work: W, *, what: str, deadline_s: float, failure: type[EnvironmentFailure] = EnvironmentFailure
    ) -> Any:
        """Run `work` after everything submitted before it; failures are raised as `failure`."""
        job = WorkerCall(work, what, deadline_s, failure)
        self._jobs.append(job)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return await job.result

    async def _run(self) -> None:
        pump = running_task()
        while self._jobs:
            job = self._jobs.popleft()
            if job.result.cancelled():
                continue
            try:
                outcome = await self._execute_in_time(job)
            except BaseException as error:
                if is_addressed_to(pump, error):
                    job.result.cancel()
                    raise
                if not job.result.done():
                    job.result.set_exception(failure_of(job.failure, job.what, error))
            else:
                if not job.result.done():
                    job.result.set_result(outcome)

    async def _execute_in_time(self, job: WorkerCall[W]) -> Any:
        try:
            async with asyncio.timeout(job.deadline_s) as scope:
                return await self.execute(job)
        except TimeoutError as error:
            if not scope.expired():
                raise
            await self.stop("it hung and was killed")
            waited = f"no answer in {job.deadline_s:g} s"
            raise job.failure(f"{job.what} missed its deadline", got=waited) from error

    async def drain(self, patience_s: float) -> None:
        """Wait until every submitted job has ended; abandon jobs that nobody awaits after `patience_s` seconds."""
        if self._pump is None or self._pump.done():
            return
        _, late = await asyncio.wait({self._pump}, timeout=patience_s)
        if late:
            await self.stop("it was stopped")
            self._pump.cancel()
            await asyncio.wait({self._pump})
            while self._jobs:
                self._jobs.popleft().result.cancel()


class EnvBackend(ABC):
    """Interface to one environment from the event loop."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """True if calls can still succeed."""

    @abstractmethod
    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Call a method of the environment's `EnvAdapter`; failures are `EnvironmentFailure` and name `what` failed."""


class ForwardingBackend(EnvBackend):
    """Backend that passes every call to another one; subclasses change some of them."""

    def __init__(self, backend: EnvBackend) -> None:
        self.backend = backend

    @property
    def is_alive(self) -> bool:
        """True if calls can still succeed."""
        return self.backend.is_alive

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Call a method of the environment."""
        return await self.backend.call(method, *arguments, deadline_s=deadline_s, what=what)


class InlineBackend(EnvBackend):
    """Backend in the event loop; the deadline cannot interrupt blocking code here."""

    def __init__(self, adapter: EnvAdapter) -> None:
        self._adapter = adapter

    @property
    def is_alive(self) -> bool:
        """Always true."""
        return True

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Await the method in the event loop."""
        async with async_boundary(EnvironmentFailure, what, deadline_s=deadline_s):
            called = self._adapter.call(method, *arguments)
            return await (await_or_abandon(called, what) if self._adapter.is_async else called)


class ThreadWorker(SerialWorker[Work]):
    """Worker that runs functions in one daemon thread, which starts with the first function."""

    def __init__(self) -> None:
        super().__init__()
        self._inbox: _Inbox | None = None

    async def make(
        self, factory: Callable[..., AnyEnv], options: Mapping[str, Any], *, what: str, deadline_s: float
    ) -> EnvBackend:
        """Make an environment in the thread; if its methods are coroutines, they run in the event loop."""
        adapter: EnvAdapter = await self.submit(
            functools.partial(EnvAdapter, factory, options), what=what, deadline_s=deadline_s
        )
        return InlineBackend(adapter) if adapter.is_async else ThreadBackend(self, adapter)

    async def execute(self, job: WorkerCall[Work]) -> Any:
        """Run the function in the thread and wait for its result."""
        if self._inbox is None:
            self._inbox = SimpleQueue()
            threading.Thread(target=_serve, args=(self._inbox,), name="agentrl-environment", daemon=True).start()
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox.put((job, done))
        return await done

    async def stop(self, reason: str) -> None:
        """Let the thread end after its current function."""
        if self._inbox is not None:
            self._inbox.put(None)
            self._inbox = None


class ThreadBackend(EnvBackend):
    """Backend in a thread; all calls run in the same thread."""

    def __init__(self, worker: ThreadWorker, adapter: EnvAdapter) -> None:
        self._worker = worker
        self._adapter = adapter
        self._running = False

    @property
    def is_alive(self) -> bool:
        """True if no call is running, in particular none in an abandoned thread."""
        return not self._running

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Run the method in the thread; the deadline counts from when the thread is free."""

        def work() -> Any:
            self._running = True
            try:
                return run_coroutine(self._adapter.call(method, *arguments))
            finally:
                self._running = False

        return await self._worker.submit(work, deadline_s=deadline_s, what=what)


def _serve(inbox: _Inbox) -> None:
    while (item := inbox.get()) is not None:
        job, done = item
        result, error, process = None, None, os.getpid()
        try:
            with boundary(job.failure, job.what):
                result = job.work()
        except AgentRLError as raised:
            error = raised
        end_forked_copy(process)
        loop = done.get_loop()
        if loop.is_closed():
            return
        loop.call_soon_threadsafe(_deliver, done, result, error)


def _deliver(done: asyncio.Future[Any], result: Any, error: AgentRLError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
