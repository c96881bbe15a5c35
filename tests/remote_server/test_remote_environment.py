"""A served environment behaves like the local one."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from served_worlds import STAIRS, WAITING, Waiting

from agentrl.env import EnvironmentSpec, Isolation, optional_part
from agentrl.env.lookup import check_split, resolve_environment
from agentrl.errors import ToolError, UsageError
from agentrl.remote.env_methods import (
    ADMISSIBLE_ACTIONS,
    EXPERT,
    EXPERT_ACTION,
    FINAL_REWARD,
    PARTS,
    RANDOM_ACTION,
    STATE_KEY,
    TOOL_MESSAGE,
)
from agentrl.rollout.env_pool import EnvHandle, EnvPool
from agentrl.rollout.env_workers import call_own_tool
from agentrl.task import Task
from agentrl.testing.env_check import check_env

SHIPPED = [
    ("guess_number", {}),
    ("household", {"size": "tiny"}),
    ("retail", {}),
    ("search_qa", {}),
    ("minesweeper", {}),
]


@pytest.mark.parametrize(("name", "options"), [SHIPPED[0], pytest.param(*SHIPPED[1], marks=pytest.mark.slow)])
@pytest.mark.slow
def test_served_environments_pass_the_check(serve: Any, name: str, options: dict[str, Any]) -> None:
    running = serve(resolve_environment(name), options)
    report = check_env(running.url, episodes=1)
    assert report.passed, str(report)
    assert "passed   is the same everywhere" in str(report)
    assert running.count() == 0


@pytest.mark.parametrize("spec", [STAIRS, WAITING], ids=["stairs", "waiting"])
@pytest.mark.slow
def test_asynchronous_and_tooled_environments_pass_the_check(serve: Any, spec: EnvironmentSpec) -> None:
    spec = EnvironmentSpec(
        **{name: getattr(spec, name) for name in spec.__slots__} | {"splits": ("train", "valid"), "scores": {}}
    )
    report = check_env(serve(spec).url, episodes=1)
    assert report.passed, str(report)


async def transcript(spec: EnvironmentSpec, task: Task, options: dict[str, Any]) -> list[Any]:
    """Everything that the runtime learns in two episodes."""
    pool = EnvPool(spec, options=options)
    told: list[Any] = []
    try:
        async with pool.borrow("test") as environment:
            await demonstrated(environment, task, told)
            await wandered(environment, task, told)
    finally:
        await pool.close()
    return told


async def demonstrated(environment: EnvHandle, task: Task, told: list[Any]) -> None:
    reset = await environment.reset(task)
    told += [reset.observation, reset.info, reset.state_key, reset.action_hint]
    told += [(tool.name, tool.schema, tool.stop) for tool in reset.tools]
    parts = await environment.call(PARTS)
    told.append(sorted(parts))
    if "expert" not in parts:
        return
    observation, is_fallible = reset.observation, await environment.call(EXPERT)
    for turn in range(40):
        action = await environment.call(EXPERT_ACTION, observation, turn, 0.3 if is_fallible else 0.0)
        message = await environment.call(TOOL_MESSAGE, action.text)
        stepped = await environment.step(action.text)
        told += [
            action,
            message,
            stepped,
            await environment.call(ADMISSIBLE_ACTIONS),
            await environment.call(STATE_KEY),
        ]
        observation = stepped.result.observation
        if stepped.result.done:
            break


async def wandered(environment: EnvHandle, task: Task, told: list[Any]) -> None:
    reset = await environment.reset(task)
    for tool in reset.tools:
        arguments = dict.fromkeys(tool.schema["function"]["parameters"]["properties"], "x")
        try:
            told.append((tool.name, await call_own_tool(tool, arguments), await environment.call(STATE_KEY)))
        except ToolError as error:
            told.append((tool.name, str(error), await environment.call(STATE_KEY)))
    for turn in range(6):
        action = await environment.call(RANDOM_ACTION, turn)
        stepped = await environment.step(action)
        told += [action, stepped]
        if stepped.result.done:
            break
    told.append(await environment.call(FINAL_REWARD))


@pytest.mark.parametrize(("name", "options"), SHIPPED)
def test_the_same_happens_here_and_there(serve: Any, name: str, options: dict[str, Any]) -> None:
    spec = resolve_environment(name)
    remote = resolve_environment(serve(spec, options).url)
    source, served = (
        each.tasks(spec.splits[1], **each.options | extra) for each, extra in ((spec, options), (remote, {}))
    )
    for number in (0, 1):
        assert served[number].environment == remote.name
        here = asyncio.run(transcript(spec, source[number], options))
        there = asyncio.run(transcript(remote, served[number], {}))
        assert len(here) > 4
        assert there == here


@pytest.mark.parametrize("isolation", [Isolation.THREAD, Isolation.PROCESS])
def test_environments_of_threads_and_processes_are_the_same_too(serve: Any, isolation: Isolation) -> None:
    facts = {name: getattr(resolve_environment("household"), name) for name in EnvironmentSpec.__slots__}
    spec = EnvironmentSpec(**facts | {"isolation": isolation})
    remote = resolve_environment(serve(spec, {"size": "tiny"}, workers=1).url)
    local = resolve_environment("household")
    task = local.tasks("valid_seen", size="tiny")[3]
    here = asyncio.run(transcript(local, task, {"size": "tiny"}))
    assert asyncio.run(transcript(remote, task, {})) == here


def test_a_remote_environment_may_itself_live_in_a_worker_process(serve: Any) -> None:
    remote = resolve_environment(serve(resolve_environment("retail")).url)
    task = remote.tasks("valid")[0]

    async def elsewhere() -> list[Any]:
        pool = EnvPool(remote, isolation=Isolation.PROCESS, workers=1)
        told: list[Any] = []
        async with pool.borrow("test") as environment:
            await wandered(environment, task, told)
        await pool.close()
        return told

    there = asyncio.run(elsewhere())
    assert len(there) > 16
    expected = asyncio.run(transcript(remote, task, {}))[-len(there) :]
    assert there == expected


def test_spec_and_tasks_equal_the_servers(serve: Any) -> None:
    remote = resolve_environment(serve(STAIRS).url + "/")
    for fact in ("description", "instructions", "tool_instructions", "max_turns", "reward_range", "splits", "scores"):
        assert getattr(remote, fact) == getattr(STAIRS, fact)
    assert remote.success_threshold == 1.0
    tasks, local = remote.tasks("valid"), STAIRS.tasks("valid")
    assert len(tasks) == 250
    assert [(task.id, task.seed, task.options) for task in tasks] == [(t.id, t.seed, t.options) for t in local]
    with pytest.raises(UsageError, match=r"the test split is not here\. Download it"):
        remote.tasks("test")
    with pytest.raises(UsageError, match="no split of this name"):
        check_split(remote, "tset")
    env = remote.make()
    assert {part for part in ("admissible_actions", "web_page", "tool_message") if optional_part(env, part)} == set()
    assert optional_part(env, "state_key") is not None


async def test_served_environment_reports_image_observations(serve: Any) -> None:
    pictures = dataclasses.replace(WAITING, make=lambda **_: Waiting(), images_of=lambda **options: options["size"] > 1)
    for size, shows in ((2, True), (1, False)):
        spec = await asyncio.to_thread(resolve_environment, serve(pictures, {"size": size}).url)
        assert spec.shows_images({}) is shows
