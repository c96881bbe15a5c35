"""The OpenEnv adapter against a server that speaks as OpenEnv's do; tests/originals has one of the package's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from agentrl.envs.openenv import SPEC, OpenEnvironment, tool_value
from agentrl.envs.served_tools import ServedTool
from aiohttp import WSMsgType, web

from agentrl.errors import EnvironmentFailure, ToolError, UsageError
from agentrl.message import ImagePart
from agentrl.rollout.env_workers import call_own_tool
from agentrl.tool import ToolResult


async def _echo(request: web.Request) -> web.WebSocketResponse:
    """Echoes; a message of three letters ends the episode, and of three and a dot the session."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        assert message.type is WSMsgType.TEXT
        asked = json.loads(message.data)
        match asked:
            case {"type": "reset", "data": {"seed": seed}}:
                told: dict[str, Any] = {
                    "observation": {"echo": f"seed {seed}", "length": 0},
                    "reward": None,
                    "done": False,
                }
            case {"type": "step", "data": {"message": "die"}}:
                break
            case {"type": "step", "data": {"message": "fail"}}:
                await _error(socket, "EXECUTION_ERROR", "no echo")
                continue
            case {"type": "step", "data": {"message": text}}:
                told = {"observation": {"echo": text, "length": len(text)}, "reward": 1.0, "done": len(text) == 3}
            case _:
                await _error(socket, "VALIDATION_ERROR", "Invalid message")
                continue
        await socket.send_json({"type": "observation", "data": told})
        if told["observation"]["echo"] == "end.":
            break
    return socket


async def _error(socket: web.WebSocketResponse, code: str, message: str) -> None:
    await socket.send_json({"type": "error", "data": {"code": code, "message": message}})


class Scripted:
    """Gives each message the next answer; after a ping, it waits for the pong."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.pong, self.asked = asyncio.Event(), asyncio.Event()

    def say(self, reward: Any = None, done: Any = False, **observation: Any) -> None:
        self.answers.append(
            json.dumps({"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}})
        )

    async def answer(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.PONG:
                self.pong.set()
                continue
            self.asked.set()
            if self.answers:
                await socket.send_str(self.answers.pop(0))
                await socket.ping()
        return socket


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
async def url(scripted: Scripted) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_get("/ws", _echo)
    application.router.add_get("/scripted/ws", scripted.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield "http://127.0.0.1:{1}".format(*runner.addresses[0][:2])
    await runner.cleanup()


async def test_text_goes_into_a_field_and_comes_out_of_another(url: str) -> None:
    env = OpenEnvironment(
        url=url + "/", action_field="message", observation_field="echo", max_steps=3, success_from=2.0
    )
    for _ in range(2):
        assert await env.reset(seed=5) == ("seed 5", {})
        assert await env.step("hello") == ("hello", 1.0, False, False, {"valid": True, "success": False})
        assert await env.step('{"message": "yes"}') == ("yes", 1.0, True, False, {"valid": True, "success": True})
    await env.reset(seed=5)
    assert [(await env.step("more"))[3] for _ in range(3)] == [False, False, True]
    await env.close()


async def test_actions_with_wrong_fields_are_explained_and_free(url: str) -> None:
    env = OpenEnvironment(url=url)
    observation, _ = await env.reset(seed=5)
    assert json.loads(observation) == {"echo": "seed 5", "length": 0}
    for action in ("hello", "[1]", '{"text": "hello"}'):
        text, reward, terminated, truncated, info = await env.step(action)
        assert text == (
            "That is not an action, so nothing happened. Answer with a JSON object with the fields of the action.\n"
            f"{observation}"
        )
        assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, False)
    assert json.loads((await env.step('{"message": "yes"}'))[0]) == {"echo": "yes", "length": 3}
    await env.close()


async def test_failures_of_the_server_are_failures_of_the_environment(url: str) -> None:
    env = OpenEnvironment(url=url, action_field="message")
    await env.reset(seed=5)
    with pytest.raises(
        EnvironmentFailure, match=rf"step of the OpenEnv server {url} failed: got EXECUTION_ERROR: no echo"
    ):
        await env.step("fail")
    with pytest.raises(
        EnvironmentFailure, match=rf"step of the OpenEnv server {url} failed: got .*closed the connection"
    ):
        await env.step("die")
    await env.close()
    lost = OpenEnvironment(url="http://127.0.0.1:9")
    with pytest.raises(EnvironmentFailure, match=r"server http://127\.0\.0\.1:9 failed: got ClientConnectorError"):
        await lost.reset(seed=5)
    await lost.close()


async def test_a_session_that_the_server_ended_between_episodes_is_opened_again(url: str) -> None:
    env = OpenEnvironment(url=url, action_field="message", observation_field="echo")  # OpenEnv#1103
    await env.reset(seed=5)
    await env.step("end.")
    assert await env.reset(seed=6) == ("seed 6", {})
    with pytest.raises(EnvironmentFailure):
        await env.step("die")
    assert await env.reset(seed=7) == ("seed 7", {})
    await env.close()


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (
            [{"type": "text", "text": "a"}, {"type": "image", "data": "AA==", "mimeType": "image/png"}],
            ["a", ImagePart(data=b"\0")],
        ),
        ([{"type": "image", "data": "?"}], '{"content": [{"type": "image", "data": "?"}]}'),
    ],
)
def test_results_of_tools_may_have_images(content: list[Any], value: Any) -> None:  # claude-code#70280
    assert tool_value({"content": content}) == value


@pytest.mark.parametrize(
    ("name", "schema", "words"),
    [
        ("list", [1], r"the tool 'list' by something that is not a JSON schema: got \[1\]"),
        ("list", {"properties": ["a"]}, "not a JSON schema"),
        ("list", {"properties": {"type": "object"}}, "its property type: 'object'"),  # vscode-unify-chat-provider#162
        ("list", {"properties": {"a": None}}, "its property a: None"),
        ("", {}, "a tool without a name"),
        (None, {}, "a tool without a name"),
    ],
)
def test_tools_that_a_server_describes_wrongly_are_named(name: Any, schema: Any, words: str) -> None:
    async def call(name: str, arguments: Any) -> ToolResult:
        raise AssertionError

    with pytest.raises(UsageError, match=words):
        ServedTool(name, None, schema, call)


@pytest.mark.parametrize("schema", [None, {}, {"type": "object"}, {"properties": None}])
def test_tools_without_arguments_have_properties(schema: Any) -> None:  # kubernetes-mcp-server#340
    async def call(name: str, arguments: Any) -> ToolResult:
        raise AssertionError

    tool = ServedTool("list", None, schema, call)
    assert tool.schema["function"]["parameters"] == {"type": "object", "properties": {}}


async def test_the_options_are_checked(url: str) -> None:
    with pytest.raises(UsageError, match=r"the OpenEnv server is not set"):
        SPEC.make()
    env = OpenEnvironment(url=url, observation_field="text")
    with pytest.raises(
        UsageError, match="no such field: got text, expected observation_field to be one of echo, length"
    ):
        await env.reset(seed=5)
    await env.close()
    assert len(SPEC.tasks("valid", url=url)) > 0


async def test_pings_are_answered_between_turns(url: str, scripted: Scripted) -> None:
    """A server that gets no pong closes the connection: OpenEnv's after 20 s."""
    env = OpenEnvironment(url=f"{url}/scripted")
    scripted.say(text="go")
    await env.reset(seed=5)
    await asyncio.wait_for(scripted.pong.wait(), 5)
    await env.close()


async def test_abandoned_answer_is_not_used_for_the_next_prompt(url: str, scripted: Scripted) -> None:
    env = OpenEnvironment(url=f"{url}/scripted", action_field="text", observation_field="text")
    scripted.say(text="go")
    await env.reset(seed=5)
    scripted.asked.clear()
    late = asyncio.create_task(env.step("slow"))
    await scripted.asked.wait()
    late.cancel()
    await asyncio.wait({late})
    scripted.say(text="the late answer", reward=1.0)
    with pytest.raises(EnvironmentFailure, match="an earlier answer is missing"):
        await env.step("next")
    scripted.answers.clear()
    scripted.say(text="again")
    assert (await env.reset(seed=5))[0] == "again"
    await env.close()


@pytest.mark.parametrize(
    "answer",
    [
        "[]",
        '{"type": "observation", "data": {}}',
        '{"type": "observation", "data": {"observation": []}}',
        '{"type": "observation", "data": {"observation": {}, "reward": "much"}}',
        '{"type": "observation", "data": {"observation": {}, "reward": NaN}}',
        '{"type": "observation", "data": {"observation": {}, "done": "no"}}',
        '{"type": "error", "data": []}',
        '{"type": "state", "data": {"observation": {}}}',
    ],
)
async def test_a_garbled_answer_to_a_tool_call_is_not_the_policys_fault(
    url: str, scripted: Scripted, answer: str
) -> None:
    env = await with_tools(url, scripted)
    scripted.answers.append(answer)
    with pytest.raises(EnvironmentFailure):
        await call(env)
    await env.close()


async def test_failed_tool_calls_count_and_keep_the_servers_message(url: str, scripted: Scripted) -> None:
    env = await with_tools(url, scripted)
    assert "success" not in (await env.step("a text"))[4], "a call may still succeed"
    scripted.say(error={"message": "broken"})
    with pytest.raises(ToolError, match="add: broken"):
        await call(env)
    scripted.say(error={"message": "fatal"}, reward=-1.0, done=True)
    ended = await call(env)
    assert (ended.text, ended.reward, ended.stop, ended.success) == ("add: fatal", -1.0, True, False)
    await env.close()
    env = await with_tools(url, scripted, max_steps=1)
    scripted.say(error={"message": "broken"})
    late = await call(env)
    assert (late.stop, late.truncated, late.success) == (False, True, False)
    await env.close()
    env = await with_tools(url, scripted, success_from=0.5)
    scripted.say(result="ok", reward=0.5, done=True)
    assert (await call(env)).success
    await env.close()


@pytest.mark.parametrize("name", ["is_error", "isError"])
async def test_a_tool_that_reports_its_failure_has_failed(url: str, scripted: Scripted, name: str) -> None:
    env = await with_tools(url, scripted)  # openai-agents-python#4224: the result of MCP says that it is an error
    scripted.say(result={"content": [{"type": "text", "text": "no such row"}], name: True})
    with pytest.raises(ToolError, match="add: no such row"):
        await call(env)
    scripted.say(result={"content": [], "structured_content": {"rows": 3}, name: False})
    assert (await call(env)).text == '{"rows": 3}'  # memos#6226
    await env.close()


async def test_full_server_error_has_a_hint(url: str, scripted: Scripted) -> None:
    env = OpenEnvironment(url=f"{url}/scripted")
    scripted.answers.append('{"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "1 of 1"}}')
    with pytest.raises(EnvironmentFailure, match=r"CAPACITY_REACHED.*environment\.max_concurrent"):
        await env.reset(seed=5)
    await env.close()


async def with_tools(url: str, scripted: Scripted, **options: Any) -> OpenEnvironment:
    env = OpenEnvironment(url=f"{url}/scripted", has_tools=True, **options)
    scripted.say(text="go")
    scripted.say(tools=[{"name": "add"}])
    await env.reset(seed=5)
    return env


async def call(env: OpenEnvironment) -> ToolResult:
    return await call_own_tool(env.tools[0], {"number": 1})
