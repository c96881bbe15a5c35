"""What `reset` and `step` of an environment may return. Runs and the environment check refuse the same."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from agentrl.env import StepResult
from agentrl.errors import A_REWARD, bounded_reward, shortened
from agentrl.message import Content, ImagePart, TextPart

LARGEST_OBSERVATION = 10_000_000
"""Maximum number of characters of an observation, over all its parts."""
_NEXT_STEP = "Check the environment with: agentrl env check NAME"
_STEP_FIELDS = "observation, reward, terminated, truncated, info"


class WrongReturn(ValueError):
    """An environment returned what it may not; the first argument says what, the text adds the next step."""

    def __str__(self) -> str:
        return f"{self.args[0]}. {_NEXT_STEP}"


def checked_pair(returned: object) -> tuple[Content, Mapping[str, Any]]:
    """What `reset` returned, if it may.

    Raises:
        WrongReturn: it may not.
    """
    observation, info = unpacked_pair(returned)
    _check_facts(info)
    return _checked_observation("reset", observation), info


def checked_step(returned: object) -> StepResult:
    """What `step` returned, if it may, with a plain reward and plain flags.

    Raises:
        WrongReturn: it may not.
    """
    result = unpacked_step(returned)
    _check_components(result.info.get("reward_components", {}))
    _check_facts(result.info)
    flags: dict[str, Any] = {"terminated": result.terminated, "truncated": result.truncated}
    for name, flag in flags.items():
        if not (isinstance(flag, bool) or type(flag).__name__ == "bool"):  # numpy's own bool has this name too
            raise _wrong(f"{name} of step", flag, "True or False")
    return StepResult(
        observation=_checked_observation("step", result.observation),
        reward=_checked_reward(result.reward),
        terminated=bool(result.terminated),
        truncated=bool(result.truncated),
        info=result.info,
    )


def unpacked_pair(returned: object) -> tuple[Any, Mapping[str, Any]]:
    """Observation and info of `reset`; only the pair itself is checked.

    Raises:
        WrongReturn: it is no pair of something and a dictionary.
    """
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
        raise _wrong("reset", returned, "(observation, info dictionary)")
    return returned


def unpacked_step(returned: object) -> StepResult:
    """The five values of `step` by name; only their number, the info and the reward's type are checked.

    Raises:
        WrongReturn: they are not five, the info is no dictionary, or the reward no number.
    """
    if not isinstance(returned, tuple):
        raise _wrong("step", returned, f"({_STEP_FIELDS})")
    if len(returned) != 5:
        raise WrongReturn(f"step returned {len(returned)} values, expected 5: {_STEP_FIELDS}")
    observation, reward, terminated, truncated, info = returned
    if not isinstance(info, Mapping):
        raise _wrong("info of step", info, "a dictionary")
    if not _is_number(reward):
        raise _wrong("reward", reward, "a finite number")
    return StepResult(observation=observation, reward=reward, terminated=terminated, truncated=truncated, info=info)


def _checked_observation(where: str, observation: object) -> Content:
    if isinstance(observation, str):
        _check_length(where, len(observation))
        if not observation.isascii():
            _check_text(where, observation)
        return observation
    if isinstance(observation, tuple) and all(isinstance(part, TextPart | ImagePart) for part in observation):
        _check_length(where, sum(len(part.text) for part in observation if isinstance(part, TextPart)))
        return observation
    raise _wrong(f"observation of {where}", observation, "text, or a tuple of TextPart and ImagePart")


def _check_length(where: str, characters: int) -> None:
    if characters > LARGEST_OBSERVATION:
        raise WrongReturn(
            f"the observation of {where} has {characters:,} characters, expected at most {LARGEST_OBSERVATION:,}"
        )


def _check_text(where: str, observation: str) -> None:
    try:
        observation.encode()
    except UnicodeEncodeError:
        raise _wrong(f"observation of {where}", observation, "text without lone surrogates") from None


def _check_facts(info: Mapping[str, Any]) -> None:
    """What the runtime itself reads from an info dictionary."""
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


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real)


def _checked_reward(reward: object) -> float:
    checked = bounded_reward(reward)
    if checked is None:
        raise WrongReturn(f"the reward is {shortened(reward)}, expected {A_REWARD}")
    return checked


def _wrong(what: str, got: object, expected: str) -> WrongReturn:
    shown = f"{type(got).__name__} {shortened(got)}"
    return WrongReturn(f"{what} is not what an environment may return: got {shown}, expected {expected}")
