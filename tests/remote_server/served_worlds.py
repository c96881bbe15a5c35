"""Worlds for tests of environment servers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import gymnasium

from agentrl.env import AsyncEnv, EnvironmentSpec, Isolation
from agentrl.errors import ToolError, UsageError
from agentrl.message import ImagePart, TextPart
from agentrl.task import SeedTasks
from agentrl.tool import Tool


class Stairs(gymnasium.Env[str, str]):
    """Climb three steps, one "up" each. Counts what it does, and fails when told to."""

    observation_space = action_space = gymnasium.spaces.Text(50)
    made = steps = resets = closed = 0

    def __init__(self) -> None:
        Stairs.made += 1
        self.tools = (Tool(self.look_around, inline=True), Tool(self.stumble, inline=True))
        self.rng = random.Random(0)
        self.height = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        if (options or {}).get("impossible"):
            raise UsageError("there are no such stairs", got="impossible")
        Stairs.resets += 1
        self.height, self.rng = 0, random.Random(seed)
        return f"stairs {seed}", {"task_type": "stairs", "options": dict(options or {})}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        Stairs.steps += 1
        if action == "fail":
            raise RuntimeError("the stairs broke")
        if action == "unsendable":
            return "", 0.0, False, False, {"thing": object()}
        self.height += action == "up"
        done = self.height == 3
        return f"step {self.height}", float(done), done, False, {"success": done, "valid": action == "up"}

    def look_around(self, far: bool) -> str:
        """Look around.

        Args:
            far: Into the distance.
        """
        if not far:
            raise ToolError("there is nothing near")
        return f"{self.height} steps below you"

    def stumble(self) -> str:
        """Stumble."""
        raise ValueError("ouch")

    def state_key(self) -> str:
        return str(self.height)

    def snapshot(self) -> dict[str, Any]:
        return {"height": self.height, "large": 2**100, "random": self.rng.getstate()[1][:3]}

    def restore(self, data: dict[str, Any]) -> None:
        assert data["large"] == 2**100
        self.height = data["height"]

    def expert(self) -> Climber:
        return Climber()

    def final_reward(self) -> tuple[float, dict[str, Any]]:
        return self.height / 10, {"success": False, "reward_components": {"height": self.height}}

    def close(self) -> None:
        Stairs.closed += 1


class Climber:
    def act(self, observation: Any) -> str:
        return "up"

    def mistake(self, rng: random.Random) -> str | None:
        return rng.choice(["down", "left", "right"])


class Waiting(AsyncEnv):
    """Awaits; speaks in pictures."""

    action_hint = "anything"
    gate: asyncio.Event

    def __init__(self) -> None:
        self.tools = (Tool(self.photograph, inline=True),)

    def photograph(self) -> list[Any]:
        """Take a picture."""
        return ["here", ImagePart(data=b"\0")]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        await asyncio.sleep(0)
        self.turns = 0
        return (TextPart(text=f"picture {seed}"), ImagePart(data=bytes(range(256)))), {}

    async def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == "wait":
            await Waiting.gate.wait()
        self.turns += 1
        return f"you said {action}", 0.25, False, self.turns == 4, {"success": False}

    def admissible_actions(self) -> list[str]:
        return ["yes", "no", "\N{SNOWMAN}"]


def stairs_tasks(split: str, **_: Any) -> SeedTasks:
    if split == "test":
        raise UsageError("the test split is not here", hint="download it")
    return SeedTasks("stairs", split, size=250)


STAIRS = EnvironmentSpec(
    name="stairs",
    make=Stairs,
    tasks=stairs_tasks,
    splits=("train", "valid", "test"),
    description="Stairs.",
    instructions="Climb.",
    tool_instructions="Climb with tools.",
    max_turns=7,
    reward_range=(float("-inf"), 1.0),
    success_threshold=1.0,
    scores={"expert": 1.0},
    isolation=Isolation.INLINE,
)
WAITING = EnvironmentSpec(
    name="waiting",
    make=Waiting,
    tasks=lambda split, **_: SeedTasks("waiting", split, size=20),
    reward_range=(0.0, 1.0),
)
