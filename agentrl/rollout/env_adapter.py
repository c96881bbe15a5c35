"""Adapter of one environment, and the checks of what its `reset` and `step` return.

The adapter runs next to the environment: in the event loop, in a thread or in a worker process. Runs and
`agentrl env check` refuse the same return values.
"""

from __future__ import annotations

import numbers
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, cast

from agentrl.env import AnyEnv, AsyncEnv, Expert, ExpertAction, FallibleExpert, StepResult, maybe_await, optional_part
from agentrl.errors import (
    A_REWARD,
    AgentRLError,
    ToolError,
    UsageError,
    bounded_reward,
    is_addressed_to,
    running_task,
    shorten,
)
from agentrl.errors.foreign import cause_of
from agentrl.message import Content, ImagePart, Message, TextPart
from agentrl.remote.env_methods import OPTIONAL_PARTS, ResetResult, Stepped, restore_generator
from agentrl.tool import Tool, ToolResult

LARGEST_OBSERVATION = 10_000_000
"""Maximum number of characters of an observation, over all its parts."""
_COUNTS, _INNER = "steps_of_wrappers", "environment"
"""Keys of the snapshots of environments whose wrappers count steps."""
_NEXT_STEP = "Check the environment with: agentrl env check NAME"
_STEP_FIELDS = "observation, reward, terminated, truncated, info"
LONGEST_SAMPLE = 256
"""Maximum length in characters of a text space whose samples random play uses unchanged."""
RANDOM_CHARACTERS = 32
"""Maximum length in characters of a random action in a text space that allows more than `LONGEST_SAMPLE`."""


class WrongReturn(ValueError):
    """Invalid return value of an environment; the first argument describes it, and the text adds the next step."""

    def __str__(self) -> str:
        return f"{self.args[0]}. {_NEXT_STEP}"


def check_reset(returned: object) -> tuple[Content, Mapping[str, Any]]:
    """Check what `reset` returned; raise `WrongReturn` if it is invalid."""
    observation, info = unpack_reset(returned)
    _check_facts(info)
    return _checked_observation("reset", observation), info


def check_step(returned: object) -> StepResult:
    """Check what `step` returned and convert its reward and flags to plain Python types; raise `WrongReturn`."""
    result = unpack_step(returned)
    _check_components(result.info.get("reward_components", {}))
    _check_facts(result.info)
    for name in ("terminated", "truncated"):
        flag = getattr(result, name)
        if not (isinstance(flag, bool) or type(flag).__name__ == "bool"):  # numpy's own bool has this name too
            raise _wrong(f"{name} of step", flag, "True or False")
    return StepResult(
        observation=_checked_observation("step", result.observation),
        reward=_checked_reward(result.reward),
        terminated=bool(result.terminated),
        truncated=bool(result.truncated),
        info=result.info,
    )


def unpack_reset(returned: object) -> tuple[Any, Mapping[str, Any]]:
    """Unpack observation and info of `reset`; raise `WrongReturn` if it did not return a pair with a dictionary."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
        raise _wrong("reset", returned, "(observation, info dictionary)")
    return returned


def unpack_step(returned: object) -> StepResult:
    """Unpack the five values of `step` by name.

    Raises:
        WrongReturn: their number, the info's type or the reward's type is wrong. Nothing else is checked.
    """
    if not isinstance(returned, tuple):
        raise _wrong("step", returned, f"({_STEP_FIELDS})")
    if len(returned) != 5:
        raise WrongReturn(f"step returned {len(returned)} values, expected 5: {_STEP_FIELDS}")
    observation, reward, terminated, truncated, info = returned
    if not isinstance(info, Mapping):
        raise _wrong("info of step", info, "a dictionary")
    if not isinstance(returned[1], numbers.Real):
        raise _wrong("reward", reward, "a finite number")
    return StepResult(observation=observation, reward=reward, terminated=terminated, truncated=truncated, info=info)


def _checked_observation(where: str, observation: object) -> Content:
    if isinstance(observation, str):
        texts = [observation]
    elif isinstance(observation, tuple) and all(isinstance(part, TextPart | ImagePart) for part in observation):
        texts = [part.text for part in observation if isinstance(part, TextPart)]
    else:
        raise _wrong(f"observation of {where}", observation, "text, or a tuple of TextPart and ImagePart")
    characters = sum(map(len, texts))
    if characters > LARGEST_OBSERVATION:
        raise WrongReturn(
            f"the observation of {where} has {characters:,} characters, expected at most {LARGEST_OBSERVATION:,}"
        )
    try:
        for text in texts:
            if not text.isascii():
                text.encode()
    except UnicodeEncodeError:
        raise _wrong(f"observation of {where}", text, "text without lone surrogates") from None
    return cast("Content", observation)


def _check_facts(info: Mapping[str, Any]) -> None:
    """Check the entries of an info dictionary that the runtime itself reads."""
    success, task_type = info.get("success", False), info.get("task_type")
    if type(success).__name__ != "bool" and not (isinstance(success, numbers.Real) and success in (0, 1)):
        raise _wrong("success of info", success, "True or False")
    if not isinstance(task_type, str | None):
        raise _wrong("task_type of info", task_type, "text")


def _check_components(components: object) -> None:
    if not isinstance(components, Mapping):
        raise _wrong("reward_components of info", components, "a dictionary of numbers by name")
    for name, value in components.items():
        if bounded_reward(value) is None:
            raise _wrong(f"reward component {name}", value, A_REWARD)


def _checked_reward(reward: object) -> float:
    checked = bounded_reward(reward)
    if checked is None:
        raise WrongReturn(f"the reward is {shorten(reward)}, expected {A_REWARD}")
    return checked


def _wrong(what: str, got: object, expected: str) -> WrongReturn:
    shown = f"{type(got).__name__} {shorten(got)}"
    return WrongReturn(f"{what} is invalid: got {shown}, expected {expected}")


class EnvAdapter:
    """Adapter of one environment: makes it, calls it, and checks what it returns.

    All methods are coroutines, for synchronous and asynchronous environments alike; with a synchronous environment they
    never suspend.
    """

    def __init__(self, make: Callable[..., AnyEnv], options: Mapping[str, Any]) -> None:
        self.env: AnyEnv = make(**options)
        self._expert: Expert | None = None
        self._deferred_action: str | None = None
        """Action of the expert that follows after a mistake."""
        self._random: random.Random | None = None

    @property
    def is_async(self) -> bool:
        """True if the environment's own methods are coroutines."""
        return isinstance(self.env, AsyncEnv)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `agentrl.remote.env_methods`: the adapter's own, or else the environment's."""
        own = getattr(self, method, None)
        if own is not None:
            return await own(*arguments)
        return await maybe_await(self._require(method)(*arguments))

    async def reset(self, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Start an episode."""
        self._expert = self._random = self._deferred_action = None
        returned = await maybe_await(self.env.reset(seed=seed, options=dict(options)))
        observation, info = check_reset(returned)
        return ResetResult(
            observation=observation,
            info=info,
            state_key=await self.state_key(),
            action_hint=await self.action_hint(),
            tools=tuple(self._optional("tools") or ()),
        )

    async def snapshot(self) -> Any:
        """Return the environment's state, including the step counts of Gymnasium's `TimeLimit` wrappers."""
        inner = await maybe_await(self._require("snapshot")())
        counts = [layer._elapsed_steps for layer in _time_limits(self.env)]
        return {_COUNTS: counts, _INNER: inner} if counts else inner

    async def step(self, action: str) -> Stepped:
        """Take an action."""
        result = check_step(await maybe_await(self.env.step(action)))
        return Stepped(result=result, state_key=await self.state_key())

    async def admissible_actions(self) -> list[str] | None:
        """List the actions that the environment accepts now; ``None`` if it cannot list them."""
        method = self._optional("admissible_actions")
        actions = None if method is None else await maybe_await(method())
        return None if actions is None else list(actions)

    async def expert_action(self, observation: Content, seed: int = 0, mistakes: float = 0.0) -> ExpertAction:
        """Ask the environment's own expert for its next action.

        With probability `mistakes`, drawn with `seed`, the action is a mistake, unless the previous action was one or
        the expert has none to make.
        """
        expert = self._expert or await self._begin_expert()
        if self._deferred_action is not None:
            action, self._deferred_action = self._deferred_action, None
            return ExpertAction(text=action)
        action = str(await maybe_await(expert.act(observation)))
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
        """Return the message that takes a text action by calling the environment's tools; ``None`` without tools."""
        method = self._optional("tool_message")
        return None if method is None else cast("Message", await maybe_await(method(action)))

    async def random_action(self, seed: int) -> str:
        """Draw a random admissible action, or sample the action space if the environment cannot list actions."""
        actions = await self.admissible_actions()
        if actions is not None:
            if self._random is None:
                self._random = random.Random(seed)
            return self._random.choice(actions)
        space = self._optional("action_space")
        if space is None:
            raise UsageError("a random policy needs admissible_actions() or an action_space")
        if self._random is None:
            self._random = random.Random(seed)
            space.seed(seed % 2**32)
        return await sample_text(space)

    async def expert(self) -> bool:
        """Request the environment's expert for later calls of `expert_action`; return True if it can make mistakes."""
        return hasattr(await self._begin_expert(), "mistake")

    async def expert_mistake(self, random_state: Sequence[Any]) -> tuple[str | None, list[Any]]:
        """Draw the expert's mistake in place of its last action; return it and the generator's state after it."""
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
        return str(self._optional("action_hint") or "")

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
        method = self._optional("state_key")
        return None if method is None else str(await maybe_await(method()))

    async def _begin_expert(self) -> Expert:
        method = self._optional("expert")
        if method is None:
            raise UsageError("the environment has no expert", hint="give it an expert() method, or another policy")
        self._expert, self._deferred_action = cast("Expert", await maybe_await(method())), None
        return self._expert

    def _optional(self, name: str) -> Any:
        return optional_part(self.env, name)

    def _require(self, name: str) -> Any:
        method = self._optional(name)
        if method is None:
            raise UsageError(f"the environment has no {name}()")
        return method


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
    if most <= LONGEST_SAMPLE:
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
