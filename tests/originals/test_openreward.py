"""The adapter of the Open Reward Standard plays environments on openreward's own server."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentrl.envs.openreward import CALL_A_TOOL, OpenRewardEnvironment, tasks

from agentrl.env.lookup import resolve_environment
from agentrl.errors import EnvironmentFailure, ToolError, UsageError
from agentrl.message import ImagePart, TextPart
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.env_workers import call_own_tool
from agentrl.tool import ToolResult

pytestmark = [pytest.mark.originals, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    python = Path(os.environ["AGENTRL_OPENREWARD"]) / "bin" / "python"  # set by make test-originals
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(python), str(Path(__file__).parent / "openreward_server.py")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.terminate()


async def call(env: OpenRewardEnvironment, name: str, **arguments: object) -> ToolResult:
    return await call_own_tool(next(tool for tool in env.tools if tool.name == name), arguments)


async def count(env: OpenRewardEnvironment, index: int) -> list[tuple[float, bool]]:
    assert (await env.reset(options={"split": "train", "index": index}))[0] == f"Count to {index + 1}."
    called = [await call(env, "add", number=1) for _ in range(index + 1)]
    assert all(result.text.startswith(f"The count is {place + 1}. xxx") for place, result in enumerate(called))
    assert all(result.text.endswith("x\n: no comment\n") for result in called)  # sent in several events
    return [(result.reward, result.stop) for result in called]


async def test_episodes_at_once(url: str) -> None:
    envs = [OpenRewardEnvironment(url=url) for _ in range(4)]
    played = await asyncio.gather(*(count(env, index) for index, env in enumerate(envs)))
    assert played == [[(0.0, False)] * index + [(1.0, True)] for index in range(4)]
    assert await count(envs[0], 1) == [(0.0, False), (1.0, True)]  # a session of its own
    for env in envs:
        await env.close()


async def test_wrong_calls_are_for_the_policy_and_failures_are_not(url: str) -> None:
    env = OpenRewardEnvironment(url=url, name="counter")
    await env.reset(options={"split": "train", "index": 0})
    assert [tool.schema["function"]["name"] for tool in env.tools] == ["add", "fail"]
    with pytest.raises(ToolError, match="number"):
        await call(env, "add", number="many")
    text, reward, *_, info = await env.step("I count.")
    assert (text, reward, info["valid"]) == (CALL_A_TOOL, 0.0, False)
    assert (await call(env, "add", number=1)).stop
    with pytest.raises(ToolError, match="add"):
        await call(env, "add", number=1)  # the episode is over
    await env.reset(options={"split": "train", "index": 0})
    with pytest.raises(EnvironmentFailure, match="ouch"):
        await call(env, "fail")
    await env.close()


async def test_a_text_goes_to_the_hidden_tool(url: str) -> None:
    env = OpenRewardEnvironment(url=url, name="quiz")
    for answer, reward in (("It is red.", 1.0), ("It is blue.", 0.0)):
        prompt, _ = await env.reset(options={"split": "questions", "index": 0})
        assert [type(part) for part in prompt] == [TextPart, ImagePart]
        assert env.tools == []
        assert (await env.step(answer))[:4] == ("Thank you.", reward, True, False)
    await env.close()


async def test_the_runtime_plays_its_tasks(url: str) -> None:
    spec = resolve_environment("openreward")
    found = {split: tasks(split, url=url) for split in ("train", "test")}
    assert {split: len(source) for split, source in found.items()} == {"train": 5, "test": 2}
    assert tasks("validation", url=url, name="quiz").split == "questions"
    with pytest.raises(UsageError, match=r"no split validation: got train \(train\), test \(test\)"):
        tasks("validation", url=url)
    pool = EnvPool(spec, options={"url": url})
    async with pool.borrow("test") as environment:
        reset = await environment.reset(found["test"][1])
        assert reset.observation == "Count to 7."
        assert [tool.name for tool in reset.tools] == ["add", "fail"]
    await pool.close()
    with pytest.raises(UsageError, match="no Open Reward Standard server responds"):
        tasks("train", url="http://127.0.0.1:9")
