"""Plays a served environment with OpenEnv's own clients, in its environment: ``python openenv_client.py WHAT URL``."""

import asyncio
import json
import sys

from openenv.core import GenericEnvClient, MCPToolClient
from openenv.core.env_server.mcp_types import CallToolAction


def next_guess(low: int, high: int, text: str, guess: int) -> tuple[int, int]:
    return (guess + 1, high) if text.startswith("Higher") else (low, guess - 1)


async def guess(url: str, index: int) -> dict[str, object]:
    """Find the number by halving."""
    async with GenericEnvClient(base_url=url) as env:
        result = await env.reset(split="valid", index=index)
        low, high, rewards = 1, 100, []
        while not result.done:
            tried = (low + high) // 2
            result = await env.step({"action": str(tried)})
            rewards.append(result.reward)
            low, high = next_guess(low, high, result.observation["text"], tried)
        state = await env.state()
        return {"task": state["task_id"], "rewards": rewards, "success": state["success"], "steps": state["step_count"]}


async def episodes(url: str) -> object:
    return await asyncio.gather(*(guess(url, index) for index in range(4)))


def synchronous(url: str) -> object:
    with GenericEnvClient(base_url=url).sync() as env:
        first = env.reset(seed=3)
        again = env.reset(seed=3)
        assert first.observation["text"] == again.observation["text"]
        return {"text": first.observation["text"], "done": first.done, "metadata": first.metadata["task_id"]}


async def mistakes(url: str) -> object:
    """What the client raises for wrong calls."""
    said = []
    async with GenericEnvClient(base_url=url) as env:
        for call in (
            lambda: env.step({"action": "50"}),
            lambda: env.reset(split="vald"),
            lambda: env.reset(level=3),
            lambda: env.reset(seed=1),
            lambda: env.step({"message": "50"}),
        ):
            try:
                await call()
                said.append("")
            except RuntimeError as error:
                said.append(str(error))
    return said


async def full(url: str) -> object:
    """A session more than the server has."""
    async with GenericEnvClient(base_url=url) as one:
        await one.reset()
        async with GenericEnvClient(base_url=url) as two:
            try:
                await two.reset()
            except RuntimeError as error:
                refused = str(error)
    async with GenericEnvClient(base_url=url) as three:
        return {"refused": refused, "after": (await three.reset()).done}


async def tools(url: str) -> object:
    async with MCPToolClient(base_url=url) as env:
        begun = await env.reset(split="train", index=0)
        listed = [tool.name for tool in await env.list_tools()]
        found = await env.call_tool("search", query="river")
        stepped = await env.step(CallToolAction(tool_name="search", arguments={"query": "river"}))
        try:
            await env.call_tool("search", words="river")
            wrong = ""
        except RuntimeError as error:
            wrong = str(error)
        unknown = await env.step(CallToolAction(tool_name="fly", arguments={}))
        return {
            "question": begun.observation.text,
            "tools": listed,
            "found": found,
            "same": stepped.observation.result == found,
            "done": stepped.done,
            "wrong": wrong,
            "unknown": unknown.observation.error.error_type.value,
        }


async def patient(url: str) -> object:
    """A step that takes longer than the client waits for the answers to its pings."""
    async with GenericEnvClient(base_url=url, websocket_ping_interval_s=0.2, websocket_ping_timeout_s=0.5) as env:
        await env.reset()
        return (await env.step({"action": "2"})).observation["text"]


if __name__ == "__main__":
    played = globals()[sys.argv[1]](sys.argv[2])
    print(json.dumps(asyncio.run(played) if asyncio.iscoroutine(played) else played))
