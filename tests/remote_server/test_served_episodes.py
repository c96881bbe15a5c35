"""Episodes that clients of other protocols play, when something goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentrl.env import AsyncEnv, EnvironmentSpec
from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.remote.server import ServerSettings
from agentrl.remote.server.episodes import EpisodeHost, TaskChoice
from agentrl.task import SeedTasks
from agentrl.tool import Tool, ToolResult


class Shop(AsyncEnv):
    """Has a tool that ends the episode, and rejects seed 3."""

    made = 0

    def __init__(self) -> None:
        Shop.made += 1
        self.tools = (Tool(self.pay, inline=True),)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        if seed == 3:
            raise UsageError("the shop has no such shelf", got=seed)
        return "welcome", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "nothing happens", 0.0, False, False, {"success": False}

    def pay(self) -> ToolResult:
        """Pay."""
        return ToolResult("paid", reward=1.0, stop=True)


def shop_tasks(split: str, **_: Any) -> SeedTasks:
    if split == "test":
        raise KeyError("no such column")
    return SeedTasks("shop", "train", size=0 if split == "valid" else 5)


SHOP = EnvironmentSpec(
    name="shop", make=Shop, tasks=shop_tasks, splits=("train", "valid", "test"), success_threshold=1.0
)


@asynccontextmanager
async def shop(**settings: Any) -> AsyncIterator[EpisodeHost]:
    Shop.made = 0
    host = EpisodeHost(SHOP, {}, ServerSettings(**settings), starter="reset")
    yield host
    await host.close()


async def test_a_session_that_is_closed_while_it_waits_for_an_environment_returns_it() -> None:
    async with shop(max_sessions=1) as host:
        one, two, three = (host.open() for _ in range(3))
        await one.start(TaskChoice(index=0))
        waiting = asyncio.create_task(two.start(TaskChoice(index=0)))
        for _ in range(5):
            await asyncio.sleep(0)
        await two.close()
        await one.close()
        with pytest.raises(UsageError, match="the session was closed"):
            await waiting
        async with asyncio.timeout(5):
            await three.start(TaskChoice(index=0))
        await three.close()
        assert Shop.made == 1


async def test_a_rejected_reset_ends_the_previous_episode() -> None:
    async with shop() as host:
        session = host.open()
        await session.start(TaskChoice(index=0))
        with pytest.raises(UsageError, match="no such shelf"):
            await session.start(TaskChoice(index=3))
        assert session.state.task is None
        with pytest.raises(UsageError, match="no episode is running"):
            await session.step("look")
        await session.close()


async def test_a_tool_that_ends_the_episode_decides_its_success() -> None:
    async with shop() as host:
        session = host.open()
        await session.start(TaskChoice(index=0))
        await session.step("look")
        assert session.state.success is False
        await session.call_tool("pay", {})
        assert (session.state.is_over, session.state.total, session.state.success) == (True, 1.0, True)
        await session.close()


async def test_error_names_tasks_that_cannot_be_loaded() -> None:
    async with shop() as host:
        session = host.open()
        with pytest.raises(UsageError, match="the split valid of environment shop has no tasks"):
            await session.start(TaskChoice(split="valid"))
        with pytest.raises(EnvironmentFailure, match="loading the tasks of shop/test"):
            await session.start(TaskChoice(split="test"))
        await session.close()
