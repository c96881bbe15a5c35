"""The protocol of OpenEnv: what its messages are answered with, and the adapter `openenv` as its client.

`tests/originals` plays the same server with OpenEnv's own clients.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from agentrl.envs.openenv import OpenEnvironment
from served_worlds import STAIRS, WAITING, Stairs, Waiting

from agentrl.env.lookup import resolve_environment
from agentrl.errors import EnvironmentFailure, ToolError, UsageError
from agentrl.remote.server import OpenEnvServer, ServerSettings
from agentrl.rollout.env_workers import call_own_tool


class Socket:
    """A connection, message by message."""

    def __init__(self, url: str, query: str = "", **options: Any) -> None:
        self.url, self.options = f"{url}/ws{query}", options

    async def __aenter__(self) -> Socket:
        self.http = aiohttp.ClientSession()
        self.socket = await self.http.ws_connect(self.url, **self.options)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.socket.close()
        await self.http.close()

    async def ask(self, kind: str, **data: Any) -> Any:
        await self.socket.send_json({"type": kind, "data": data})
        return (await self.socket.receive_json())["data"]

    async def send(self, text: str) -> Any:
        await self.socket.send_str(text)
        return (await self.socket.receive_json())["data"]


async def test_an_episode(serve: Any) -> None:
    url = serve(STAIRS, kind=OpenEnvServer).url
    async with Socket(url) as one:
        begun = await one.ask("reset", split="train", index=7)
        assert begun["observation"]["text"] == "stairs 7"
        assert begun["observation"]["instructions"] == "Climb."
        assert (begun["done"], begun["metadata"]["task_id"]) == (False, "train-7")
        steps = [await one.ask("step", action="up") for _ in range(3)]
        assert [(step["observation"]["text"], step["reward"], step["done"]) for step in steps] == [
            ("step 1", 0.0, False),
            ("step 2", 0.0, False),
            ("step 3", 1.0, True),
        ]
        assert steps[-1]["metadata"]["info"] == {"success": True, "valid": True}
        state = await one.ask("state")
        assert (state["step_count"], state["total_reward"], state["success"]) == (3, 1.0, True)
        over = await one.ask("step", action="up")
        assert over == {
            "message": "the episode is over: got terminated. Start another one with reset",
            "code": "EXECUTION_ERROR",
        }
        assert (await one.ask("reset", split="train", index=8))["metadata"]["steps"] == 0


async def test_sessions_play_different_tasks_by_default_and_a_seed_selects_one(serve: Any) -> None:
    url = serve(STAIRS, kind=OpenEnvServer).url
    async with Socket(url) as one, Socket(url) as two:
        started = [(await socket.ask("reset"))["metadata"]["task_id"] for socket in (one, one, two)]
        assert started == ["train-0", "train-1", "train-1"]
        assert (await one.ask("reset", seed=503, split="valid"))["metadata"]["task_id"] == "valid-3"


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        ("{", "INVALID_JSON", "not valid JSON"),
        ("[" * 100_000, "INVALID_JSON", "not valid JSON"),
        ("[]", "VALIDATION_ERROR", "expected an object"),
        ('{"type": "step", "data": ' + 900 * '{"":' + "1" + 901 * "}", "VALIDATION_ERROR", "more than 100 levels"),
        ('{"type": "step", "data": 5}', "VALIDATION_ERROR", "expected an object"),
        ('{"type": "step", "data": {"text": "up"}}', "VALIDATION_ERROR", "not an action"),
        ('{"type": "step", "data": {"action": 5}}', "VALIDATION_ERROR", "not an action"),
        ('{"type": "step", "data": {"type": "call_tool"}}', "VALIDATION_ERROR", "not an action"),
        ('{"type": "jump"}', "UNKNOWN_TYPE", "expected reset, step"),
        ('{"type": ["jump"]}', "UNKNOWN_TYPE", "expected reset, step"),
        ('{"type": "reset", "data": {"seed": 1.5}}', "VALIDATION_ERROR", "seed is 1.5"),
        ('{"type": "reset", "data": {"seed": 1, "index": 1}}', "EXECUTION_ERROR", "by an index or a seed"),
        ('{"type": "reset", "data": {"index": 250}}', "EXECUTION_ERROR", "expected 0 to 249"),
        ('{"type": "reset", "data": {"split": "vald"}}', "EXECUTION_ERROR", "Did you mean stairs/valid"),
        ('{"type": "reset", "data": {"split": "test"}}', "EXECUTION_ERROR", "Download it"),
        ('{"type": "reset", "data": {"level": 3}}', "VALIDATION_ERROR", "unknown fields of the reset: level"),
        ('{"type": "step", "data": {"action": "unsendable"}}', "EXECUTION_ERROR", "cannot be sent"),
    ],
)
async def test_invalid_message_gets_an_error_and_the_session_continues(
    serve: Any, message: str, code: str, words: str
) -> None:
    async with Socket(serve(STAIRS, kind=OpenEnvServer).url) as one:
        await one.ask("reset", index=1)
        answer = await one.send(message)
        assert (answer["code"], words in answer["message"]) == (code, True), answer
        assert (await one.ask("step", action="up"))["observation"]["text"].startswith("step")


async def test_after_a_failure_a_reset_gets_another_environment(serve: Any) -> None:
    async with Socket(serve(STAIRS, kind=OpenEnvServer).url) as one:
        await one.ask("reset", index=1)
        made = Stairs.made
        failed = await one.ask("step", action="fail")
        assert (failed["code"], "the stairs broke" in failed["message"]) == ("EXECUTION_ERROR", True)
        assert "no episode is running" in (await one.ask("step", action="up"))["message"]
        assert (await one.ask("reset", index=1))["observation"]["text"] == "stairs 1"
        assert Stairs.made == made + 1


async def test_tools_are_listed_and_called_and_unknown_ones_rejected(serve: Any) -> None:
    async with Socket(serve(STAIRS, kind=OpenEnvServer).url) as one:
        listed = (await one.ask("step", type="list_tools"))["observation"]["tools"]  # before an episode
        assert [tool["name"] for tool in listed] == ["look_around", "stumble"]
        await one.ask("reset", index=1)

        async def call(name: str, **arguments: Any) -> Any:
            return (await one.ask("step", type="call_tool", tool_name=name, arguments=arguments))["observation"]

        assert (await call("look_around", far=True))["result"] == "0 steps below you"
        errors = [
            await call("look_around"),
            await call("look_around", far=False),
            await call("stumble"),
            await call("x"),
        ]
        assert [one["error"]["error_type"] for one in errors] == [
            "invalid_args",
            "execution_error",
            "execution_error",
            "tool_not_found",
        ]


async def test_excess_session_is_rejected_and_an_unused_one_ends(serve: Any) -> None:
    running = serve(STAIRS, kind=OpenEnvServer, max_sessions=1)
    async with Socket(running.url) as one:
        await one.ask("reset", index=1)
        async with Socket(running.url) as two:
            refused = (await two.socket.receive_json())["data"]
            assert refused == {"message": "all 1 sessions are in use", "code": "CAPACITY_REACHED"}
        running.expire()
        assert (await one.ask("step", action="up"))["code"] == "SESSION_ERROR"
        async with Socket(running.url) as two:
            assert (await two.ask("reset"))["done"] is False


async def test_pings_are_answered_during_a_long_step(serve: Any, loop_thread: Any) -> None:
    url = serve(WAITING, kind=OpenEnvServer).url

    async def make() -> None:
        Waiting.gate = asyncio.Event()

    loop_thread.run(make())
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws", autoping=False) as socket:
        await socket.send_json({"type": "reset"})
        await socket.receive_json()
        await socket.send_json({"type": "step", "data": {"action": "wait"}})
        await socket.ping(b"there?")
        pong = await socket.receive()
        assert (pong.type, bytes(pong.data)) == (aiohttp.WSMsgType.PONG, b"there?")
        loop_thread.loop.call_soon_threadsafe(Waiting.gate.set)
        assert (await socket.receive_json())["data"]["observation"]["text"] == "you said wait"


async def test_json_rpc(serve: Any) -> None:
    url = serve(STAIRS, kind=OpenEnvServer).url
    async with aiohttp.ClientSession() as http:

        async def rpc(method: str, **given: Any) -> Any:
            body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": given}
            return await (await http.post(f"{url}/mcp", json=body)).json()

        session = (await rpc("openenv/session/create"))["result"]["session_id"]
        async with Socket(url, query=f"?session_id={session}") as joined:
            await joined.ask("reset", index=1)
            async with Socket(url, query=f"?session_id={session}") as third:
                assert (await third.socket.receive_json())["data"]["code"] == "SESSION_ERROR"
            called = (await rpc("tools/call", session_id=session, name="look_around", arguments={"far": True}))[
                "result"
            ]
            assert (called["data"], called["done"]) == ("0 steps below you", False)
            assert (await joined.ask("state"))["step_count"] == 1
        assert (await rpc("tools/call", session_id=session, name="stumble"))["error"]["code"] == -32000
        assert (await rpc("tools/call", name="stumble"))["error"]["code"] == -32602
        assert (await rpc("jump"))["error"]["code"] == -32601
        assert (await rpc("openenv/session/close", session_id=session))["result"]["closed"] is True
        assert "error" in await rpc("tools/list", session_id=session)


async def test_the_tasks_of_a_split(serve: Any) -> None:
    url = serve(STAIRS, kind=OpenEnvServer).url
    async with aiohttp.ClientSession() as http:

        async def post(route: str, **body: Any) -> Any:
            return await (await http.post(url + route, json=body)).json()

        assert await post("/stairs/num_tasks", split="train") == {"num_tasks": 250}
        assert (await post("/Stairs/task", split="train", index=3))["task"]["id"] == "train-3"
        assert [one["index"] for one in (await post("/stairs/task_range", split="valid", start=248))["tasks"]] == [
            248,
            249,
        ]
        assert "error" in await post("/stairs/task", split="train", index=250)
        for wrong in ({"start": -1}, {"stop": 251}, {"start": "first"}):
            assert (await post("/stairs/task_range", split="train", **wrong))["error"]["kind"] == "request"
        assert "error" in await post("/ladder/num_tasks", split="train")


async def test_a_token_is_required(serve: Any) -> None:
    url = serve(STAIRS, kind=OpenEnvServer, token="secret").url
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
            await http.ws_connect(f"{url}/ws")
    async with Socket(url, headers={"Authorization": "Bearer secret"}) as one:
        assert (await one.ask("reset"))["done"] is False


async def test_the_adapter_plays_it(serve: Any) -> None:
    env = OpenEnvironment(url=serve(STAIRS, kind=OpenEnvServer).url, action_field="action", observation_field="text")
    assert (await env.reset(seed=3))[0] == "stairs 3"
    assert [(await env.step("up"))[1:4] for _ in range(3)] == [(0.0, False, False)] * 2 + [(1.0, True, False)]
    with pytest.raises(EnvironmentFailure, match="the episode is over"):
        await env.step("up")
    await env.close()


async def test_the_adapter_offers_the_tools(serve: Any) -> None:
    env = OpenEnvironment(url=serve(STAIRS, kind=OpenEnvServer).url, has_tools=True)
    await env.reset(seed=3)
    tools = {tool.name: tool for tool in env.tools}
    assert tools["look_around"].schema["function"]["parameters"]["required"] == ["far"]
    assert (await call_own_tool(tools["look_around"], {"far": True})).text == "0 steps below you"
    with pytest.raises(ToolError, match="far is missing"):
        await call_own_tool(tools["look_around"], {})
    await env.close()


def test_environment_with_runtime_roles_is_rejected() -> None:
    spec = resolve_environment("retail")
    with pytest.raises(UsageError, match=r"roles that the run plays.*Serve it without --protocol"):
        OpenEnvServer(spec, {"customer": "role"}, ServerSettings())


async def test_pictures_are_sent(serve: Any) -> None:
    async with Socket(serve(WAITING, kind=OpenEnvServer).url) as one:
        shown = (await one.ask("reset", index=4))["observation"]
        assert shown["text"].startswith("picture 4")
        assert [sorted(image) for image in shown["images"]] == [["alternative", "image", "media_type"]]
        taken = (await one.ask("step", type="call_tool", tool_name="photograph", arguments={}))["observation"]
        assert (taken["result"].startswith("here"), taken["images"][0]["image"]) == (True, "AA==")
