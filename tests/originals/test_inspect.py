"""Inspect's tasks as environments, and Inspect's evaluations of a policy behind the gateway."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentrl.envs.adapters.inspect_tasks import SPEC, InspectEnvironment, InspectTasks
from support.tokenizers import build_tokenizer

from agentrl.config import load_config
from agentrl.engine import SamplingParams
from agentrl.errors import EnvironmentFailure, ToolError, UsageError
from agentrl.evaluation.live_traffic import LiveTraffic
from agentrl.render.renderer import Renderer
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.env_workers import call_own_tool
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.serving.scripted import ScriptedEngine

pytestmark = [
    pytest.mark.originals,
    pytest.mark.timeout(1800),
    # of Inspect and its dependencies
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
EXAMPLES = Path(__file__).parent / "inspect_examples.py"
TASK = f"{EXAMPLES}:arithmetic"


@pytest.fixture(autouse=True)
def _collect_garbage() -> Iterator[None]:
    """Let warnings about what Inspect leaves open be raised, and ignored, in the test that caused them."""
    yield
    gc.collect()


async def test_scores_that_are_nan_are_none() -> None:  # inspect_ai#3796
    env = InspectEnvironment(task=f"{EXAMPLES}:unscored")
    await env.reset(options={"index": 0})
    assert (await env.step("x"))[4]["reward_components"] == {"unsure": 1.0, "unsure1.a": 1.0}
    await env.close()
    env = InspectEnvironment(task=f"{EXAMPLES}:unscored", first=None)
    await env.reset(options={"index": 0})
    with pytest.raises(EnvironmentFailure, match="was not scored: got a score of nan"):
        await env.step("x")
    await env.close()


async def test_episodes_at_once() -> None:
    envs = [InspectEnvironment(task=TASK) for _ in range(3)]

    async def play(env: InspectEnvironment, index: int, answer: str) -> Any:
        prompt, _ = await env.reset(options={"index": index})
        assert prompt == f"You are a calculator.\n\nWhat is {index} + {index}?\nEnd with the number."
        return await env.step(answer)

    played = await asyncio.gather(*(play(env, index, "It is 2") for index, env in enumerate(envs)))
    assert [one[1] for one in played] == [0.0, 1.0, 0.0]
    assert played[1][0] == "The end. Score: 1."
    assert played[1][4] == {"valid": True, "success": True, "reward_components": {"match": 1.0, "includes": 1.0}}
    assert (await play(envs[0], 2, "4, I think"))[1] == 0.0, "the first scorer looks at the end"
    with pytest.raises(UsageError, match="is over"):
        await envs[0].step("4")
    other = InspectEnvironment(task=TASK, scorer="includes", most=3)
    with pytest.raises(UsageError, match="only one Inspect task at a time"):
        await other.reset(seed=0)
    await envs[1].reset(options={"index": 3})  # abandoned
    for env in envs:
        await env.close()
    assert (await play(other, 2, "4, I think"))[1] == 1.0
    await other.close()


async def test_an_evaluation_waits_for_the_one_that_is_ending() -> None:
    first, second = InspectEnvironment(task=TASK), InspectEnvironment(task=TASK)
    await first.reset(seed=1)
    await asyncio.gather(first.close(), second.reset(seed=1))
    assert (await second.step("2"))[1] == 1.0
    await second.close()


async def test_after_a_call_that_nobody_awaited_no_answer_goes_to_an_unseen_prompt() -> None:
    env = InspectEnvironment(task=TASK)
    await env.reset(seed=1)
    late = asyncio.create_task(env.step("2"))
    await asyncio.sleep(0)
    late.cancel()
    await asyncio.wait({late})
    with pytest.raises(EnvironmentFailure, match=r"the sample of .* was abandoned"):
        await env.step("2")
    await env.reset(seed=1)
    assert (await env.step("2"))[1] == 1.0
    await env.close()


async def test_tools_act_in_the_tasks_own_sandbox() -> None:
    env = InspectEnvironment(task=f"{EXAMPLES}:notes")
    prompt, _ = await env.reset(options={"index": 1})
    (bash,) = env.tools
    assert (prompt, bash.name) == ("Write b into note.txt.", "bash")
    assert bash.schema["function"]["parameters"]["required"] == ["command"]
    assert (await call_own_tool(bash, {"command": "cat seen.txt; echo b > note.txt"})).text == "b"
    with pytest.raises(ToolError, match="'command' is a required property"):
        await call_own_tool(bash, {"cmd": "ls"})
    assert (await env.step("done"))[1:3] == (1.0, True)
    await env.close()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("tool", "the tool broke"),
        ("solver", "ended before its first prompt: got .*no such book"),
        ("scorer", "calls the model that it scores"),
    ],
)
async def test_failures_of_a_task_are_failures_of_the_environment(how: str, words: str) -> None:
    env = InspectEnvironment(task=f"{EXAMPLES}:failures", how=how)

    async def play() -> None:
        await env.reset(seed=1)
        if how == "tool":
            await call_own_tool(env.tools[0], {"number": 3})
        await env.step("x")

    with pytest.raises(EnvironmentFailure, match=words):
        await play()
    await env.close()


async def test_the_runtime_plays_its_tasks() -> None:
    options = {"task": TASK, "most": 25}
    tasks = {split: InspectTasks(split, **options) for split in SPEC.splits}
    assert {split: len(source) for split, source in tasks.items()} == {"train": 23, "test": 2}
    pool = EnvPool(SPEC, options=options)
    async with pool.borrow("test") as environment:
        assert "What is 9 + 9?" in str((await environment.reset(tasks["test"][0])).observation)
        assert (await environment.step("18")).result.reward == 1.0
    await pool.close()


def test_wrong_options_say_what_is_wrong() -> None:
    for options, words in [
        ({}, "the Inspect task is not set"),
        ({"task": f"{EXAMPLES}:arithmetik"}, "arithmeti"),
        ({"task": TASK, "least": 3}, "cannot be created"),
        ({"task": f"{EXAMPLES}:failures", "how": "unknown"}, "cannot be created: got KeyError"),
        ({"task": f"{EXAMPLES}:failing"}, "is not an Inspect task"),
    ]:
        with pytest.raises(UsageError, match=words):
            InspectEnvironment(**options)


async def test_inspect_evaluates_a_policy_behind_the_gateway(tmp_path: Path) -> None:
    """As `agentrl gateway` serves it."""
    renderer = Renderer(build_tokenizer("qwen2.5"))

    def add(request: Any) -> list[int]:
        asked = re.findall(r"What is (\d+)", renderer.encoder.decode(list(request.prompt_ids)))
        return [*renderer.encoder.encode(str(2 * int(asked[-1]))), renderer.boundary.end_id]

    policy = EngineEpisodePolicy(ScriptedEngine(script=add, vocab_size=400), renderer, SamplingParams())
    config = load_config(None, ["environment=guess_number"])
    async with LiveTraffic(policy, config, folder=tmp_path / "traffic", idle_s=600) as traffic:
        variables = {"AGENTRL_BASE_URL": f"{traffic.gateway.url}/v1", "AGENTRL_API_KEY": "none"}
        words = ["-m", "inspect_ai", "eval", f"{EXAMPLES}@arithmetic", "--model", "openai-api/agentrl/policy"]
        more = ["--limit", "3", "--log-dir", str(tmp_path / "logs"), "--log-format", "json", "--display", "plain"]
        inspect = await asyncio.create_subprocess_exec(
            sys.executable, *words, *more, env={**os.environ, **variables}, cwd=tmp_path
        )
        assert await inspect.wait() == 0
    (log,) = (tmp_path / "logs").glob("*.json")
    result = json.loads(log.read_text())
    assert result["status"] == "success"
    assert [sample["scores"]["match"]["value"] for sample in result["samples"]] == ["C", "C", "C"]
    assert traffic.answers == 3
