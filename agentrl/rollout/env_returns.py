"""Checks of what an environment's `reset` and `step` return. Runs and `agentrl env check` refuse the same values."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from agentrl.env import AnyEnv, Expert, StepResult
from agentrl.errors import A_REWARD, WrongReturnValue, bounded_reward, is_bool, raised_at, shorten
from agentrl.message import Content, ImagePart, Message, TextPart, encodable
from agentrl.remote.env_methods import OPTIONAL_PARTS, FinalReward
from agentrl.tool import Tool

MAX_OBSERVATION_CHARS = 10_000_000
"""Maximum number of characters of an observation, over all its parts."""
_STEP_FIELDS = "observation, reward, terminated, truncated, info"


class WrongReturn(WrongReturnValue):
    """Invalid return value of an environment."""


def check_reset(returned: object) -> tuple[Content, Mapping[str, Any]]:
    """Check what `reset` returned; raise `WrongReturn` if it is invalid."""
    observation, info = unpack_reset(returned)
    return _checked_observation("reset", observation), _checked_facts(info)


def check_step(returned: object) -> StepResult:
    """Check what `step` returned and convert what is stored to plain Python types; raise `WrongReturn`."""
    result = unpack_step(returned)
    info = _checked_facts(result.info)
    for name in ("terminated", "truncated"):
        flag = getattr(result, name)
        if not is_bool(flag):
            raise _wrong(f"{name} of step", flag, "True or False")
    return StepResult(
        observation=_checked_observation("step", result.observation),
        reward=_checked_reward(result.reward),
        terminated=bool(result.terminated),
        truncated=bool(result.truncated),
        info=info,
    )


def check_final_reward(returned: object) -> FinalReward | None:
    """Check what `final_reward` returned: a number, a number and an info, or ``None``; raise `WrongReturn` if not."""
    if returned is None:
        return None
    if isinstance(returned, FinalReward):  # of a remote environment
        returned = returned.reward, returned.info
    reward, info = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(info, Mapping):
        raise _wrong("info of final_reward", info, "a dictionary")
    if bounded_reward(reward) is None:
        raise _wrong("final_reward", returned, f"{A_REWARD}, or such a number and an info")
    return FinalReward(reward=_checked_reward(reward), info=_checked_facts(info))


def check_environment(env: Any) -> AnyEnv:
    """Check that a function that creates environments returned one; raise `WrongReturn` otherwise."""
    if isinstance(env, type) or not all(callable(getattr(env, name, None)) for name in ("reset", "step", "close")):
        raise _wrong("the created environment", env, "an object with reset, step and close")
    return cast("AnyEnv", env)


def explain_reset(env: Any, error: TypeError) -> Exception:
    """Return a `WrongReturn` if the environment's `reset` does not take its arguments; else the error itself."""
    reset = getattr(env, "unwrapped", env).reset
    try:
        inspect.signature(reset).bind(seed=0, options={})
    except TypeError:
        return WrongReturn(
            f"reset does not take its arguments: got reset{inspect.signature(reset)}, expected "
            "reset(self, *, seed=None, options=None)"
        )
    except ValueError:  # some functions written in C have no signature
        pass
    return error


def check_method(name: str, found: object) -> Any:
    """Check an optional method of an environment; raise `WrongReturn` if it cannot be called."""
    if found is not None and not callable(found):
        raise _wrong(name, found, "a method")
    return found


def check_part(name: str, part: Any) -> Any:
    """Check an optional attribute of an environment before it is used; raise `WrongReturn` if it has a wrong type."""
    if name == "tools":
        check_tools(part)
    elif name == "action_hint":
        check_action_hint(part)
    elif name in OPTIONAL_PARTS and name != "action_space":
        check_method(name, part)
    return part


def check_tools(tools: object) -> tuple[Tool, ...]:
    """Check the attribute ``tools`` of an environment; raise `WrongReturn` if it is not a list of tools."""
    if tools is None:
        return ()
    expected = "a list of tools, such as [agentrl.tool(self.look)]"
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise _wrong("tools of the environment", tools, expected)
    for tool in tools:
        if not isinstance(tool, Tool):
            raise _wrong("a tool of the environment", tool, expected)
    return tuple(tools)


def check_action_hint(hint: object) -> str:
    """Check the attribute ``action_hint`` of an environment; raise `WrongReturn` if it is not text."""
    if hint is None:
        return ""
    if not isinstance(hint, str):
        raise _wrong("action_hint of the environment", hint, "text, as an attribute or a property")
    return hint


def check_state_key(key: object) -> str | None:
    """Check what `state_key` returned, and return it as text; raise `WrongReturn` if its text is only an address."""
    if key is None:
        return None
    if type(key).__str__ is object.__str__ and type(key).__repr__ is object.__repr__:
        raise _wrong("state_key", key, "text that is equal for equal states, or None if the state has no key")
    return str(key)


def check_actions(actions: object) -> list[str] | None:
    """Check what `admissible_actions` returned; raise `WrongReturn` if it is not a list of texts."""
    if actions is None:
        return None
    if isinstance(actions, str | bytes | Mapping) or not isinstance(actions, Iterable):
        raise _wrong("admissible_actions", actions, "a list of texts")
    return [_plain_text("an action of admissible_actions", action) for action in actions]


def require_actions(actions: list[str]) -> list[str]:
    """Check that actions are listed before one is chosen; raise `WrongReturn` if there are none."""
    if not actions:
        raise _wrong("admissible_actions", actions, "at least one action until the episode ends, or None")
    return actions


def check_expert(expert: object) -> Expert:
    """Check what `expert` returned; raise `WrongReturn` if it cannot act."""
    if not callable(getattr(expert, "act", None)):
        raise _wrong("expert", expert, "an object with a method act(observation)")
    return cast("Expert", expert)


def check_expert_action(action: object) -> str:
    """Return the text of an expert's action, which may be a number; raise `WrongReturn` if there is no action."""
    if action is None:
        raise _wrong("act of the expert", action, "an action as text")
    return str(action)


def check_tool_message(message: object) -> Message | None:
    """Check what `tool_message` returned; raise `WrongReturn` if it is neither a message nor ``None``."""
    if message is not None and not isinstance(message, Message):
        raise _wrong("tool_message", message, "a Message with tool_calls, or None")
    return message


def explain_unpacking(error: Exception) -> Exception:
    """Return a `WrongReturn` if a wrapper of Gymnasium could not unpack what `step` returned; else the error itself.

    The wrapper unpacks the five values before `check_step` sees them, and its error does not name `step`.
    """
    place = raised_at(error)
    if place is None or "/gymnasium/" not in place.file or "unpack" not in str(error):
        return error
    return WrongReturn(f"step did not return ({_STEP_FIELDS}): {error}")


def unpack_reset(returned: object) -> tuple[Any, Mapping[str, Any]]:
    """Unpack observation and info of `reset`; raise `WrongReturn` if it did not return a pair with a dictionary."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
        raise _wrong("reset", returned, "(observation, info dictionary)")
    return returned


def unpack_step(returned: object) -> StepResult:
    """Unpack the five values of `step` by name.

    Raises:
        WrongReturn: their number, the info's type or the reward's type is wrong. Nothing else is checked. An array
            with one element as the reward becomes a number.
    """
    if not isinstance(returned, tuple):
        raise _wrong("step", returned, f"({_STEP_FIELDS})")
    if len(returned) != 5:
        raise WrongReturn(f"step returned {len(returned)} values, expected 5: {_STEP_FIELDS}")
    observation, reward, terminated, truncated, info = returned
    if not isinstance(info, Mapping):
        raise _wrong("info of step", info, "a dictionary")
    number = bounded_reward(reward)
    if number is None and not isinstance(reward, numbers.Real):
        raise _wrong("reward", reward, "a finite number")
    reward = reward if number is None else number
    return StepResult(observation=observation, reward=reward, terminated=terminated, truncated=truncated, info=info)


def _checked_observation(where: str, observation: object) -> Content:
    if isinstance(observation, str):
        texts = [observation]
    elif isinstance(observation, tuple) and all(map(_is_part, observation)):
        texts = [part.text for part in observation if isinstance(part, TextPart)]
    else:
        raise _wrong(f"observation of {where}", observation, "text, or a tuple of TextPart and ImagePart")
    characters = sum(map(len, texts))
    if characters > MAX_OBSERVATION_CHARS:
        raise WrongReturn(
            f"the observation of {where} has {characters:,} characters, expected at most {MAX_OBSERVATION_CHARS:,}"
        )
    try:
        for text in texts:
            if not text.isascii():
                text.encode()
    except UnicodeEncodeError:
        raise _wrong(f"observation of {where}", text, "text without lone surrogates") from None
    return cast("Content", observation)


def _is_part(part: object) -> bool:
    return isinstance(part, ImagePart) or (isinstance(part, TextPart) and isinstance(part.text, str))


def _checked_facts(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the entries of an info dictionary that the runtime itself reads; return them in plain Python types."""
    success, task_type = info.get("success", False), info.get("task_type")
    if not is_bool(success) and bounded_reward(success) not in (0, 1):
        raise _wrong("success of info", success, "True or False")
    plain: dict[str, Any] = {}
    if task_type is not None:
        plain["task_type"] = _plain_text("task_type of info", task_type)
    if "reward_components" in info:
        plain["reward_components"] = _checked_components(info["reward_components"])
    return {**info, **plain} if plain else info


def _checked_components(components: object) -> dict[str, float]:
    if not isinstance(components, Mapping):
        raise _wrong("reward_components of info", components, "a dictionary of numbers by name")
    checked: dict[str, float] = {}
    for name, value in components.items():
        text, number = _plain_text("a name in reward_components of info", name), bounded_reward(value)
        if number is None:
            raise _wrong(f"reward component {text}", value, A_REWARD)
        checked[text] = number
    return checked


def _plain_text(what: str, value: object) -> str:
    """Return a text, or one of a subclass such as NumPy's, as a plain `str`, which keys of stored records must be."""
    if not isinstance(value, str):
        raise _wrong(what, value, "text")
    if encodable(value) != value:
        raise _wrong(what, value, "text without lone surrogates")
    return str.__str__(value)


def _checked_reward(reward: object) -> float:
    checked = bounded_reward(reward)
    if checked is None:
        raise WrongReturn(f"the reward is {shorten(reward)}, expected {A_REWARD}")
    return checked


def _wrong(what: str, got: object, expected: str) -> WrongReturn:
    shown = f"{type(got).__name__} {shorten(got)}"
    return WrongReturn(f"{what} is invalid: got {shown}, expected {expected}")
