"""Environments for TRL: classes whose methods are tools."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeGuard

import gymnasium

from agentrl.errors import (
    A_REWARD,
    AgentRLError,
    EnvironmentFailure,
    ToolError,
    UsageError,
    bounded_reward,
    shorten,
)
from agentrl.tool import Tool, ToolResult
from agentrl.tool.results import as_content

_OWN = ("reset", "close", "get_reward")
"""Public methods of a class for TRL that are not tools."""


def is_trl_environment(target: object) -> TypeGuard[type[Any]]:
    """Return True for a class with a ``reset`` and tools that is not an environment of another kind.

    A class with ``step`` is not one: it takes actions.
    """
    if not inspect.isclass(target) or issubclass(target, gymnasium.Env) or hasattr(target, "step"):
        return False
    return inspect.isfunction(inspect.getattr_static(target, "reset", None)) and bool(tool_methods(target))


def tool_methods(kind: type) -> list[str]:
    """List the methods of a class that are tools, in the order of their definition; inherited ones come last."""
    names = dict.fromkeys(name for base in kind.__mro__ for name in vars(base))
    return [
        name
        for name in names
        if not name.startswith("_") and name not in _OWN and inspect.isfunction(inspect.getattr_static(kind, name))
    ]


class TRLEnvironment(gymnasium.Env[str, str]):
    """An environment for TRL's GRPOTrainer (``environment_factory``): a plain class whose methods are tools.

    Every public method except ``reset``, ``close`` and ``get_reward`` is a tool. ``get_reward``, where there is one,
    returns the reward of the episode and is called once, at its end; without it, the attribute ``reward``, where there
    is one, is the return of the episode so far. An answer without a call ends the episode. The text of an exception
    that a tool raises is the tool's answer. ``reset`` receives the options of the task as keyword arguments. Source:
    TRL's documentation, "OpenEnv Integration for Training LLMs with Environments", and that of `GRPOTrainer`;
    docs/environments.md has an example.

    Args:
        kind: The object's class.
        options: Arguments of its constructor.

    Raises:
        UsageError: a method has no docstring, or arguments that cannot be described to a policy.
    """

    observation_space = action_space = gymnasium.spaces.Text(1000)

    def __init__(self, kind: type, **options: Any) -> None:
        self._inner = kind(**options)
        self._paid = 0.0
        self.tools = [Tool(self._as_tool(getattr(self._inner, name)), name=name) for name in tool_methods(kind)]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode; the observation is what the object's ``reset`` returns, if anything."""
        super().reset(seed=seed)
        self._paid = 0.0
        given = dict(options or {})
        accepted = inspect.signature(self._inner.reset)
        if "prompt" in given and not _accepts(accepted, "prompt"):
            del given["prompt"]  # of every row of a data set
        try:
            accepted.bind(**given)
        except TypeError as error:
            raise UsageError(
                f"reset of {type(self._inner).__name__} does not accept the options of the task",
                got=f"{', '.join(given) or 'no options'}: {error}",
                expected="the arguments of reset in the tasks' options",
                hint='write a file of tasks with lines such as {"word": "crane"}: environment.tasks=FILE',
            ) from error
        observation = self._inner.reset(**given)
        if isinstance(observation, list):  # content blocks
            observation = as_content(observation)
        return "" if observation is None else observation, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode: the policy answered without a call."""
        return "", self.final_reward(), True, False, {}

    def final_reward(self) -> float:
        """Return what ``get_reward`` returns, or else the reward added since the last call."""
        get_reward = getattr(self._inner, "get_reward", None)
        if get_reward is None:
            return self._gain()
        found = get_reward()
        if inspect.isawaitable(found):
            found = asyncio.run(_wait_for(found))
        return self._checked("get_reward()", found)

    def close(self) -> None:
        """Call the object's ``close``, if it has one."""
        close = getattr(self._inner, "close", None)
        if callable(close):
            close()

    def _as_tool(self, method: Callable[..., Any]) -> Callable[..., ToolResult]:
        """Return a method as a tool: its exceptions are answers, and what it adds to the reward is returned."""

        @functools.wraps(method)
        def call(*args: Any, **arguments: Any) -> ToolResult:
            try:
                value = method(*args, **arguments)
            except AgentRLError:
                raise
            except Exception as error:  # raised by the user's code: TRL gives its text to the policy
                raise ToolError(str(error) or type(error).__name__) from error
            return ToolResult(value, reward=self._gain())

        return call

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


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result
