"""Environment of live traffic, which has no tasks of its own."""

from __future__ import annotations

from typing import Any

import gymnasium

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.task import SeedTasks


class NoEnvironment(gymnasium.Env[str, str]):
    """Environment without a task; clients bring their own."""

    observation_space = action_space = gymnasium.spaces.Text(1)
    action_hint = "whatever the client requests"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Return nothing to observe."""
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode; the gateway's sessions take no actions."""
        return "", 0.0, True, False, {}


LIVE = EnvironmentSpec(name="live", make=NoEnvironment, tasks=SeedTasks, isolation=Isolation.INLINE)
