"""Environments as MCP servers, with the client of the ``mcp`` package."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import mcp
import pytest
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from served_worlds import STAIRS, WAITING, Stairs
from support.forks import AGENTRL

from agentrl.env import EnvironmentSpec
from agentrl.errors import UsageError
from agentrl.remote.server import MCPServer, ServerSettings, mcp_server

pytestmark = pytest.mark.slow
"""The package takes a second to import, and each session several round trips."""


@asynccontextmanager
async def connected(url: str, mode: str = "auto", **headers: str) -> AsyncIterator[mcp.Client]:
    async with (
        httpx2.AsyncClient(headers=headers) as http,
        mcp.Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


async def call(client: mcp.Client, name: str, **arguments: Any) -> Any:
    return await client.call_tool(name, arguments)


def texts(result: Any) -> list[str]:
    return [part.text for part in result.content]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_session_plays_an_episode(serve: Any, mode: str) -> None:
    running = serve(STAIRS, kind=MCPServer)
    async with connected(running.url, mode) as client:
        assert "Climb with tools." in (client.instructions or "")
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(tools) == ["start_episode", "act", "episode_state", "look_around", "stumble"]
        assert tools["look_around"].input_schema["required"] == ["far"]
        assert texts(await call(client, "start_episode", split="valid", index=3))[0].startswith("stairs ")
        assert texts(await call(client, "look_around", far=True)) == ["0 steps below you"]
        steps = [await call(client, "act", action="up") for _ in range(3)]
        assert [texts(step) for step in steps] == [["step 1"], ["step 2"], ["step 3", "The episode is over."]]
        assert [step.meta["agentrl/reward"] for step in steps] == [0.0, 0.0, 1.0]
        assert [step.meta["agentrl/done"] for step in steps] == [False, False, True]
        read = await client.read_resource("episode://state")
        state = json.loads(read.contents[0].text)
        assert (state["task_id"], state["total_reward"], state["success"]) == ("valid-3", 1.0, True)
        over = await call(client, "act", action="up")
        assert (over.is_error, "Start another one with start_episode" in texts(over)[0]) == (True, True)
        assert "reward" not in texts(await call(client, "episode_state"))[0]
        assert running.count() == 1
    assert running.count() == 0


async def test_sessions_are_separate_and_restart_after_a_failure(serve: Any) -> None:
    url = serve(STAIRS, kind=MCPServer).url
    async with connected(url) as one, connected(url) as two:
        for client in (one, two):
            await call(client, "start_episode", seed=1)
        for _ in range(2):
            await call(one, "act", action="up")
        assert texts(await call(two, "look_around", far=True)) == ["0 steps below you"]
        read = [await client.read_resource("episode://state") for client in (one, two)]
        assert [json.loads(one.contents[0].text)["steps"] for one in read] == [2, 1]  # of their own
        made = Stairs.made
        with pytest.raises(mcp.MCPError, match="the stairs broke") as failed:
            await call(one, "act", action="fail")
        assert failed.value.error.code == -32603
        assert (await call(one, "act", action="up")).is_error
        assert not (await call(one, "start_episode", seed=1)).is_error
        assert Stairs.made == made + 1
        assert texts(await call(two, "act", action="up")) == ["step 1"]


async def test_wrong_calls_are_errors(serve: Any) -> None:
    async with connected(serve(STAIRS, kind=MCPServer).url) as client:
        early = await call(client, "look_around", far=True)
        assert (early.is_error, "no episode is running" in texts(early)[0]) == (True, True)
        await call(client, "start_episode", index=0)
        for name, arguments, words in [
            ("act", {}, "action is missing"),
            ("look_around", {"far": "yes please"}, "wrong arguments for look_around"),
            ("look_around", {"far": False}, "there is nothing near"),
            ("stumble", {}, "stumble failed (ValueError)"),
            ("start_episode", {"index": 250}, "expected 0 to 249"),
            ("start_episode", {"index": -1}, "expected 0 to 249"),
            ("start_episode", {"split": "vald"}, "Did you mean stairs/valid"),
            ("start_episode", {"split": "test"}, "Download it"),
        ]:
            wrong = await call(client, name, **arguments)
            assert (wrong.is_error, words in texts(wrong)[0]) == (True, True), texts(wrong)
        with pytest.raises(mcp.MCPError, match="unknown tool 'fly'") as unknown:
            await call(client, "fly")
        assert unknown.value.error.code == -32602
        with pytest.raises(mcp.MCPError, match="no resource"):
            await client.read_resource("episode://other")
        assert texts(await call(client, "act", action="up")) == ["step 1"]


async def test_pictures_are_content(serve: Any) -> None:
    async with connected(serve(WAITING, kind=MCPServer).url) as client:
        shown = await call(client, "start_episode", index=4)
        assert [part.type for part in shown.content] == ["text", "image"]
        assert shown.content[1].mime_type == "image/png"
        taken = await call(client, "photograph")
        assert [part.type for part in taken.content] == ["text", "image"]


async def test_token_is_required_and_foreign_host_names_are_rejected(serve: Any) -> None:
    guarded, open_one = serve(STAIRS, kind=MCPServer, token="secret").url, serve(STAIRS, kind=MCPServer).url
    async with aiohttp.ClientSession() as http:
        for url, headers, status in [
            (guarded, {}, 401),
            (guarded, {"Authorization": "Bearer wrong"}, 401),
            (open_one, {"Host": "evil.example"}, 403),
            (open_one, {"Origin": "https://evil.example"}, 403),
        ]:
            async with http.post(url, json={}, headers=headers) as answer:
                assert answer.status == status
    async with connected(guarded, Authorization="Bearer secret") as client:
        assert len((await client.list_tools()).tools) == 5


async def test_silent_connections_do_not_lock_clients_out(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_server, "IDLE_CONNECTION_S", 0.01)
    url = serve(STAIRS, kind=MCPServer, token="secret").url
    host, port = url.removeprefix("http://").removesuffix("/mcp").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


async def test_request_with_a_late_body_is_rejected_and_closed(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_server, "BODY_S", 0.05)
    url = serve(STAIRS, kind=MCPServer).url
    host, port = url.removeprefix("http://").removesuffix("/mcp").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST /mcp HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\n{{".encode())
    assert b"408" in await asyncio.wait_for(reader.readline(), 30)
    assert b"did not arrive in time" in await asyncio.wait_for(reader.read(), 30), "the connection is closed"
    writer.close()


class Acting(Stairs):
    """Has a tool that is named like one of the server's."""

    def __init__(self) -> None:
        super().__init__()
        self.tools = (self.tools[0].with_rules({}),)
        self.tools[0].name = "act"


async def test_tool_with_a_reserved_name_is_rejected() -> None:
    spec = EnvironmentSpec(name="acting", make=Acting, tasks=STAIRS.tasks)
    server = MCPServer(spec, {}, ServerSettings())
    with pytest.raises(UsageError, match="have the same names as the MCP server's own tools: got act"):
        await server.start()
    await server.close()


LOUD = '''
import gymnasium, subprocess

class Loud(gymnasium.Env):
    """Prints, and so do its children."""
    observation_space = action_space = gymnasium.spaces.Text(50)
    def reset(self, *, seed=None, options=None):
        print("hello", flush=True)
        subprocess.run(["echo", "hello"])
        return f"seed {seed}", {}
    def step(self, action):
        print("hello", flush=True)
        return "done", 1.0, True, False, {}
'''


async def test_standard_input_and_output(tmp_path: Path) -> None:
    """What an environment prints is not mixed with messages."""
    (tmp_path / "loud.py").write_text(LOUD)
    words = [*AGENTRL, "env", "serve", f"{tmp_path / 'loud.py'}:Loud", "--protocol", "mcp", "--stdio"]
    program = mcp.StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))
    with (tmp_path / "errors").open("w+") as errors:
        async with mcp.Client(stdio_client(program, errlog=errors)) as client:
            assert texts(await call(client, "start_episode", index=2)) == ["seed 2"]
            ended = await call(client, "act", action="go")
            assert (texts(ended), ended.meta["agentrl/reward"]) == (["done", "The episode is over."], 1.0)
        assert "Traceback" not in (tmp_path / "errors").read_text()


def test_a_server_on_standard_input_ends_on_a_signal() -> None:
    """Although nothing interrupts its thread that waits for the next line."""
    words = [*AGENTRL, "env", "serve", "guess_number", "--protocol", "mcp", "--stdio"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, *words], **pipes) as server:  # type: ignore[call-overload]
        request = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        server.stdin.write(json.dumps(request).encode() + b"\n")
        server.stdin.flush()
        assert json.loads(server.stdout.readline())["id"] == 1
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
