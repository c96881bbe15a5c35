"""The adapter of the Open Reward Standard against a server that answers wrongly; tests/originals has a real one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from agentrl.envs.openreward import OpenRewardEnvironment, tasks
from aiohttp import web

from agentrl.errors import EnvironmentFailure, ToolError, UsageError
from agentrl.rollout.env_workers import call_own_tool
from agentrl.tool import ToolResult


class Server:
    """Answers with what a test sets."""

    def __init__(self) -> None:
        self.url = ""
        self.names: Any = ["world"]
        self.splits: Any = [{"name": "train", "type": "train"}]
        self.called: Any = None

    async def answer(self, request: web.Request) -> web.Response:
        match request.path.split("/")[-1]:
            case "list_environments":
                return web.json_response(self.names)
            case "splits":
                return web.json_response(self.splits)
            case "create_session":
                return web.Response(text="event: task_id\ndata: one\n\n")
            case "prompt":
                return web.json_response([{"type": "text", "text": "go"}])
            case "task_tools":
                return web.json_response({"tools": [{"name": "add"}]})
            case "call":
                return web.Response(text=f"event: end\ndata: {json.dumps(self.called)}\n\n")
        return web.json_response({})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = "http://127.0.0.1:{1}".format(*runner.addresses[0][:2])
    yield made
    await runner.cleanup()


async def begun(server: Server, **options: Any) -> OpenRewardEnvironment:
    env = OpenRewardEnvironment(url=server.url, **options)
    await env.reset(seed=0)
    return env


async def call(env: OpenRewardEnvironment) -> ToolResult:
    return await call_own_tool(env.tools[0], {})


@pytest.mark.parametrize(
    "called",
    [
        [],
        {"ok": True, "output": []},
        {"ok": True, "output": {"blocks": [{"type": "text"}]}},
        {"ok": True, "output": {"blocks": [], "reward": "much"}},
        {"ok": True, "output": {"blocks": [], "reward": float("nan")}},
    ],
)
async def test_a_garbled_answer_is_not_the_policys_fault(server: Server, called: Any) -> None:
    env = await begun(server)
    server.called = called
    with pytest.raises(EnvironmentFailure):
        await call(env)
    await env.close()


async def test_wrong_calls_count_and_a_text_says_nothing_about_success(server: Server) -> None:
    env = await begun(server, max_steps=3)
    assert (await env.step("a text"))[4] == {"valid": False}
    server.called = {"ok": False, "error": "no"}
    with pytest.raises(ToolError, match="add: no"):
        await call(env)
    last = await call(env)
    assert (last.text, last.stop, last.truncated, last.success) == ("add: no", False, True, False)
    await env.close()


@pytest.mark.parametrize(("names", "splits"), [([], []), (["world"], {}), (["world"], [{"name": "train"}]), (5, [])])
async def test_error_names_the_nonstandard_task_answer(server: Server, names: Any, splits: Any) -> None:
    server.names, server.splits = names, splits
    with pytest.raises(UsageError, match=r"Open Reward Standard server responds|has no split train"):
        await asyncio.to_thread(tasks, "train", url=server.url)


async def test_a_server_of_another_protocol_is_named() -> None:
    async def garble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n")
        writer.close()

    other = await asyncio.start_server(garble, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    with pytest.raises(UsageError, match=r"(?s)responds at .*BadStatusLine.*Set environment\.options"):
        await asyncio.to_thread(tasks, "train", url=f"http://127.0.0.1:{port}")
    other.close()
