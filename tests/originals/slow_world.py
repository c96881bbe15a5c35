"""A world that takes its time, for tests of connections."""

from __future__ import annotations

import time
from typing import Any

import gymnasium


class Slow(gymnasium.Env[str, str]):
    """Sleeps for as many seconds as the action says."""

    observation_space = action_space = gymnasium.spaces.Text(50)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "how long?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(float(action))
        return f"slept {action} s", 0.0, False, False, {}
