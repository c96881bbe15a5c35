"""Adapter that turns a Gymnasium environment with numbers in and out into one with text in and out.

    class LineWalk(TextAdapter):
        def __init__(self) -> None:
            super().__init__(gymnasium.make("MyLine-v0"), actions=("left", "right"), max_steps=20)

An action is a name or a number. Any other answer changes nothing: the observation says what an action is, and
``info["valid"]`` is false.
"""

from __future__ import annotations

import copy
import re
import string
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from agentrl.errors import UsageError
from agentrl.message import MAX_DIGITS, Content

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


class TextAdapter(gymnasium.Env[Content, str]):
    """Environment with text observations and actions around one with numbers.

    Args:
        env: The inner environment. Its actions are `Discrete`, or a `MultiDiscrete`, `MultiBinary` or `Box` of few
            numbers; its observations these, `Text`, or a `Dict` or `Tuple` of them.
        actions: Names of a `Discrete` space's actions, in the space's order; numbers if left out.
        max_steps: Steps after which an episode is truncated, including those with invalid actions.

    Raises:
        UsageError: the spaces have no text form, or there is not one name per action.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], *, actions: Sequence[str] | None = None, max_steps: int | None = None
    ) -> None:
        self.inner = env
        self.max_steps = max_steps
        self.names = _action_names(env.action_space, actions)
        self.observation_space: spaces.Space[Content] = spaces.Text(8192, charset=string.printable)
        self.action_space: spaces.Space[str] = (
            spaces.Text(256, charset=string.printable) if self.names else NumbersText(env.action_space)
        )
        self._steps = 0
        self._observation: Any = None

    @property
    def action_hint(self) -> str:
        """Description of an action, with an example."""
        if self.names:
            return f"{' or '.join(self.names)}, for example: {self.names[0]}"
        space = self.inner.action_space
        example = np.zeros(space.shape or ())
        if isinstance(space, spaces.Box):
            example = np.clip(example, space.low, space.high)
        elif isinstance(space, spaces.MultiDiscrete):
            example = space.start
        return f"{_size(space)} numbers separated by spaces, for example: {_number_words(example)}"

    def admissible_actions(self) -> list[str] | None:
        """Return the names of the actions; ``None`` if actions are numbers."""
        return list(self.names) or None

    def describe(self, observation: Any) -> str:
        """Return the text of an observation; subclasses may override it."""
        return describe(self.inner.observation_space, observation)

    def show(self, observation: Any, *, before: str = "") -> Content:
        """Return the observation in the form that the agent reads, after the line `before` if it is not empty."""
        text = self.describe(observation)
        return f"{before}\n{text}" if before else text

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Start an episode of the inner environment."""
        super().reset(seed=seed)
        self._steps = 0
        self._observation, info = self.inner.reset(seed=seed, options=options)
        return self.show(self._observation), dict(info)

    def step(self, action: str) -> tuple[Content, float, bool, bool, dict[str, Any]]:
        """Take the action that the text names."""
        self._steps += 1
        is_late = self.max_steps is not None and self._steps >= self.max_steps
        parsed = self.parse(action)
        if parsed is None:
            problem = f"{_quote(action)} is not an action, so nothing happened. An action is {self.action_hint}"
            return self.show(self._observation, before=problem), 0.0, False, is_late, {"valid": False}
        self._observation, reward, terminated, truncated, info = self.inner.step(parsed)
        is_truncated = bool(truncated) or (is_late and not terminated)
        return self.show(self._observation), float(reward), bool(terminated), is_truncated, {**info, "valid": True}

    def parse(self, text: str) -> Any | None:
        """Return the inner action of a text; ``None`` if the text is not an unambiguous action."""
        space = self.inner.action_space
        if isinstance(space, spaces.Discrete):
            index = _find_name(text, self.names)
            return None if index is None else int(space.start) + index
        values = [float(number) for number in _NUMBER.findall(text)]
        if len(values) != _size(space):
            return None
        with np.errstate(over="ignore", invalid="ignore"):  # too large numbers become infinite, outside the space
            parsed = np.array(values).reshape(space.shape).astype(space.dtype)
        return parsed if space.contains(parsed) else None

    def close(self) -> None:
        """Close the inner environment."""
        self.inner.close()


class NumbersText(spaces.Text):
    """Texts of which a random sample is an action of a space of numbers, for random play.

    Args:
        numbers: Space of the numbers.
    """

    def __init__(self, numbers: spaces.Space[Any]) -> None:
        super().__init__(256, charset=string.printable)
        self._numbers = copy.deepcopy(numbers)

    def seed(self, seed: int | None = None) -> int:
        """Seed the samples."""
        self._numbers.seed(seed)
        return super().seed(seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return random numbers of the space."""
        return _number_words(self._numbers.sample())


def describe(space: spaces.Space[Any], value: Any) -> str:
    """Return the text of a value of a space: numbers in brackets, and each part of a `Dict` or `Tuple` on its own line.

    Raises:
        UsageError: the space has no text form.
    """
    match space:
        case spaces.Text():
            return str(value)
        case spaces.Discrete():
            return str(int(value))
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return _describe_array(np.asarray(value))
        case spaces.Dict():
            return "\n".join(f"{name}: {describe(part, value[name])}" for name, part in space.spaces.items())
        case spaces.Tuple():
            return "\n".join(describe(part, item) for part, item in zip(space.spaces, value, strict=True))
        case _:
            raise UsageError("this observation space has no text form", got=space, expected="numbers or text")


def _describe_array(array: np.ndarray[Any, Any]) -> str:
    if array.ndim > 1:
        return "\n".join(_describe_array(row) for row in array)
    if np.issubdtype(array.dtype, np.integer):
        return f"[{' '.join(str(int(item)) for item in np.atleast_1d(array))}]"
    return f"[{' '.join(f'{float(item):.4g}' for item in np.atleast_1d(array))}]"


def _action_names(space: spaces.Space[Any], names: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(space, spaces.Discrete):
        chosen = tuple(names or (str(int(space.start) + i) for i in range(int(space.n))))
        if len(set(chosen)) != space.n:
            raise UsageError("action names do not fit the space", got=chosen, expected=f"{space.n} different names")
        return chosen
    if not isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary) or names:
        raise UsageError(
            "these actions have no text form", got=space, expected="Discrete (with names), or a few numbers without"
        )
    return ()


def _find_name(text: str, names: Sequence[str]) -> int | None:
    """Return the index of the only name or number in `text`; ``None`` if there are none or several."""
    lowered = text.strip().lower()
    mentioned = [i for i, name in enumerate(names) if re.search(rf"(?<!\w){re.escape(name.lower())}(?!\w)", lowered)]
    if len(mentioned) == 1:
        return mentioned[0]
    number = int(lowered) if lowered.isdecimal() and len(lowered) <= MAX_DIGITS else -1
    return number if not mentioned and 0 <= number < len(names) else None


def _size(space: spaces.Space[Any]) -> int:
    return int(np.prod(space.shape or ()))


def _number_words(numbers: Any) -> str:
    return " ".join(str(number).removesuffix(".0") for number in np.ravel(numbers).tolist())


def _quote(text: str) -> str:
    shown = text.strip()
    return repr(shown if len(shown) <= 60 else f"{shown[:60]}...")
