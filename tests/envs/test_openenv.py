"""The OpenEnv adapter against a server that speaks as OpenEnv's do; tests/originals has one of the package's own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from agentrl.envs.openenv import SPEC, OpenEnvironment, tool_value
from agentrl.envs.served_tools import ServedTool
from aiohttp import WSMsgType, web

from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.message import ImagePart
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


@pytest.fixture
async def url() -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_get("/ws", _echo)
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


async def test_actions_without_the_right_fields_are_told_and_cost_nothing(url: str) -> None:
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
    with pytest.raises(EnvironmentFailure, match=rf"step of the OpenEnv server {url} failed: got WSMessageTypeError"):
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
