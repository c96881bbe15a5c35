"""The expert and the action space of a served environment."""

from __future__ import annotations

import random
from collections.abc import Awaitable
from typing import Any, Protocol

from agentrl.message import Content
from agentrl.remote.wire import write_content


class CallSession(Protocol):
    """Asks a session of the server for something."""

    def __call__(self, method: str, **arguments: Any) -> Awaitable[Any]:
        """Ask, and get the answer's JSON."""


class RemoteExpert:
    """The expert that the environment made over there.

    Args:
        call: Asks the session.
    """

    def __init__(self, call: CallSession) -> None:
        self._call = call

    async def act(self, observation: Content) -> str:
        """The next action, given the observation that followed the last one."""
        return str((await self._call("expert_action", observation=write_content(observation)))["action"])


class RemoteFallibleExpert(RemoteExpert):
    """One that can make mistakes."""

    async def mistake(self, rng: random.Random) -> str | None:
        """A mistake in place of the last action, drawn with `rng` as here: its state goes there and back."""
        version, numbers, gauss = rng.getstate()
        answer = await self._call("expert_mistake", random_state=[version, list(numbers), gauss])
        version, numbers, gauss = answer["random_state"]
        rng.setstate((version, tuple(numbers), gauss))
        mistake: str | None = answer["action"]
        return mistake


class RemoteActionSpace:
    """The environment's action space, as far as a random policy uses it.

    Args:
        call: Asks the session.
    """

    def __init__(self, call: CallSession) -> None:
        self._call = call
        self._seed: int | None = None

    def seed(self, seed: int) -> None:
        """Decides what the next samples are."""
        self._seed = seed

    async def sample(self) -> str:
        """A random action."""
        seed, self._seed = self._seed, None
        return str((await self._call("sample", seed=seed))["action"])
