"""OpenEnv's own server and ours: the adapter plays the former, OpenEnv's own clients the latter."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from agentrl.envs.openenv import SPEC, OpenEnvironment
from support.forks import AGENTRL, ForkedProgram

from agentrl.env.lookup import resolve_environment
from agentrl.errors import ToolError
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.env_workers import call_own_tool

pytestmark = [pytest.mark.originals, pytest.mark.timeout(1200)]

SERVER = """
import importlib.resources, pathlib, socket, sys
folder = pathlib.Path(sys.argv[1])
template = importlib.resources.files("openenv") / "cli" / "templates" / "openenv_env"
parts = {"models.py": template / "models.py", "world.py": template / "server" / "__ENV_NAME___environment.py"}
for name, source in parts.items():
    text = source.read_text().replace("__ENV_CLASS_NAME__", "Echo").replace("__ENV_TITLE_NAME__", "Echo")
    (folder / name).write_text(text.replace("__ENV_NAME__", "echo").replace("from ..models", "from models"))
sys.path.insert(0, str(folder))
import uvicorn
from models import EchoAction, EchoObservation
from openenv.core.env_server import create_fastapi_app
from world import EchoEnvironment
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
application = create_fastapi_app(EchoEnvironment, EchoAction, EchoObservation, max_concurrent_envs=4)
uvicorn.Server(uvicorn.Config(application, log_level="error")).run(sockets=[listening])
"""
"""Fills in the package's template of an environment, which echoes, and serves it."""


TOOLS_SERVER = """
import socket
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

class Counter(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("counter")
        self.count = 0

        @server.tool
        def add(number: int) -> int:
            "Add a number."
            self.count += number
            return self.count

        @server.tool
        def fail() -> str:
            "Fail."
            raise ValueError("ouch")

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count = 0
        return Observation(metadata={"count": 0})

    def _step_impl(self, action, **kwargs):
        return Observation()

    @property
    def state(self):
        return State(episode_id="one", step_count=self.count)

listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
application = create_fastapi_app(Counter, CallToolAction, CallToolObservation, max_concurrent_envs=4)
uvicorn.Server(uvicorn.Config(application, log_level="error")).run(sockets=[listening])
"""
"""Serves an environment of OpenEnv's kind for tools."""
HERE = Path(__file__).parent


def of_openenv(*words: str) -> tuple[list[str], dict[str, str]]:
    """A command in OpenEnv's environment, and its variables."""
    python = Path(os.environ["AGENTRL_OPENENV"]) / "bin" / "python"  # set by make test-originals
    return [str(python), *words], {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@contextmanager
def served(*words: str) -> Iterator[str]:
    command, variables = of_openenv("-c", *words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.terminate()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(SERVER, str(tmp_path_factory.mktemp("openenv"))) as address:
        yield address


@pytest.fixture(scope="module")
def tools_url() -> Iterator[str]:
    with served(TOOLS_SERVER) as address:
        yield address


async def play(env: OpenEnvironment, words: list[str]) -> list[tuple[str, float, bool]]:
    first, _ = await env.reset(seed=1)
    assert first == "Echo environment ready!"
    taken = [await env.step(word) for word in words]
    return [(text, reward, bool(info["valid"])) for text, reward, _, _, info in taken]


async def test_episodes_at_once(url: str) -> None:
    envs = [OpenEnvironment(url=url, action_field="message", observation_field="echoed_message") for _ in range(3)]
    played = await asyncio.gather(*(play(env, ["x" * (number + 1), "bye"]) for number, env in enumerate(envs)))
    for number, ((echo, reward, valid), last) in enumerate(played):
        assert (echo, valid) == ("x" * (number + 1), True)
        assert reward == pytest.approx(0.1 * (number + 1))
        assert last == ("bye", pytest.approx(0.3), True)
    await asyncio.gather(*(env.close() for env in envs))


async def test_an_action_of_other_fields_is_the_policys_mistake(url: str) -> None:
    env = OpenEnvironment(url=url)
    await env.reset(seed=1)
    text, reward, _, _, info = await env.step('{"massage": "hello"}')
    assert text.startswith("That is not an action")
    assert (reward, info["valid"]) == (0.0, False)
    await env.close()


async def test_the_runtime_plays_it(url: str) -> None:
    assert resolve_environment("agentrl.envs.openenv:SPEC") is SPEC
    options = {"url": url, "action_field": "message", "observation_field": "echoed_message"}
    pool = EnvPool(SPEC, options=options)
    async with pool.borrow("test") as environment:
        reset = await environment.reset(SPEC.tasks("train", **options)[0])
        assert reset.observation == "Echo environment ready!"
        assert (await environment.step("hello")).result.reward == pytest.approx(0.5)
    await pool.close()


async def test_the_tools_of_a_server_become_tools(tools_url: str) -> None:
    envs = [OpenEnvironment(url=tools_url, has_tools=True) for _ in range(2)]
    for env in envs:
        await env.reset(seed=1)
    first, second = ({tool.name: tool for tool in env.tools} for env in envs)
    assert first["add"].schema["function"]["parameters"]["required"] == ["number"]
    assert [(await call_own_tool(first["add"], {"number": number})).text for number in (2, 3)] == ["2", "5"]
    assert (await call_own_tool(second["add"], {"number": 7})).text == "7"
    for tool, arguments, words in (("fail", {}, "ouch"), ("add", {"number": "many"}, "number")):
        with pytest.raises(ToolError, match=words):
            await call_own_tool(first[tool], arguments)
    for env in envs:
        await env.close()


Serving = Callable[..., str]


@pytest.fixture
def serve(start_python: Callable[..., ForkedProgram]) -> Serving:
    """Serve an environment by the command that the documentation shows."""

    def start(*words: str) -> str:
        return start_python(*AGENTRL, "env", "serve", *words, "--protocol", "openenv").stdout.readline().strip()

    return start


def plays(what: str, url: str) -> Any:
    """What a function of `openenv_client` prints."""
    command, variables = of_openenv(str(HERE / "openenv_client.py"), what, url)
    ended = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_openenvs_clients_play_ours(serve: Serving) -> None:
    url = serve("guess_number")
    played = plays("episodes", url)
    assert [one["task"] for one in played] == [f"valid-{index}" for index in range(4)]
    for one in played:
        assert one["success"] is True
        assert one["rewards"] == [0.0] * (one["steps"] - 1) + [1.0]
    assert plays("synchronous", url)["metadata"] == "train-3"
    no_episode, no_split, no_field, nothing, no_action = plays("mistakes", url)
    assert "no episode is running. Start one with reset (code: EXECUTION_ERROR)" in no_episode
    assert "Did you mean guess_number/valid?" in no_split
    assert "unknown fields of the reset: level" in no_field
    assert nothing == ""
    assert "not an action" in no_action


def test_openenvs_tool_client_calls_our_tools(serve: Serving) -> None:
    played = plays("tools", serve("search_qa"))
    assert played["tools"] == ["search"]
    assert played["question"]
    assert played["found"]
    assert (played["same"], played["done"], played["unknown"]) == (True, False, "tool_not_found")
    assert "wrong arguments for search" in played["wrong"]


def test_a_full_server_says_so_and_a_closed_session_makes_room(serve: Serving) -> None:
    played = plays("full", serve("guess_number", "--max-sessions", "1"))
    assert "all 1 sessions are in use (code: CAPACITY_REACHED)" in played["refused"]
    assert played["after"] is False


def test_a_long_step_does_not_lose_the_connection(serve: Serving) -> None:
    """As in https://github.com/huggingface/OpenEnv/issues/875: a client that gets no pong leaves."""
    assert plays("patient", serve(f"{HERE / 'slow_world.py'}:Slow")) == "slept 2 s"
