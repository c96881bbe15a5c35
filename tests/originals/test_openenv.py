"""The OpenEnv adapter plays an environment of openenv-core's own, on its own server."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentrl.envs.openenv import SPEC, OpenEnvironment

from agentrl.env.lookup import resolve_environment
from agentrl.rollout.env_pool import EnvPool

pytestmark = [pytest.mark.originals, pytest.mark.timeout(300)]

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


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python = Path(os.environ["AGENTRL_OPENENV"]) / "bin" / "python"  # set by make test-originals
    words = [str(python), "-c", SERVER, str(tmp_path_factory.mktemp("openenv"))]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.terminate()


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
