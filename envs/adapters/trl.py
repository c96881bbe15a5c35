"""Classes for TRL's GRPOTrainer (``environment_factory``) as environments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium

from agentrl.env import AnyEnv, AsyncEnv, maybe_await, run_coroutine
from agentrl.errors import (
    A_REWARD,
    AgentRLError,
    EnvironmentFailure,
    ToolError,
    UsageError,
    bounded_reward,
    shorten,
)
from agentrl.task import Task
from agentrl.tool import Tool, ToolResult
from agentrl.tool.results import as_content


def make(kind: type, methods: Sequence[str], **options: Any) -> AnyEnv:
    """Create an environment from a class; see `AsyncTRLEnvironment` for the arguments."""
    parts = (getattr(kind, name, None) for name in ("reset", "close", "get_reward", *methods))
    is_async = any(map(inspect.iscoroutinefunction, parts))
    return (AsyncTRLEnvironment if is_async else TRLEnvironment)(kind, methods, **options)


class AsyncTRLEnvironment(AsyncEnv):
    """An environment for TRL's GRPOTrainer (``environment_factory``): a plain class whose methods are tools.

    ``get_reward``, where there is one,
    returns the reward of the episode and is called once, at its end; without it, the attribute ``reward``, where there
    is one, is the return of the episode so far. An answer without a call ends the episode. The text of an exception
    that a tool raises is the tool's answer. ``reset`` receives the options of the task as keyword arguments. All
    methods may be coroutines, which are awaited in one event loop. Source: TRL's documentation, "OpenEnv Integration
    for Training LLMs with Environments", and that of `GRPOTrainer`; docs/environments.md has an example.

    Args:
        kind: The object's class.
        methods: Names of the methods that are tools.
        options: Arguments of its constructor.

    Raises:
        UsageError: a method has no docstring, or arguments that cannot be described to a policy.
    """

    action_space = gymnasium.spaces.Text(1000)

    def __init__(self, kind: type, methods: Sequence[str], **options: Any) -> None:
        self._inner = kind(**options)
        self._paid = 0.0
        self.tools = [Tool(self._as_tool(getattr(self._inner, name)), name=name) for name in methods]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; the observation is what the object's ``reset`` returns, if anything."""
        self._paid = 0.0
        given = dict(options or {})
        accepted = inspect.signature(self._inner.reset)
        of_task = {field.name for field in dataclasses.fields(Task)}  # `reset` need not accept these
        given = {name: value for name, value in given.items() if name not in of_task or _accepts(accepted, name)}
        try:
            accepted.bind(**given)
        except TypeError as error:
            raise UsageError(
                f"reset of {type(self._inner).__name__} does not accept the options of the task",
                got=f"{', '.join(given) or 'no options'}: {error}",
                expected="the arguments of reset in the tasks' options",
                hint='write a file of tasks with lines such as {"word": "crane"}: environment.tasks=FILE in a '
                "config, --tasks FILE for env check and env validate",
            ) from error
        observation = await maybe_await(self._inner.reset(**given))
        if isinstance(observation, list):  # content blocks
            observation = as_content(observation)
        return "" if observation is None else observation, {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode: the policy answered without a call."""
        return "", await self.final_reward(), True, False, {}

    async def final_reward(self) -> float:
        """Return what ``get_reward`` returns, or else the reward added since the last call."""
        get_reward = getattr(self._inner, "get_reward", None)
        return self._gain() if get_reward is None else self._checked("get_reward()", await maybe_await(get_reward()))

    async def close(self) -> None:
        """Call the object's ``close``, if it has one."""
        close = getattr(self._inner, "close", None)
        if callable(close):
            await maybe_await(close())

    def _as_tool(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method as a tool: its exceptions are answers, and what it adds to the reward is returned."""

        @functools.wraps(method)
        async def wait(*args: Any, **arguments: Any) -> ToolResult:
            with _errors_for_the_policy():
                value = await method(*args, **arguments)
            return ToolResult(value, reward=self._gain())

        @functools.wraps(method)
        def call(*args: Any, **arguments: Any) -> ToolResult:
            with _errors_for_the_policy():
                value = method(*args, **arguments)
            return ToolResult(value, reward=self._gain())

        return wait if inspect.iscoroutinefunction(method) else call

    def _gain(self) -> float:
        """Return the reward added since the last call; 0 if ``get_reward`` returns the reward at the end."""
        found = None if hasattr(self._inner, "get_reward") else getattr(self._inner, "reward", None)
        total = 0.0 if found is None else self._checked("reward", found)
        gain, self._paid = total - self._paid, total
        return gain

    def _checked(self, what: str, found: object) -> float:
        number = bounded_reward(found)
        if number is None:
            raise EnvironmentFailure(f"{what} of {type(self._inner).__name__} is {shorten(found)}", expected=A_REWARD)
        return number


def _accepts(signature: inspect.Signature, name: str) -> bool:
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return name in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds


@contextlib.contextmanager
def _errors_for_the_policy() -> Iterator[None]:
    """Raise the exceptions of the user's code as `ToolError`: TRL gives their texts to the policy."""
    try:
        yield
    except AgentRLError:
        raise
    except Exception as error:
        raise ToolError(str(error) or type(error).__name__) from error


class TRLEnvironment(gymnasium.Env[str, str]):
    """An `AsyncTRLEnvironment` without coroutines, whose methods may block: it runs in threads or processes."""

    observation_space = action_space = AsyncTRLEnvironment.action_space

    def __init__(self, kind: type, methods: Sequence[str], **options: Any) -> None:
        self._inner = AsyncTRLEnvironment(kind, methods, **options)
        self.tools = self._inner.tools

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        return run_coroutine(self._inner.reset(options=options))

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode: the policy answered without a call."""
        return run_coroutine(self._inner.step(action))

    def final_reward(self) -> float:
        """Return the reward at the end of the episode."""
        return run_coroutine(self._inner.final_reward())

    def close(self) -> None:
        """Close the object."""
        run_coroutine(self._inner.close())
