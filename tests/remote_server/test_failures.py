"""What goes wrong between a remote environment and its server: repeated, waited for, or told as what it is."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from aiohttp import web
from served_worlds import STAIRS, WAITING, Stairs, Waiting

from agentrl.env import optional_part
from agentrl.env.lookup import resolve_environment
from agentrl.errors import EnvironmentFailure, ToolError, UsageError
from agentrl.message import ImagePart
from agentrl.remote.client import RemoteEnvironment
from agentrl.remote.link import RequestTimeout, SessionLost
from agentrl.rollout.env_pool import EnvPool
from agentrl.task import Task


async def make(url: str, **options: Any) -> RemoteEnvironment:
    spec = await asyncio.to_thread(resolve_environment, url)
    env = spec.make(**options)
    assert isinstance(env, RemoteEnvironment)
    return env


async def begun(url: str, **options: Any) -> RemoteEnvironment:
    env = await make(url, **options)
    await env.reset(seed=1)
    return env


async def test_snapshots_pictures_and_odd_texts_arrive(serve: Any) -> None:
    env = await begun(serve(STAIRS).url)
    await env.step("up")
    saved = await optional_part(env, "snapshot")()
    await env.step("up")
    await optional_part(env, "restore")(saved)
    assert await optional_part(env, "state_key")() == "1"
    assert saved["large"] == 2**100
    await env.close()
    env = await make(serve(WAITING).url)
    (text, picture), _ = await env.reset(seed=5)
    assert text.text == "picture 5"  # type: ignore[union-attr]
    assert picture == ImagePart(data=bytes(range(256)))
    assert (await env.step("\N{SNOWMAN}"))[0] == "you said \N{SNOWMAN}"
    await env.close()


@pytest.mark.parametrize("lost", ["PUT", "reset", "step", "expert_action", "snapshot", "call_tool"])
async def test_lost_answer_is_requested_again_without_a_second_execution(serve: Any, proxy: Any, lost: str) -> None:
    between = proxy(serve(STAIRS).url)
    env = await make(between.url)
    left = iter((True, True))
    between.loses = lambda route: lost in route and next(left, False)
    made, resets, steps = Stairs.made, Stairs.resets, Stairs.steps
    observation, _ = await env.reset(seed=1)
    expert = await optional_part(env, "expert")()
    for height in (1, 2, 3):
        observation, *_ = await env.step(await expert.act(observation))
        assert observation == f"step {height}"
        await optional_part(env, "snapshot")()
        tool = env.tools[0]
        assert await tool.call(tool.remote, {"far": True}) == f"{height} steps below you"
    await env.close()
    assert next(left, None) is None
    assert (Stairs.made - made, Stairs.resets - resets, Stairs.steps - steps) == (0, 1, 3)


async def test_a_lost_connection_is_an_infrastructure_failure_when_patience_ends(serve: Any, proxy: Any) -> None:
    between = proxy(serve(STAIRS).url)
    env = await begun(between.url, patience_s=0.0)
    between.loses = lambda route: True
    with pytest.raises(
        RequestTimeout,
        match=f"the connection to the environment server {between.url} failed: got ServerDisconnected.*1 tries",
    ):
        await env.step("up")
    between.loses = lambda route: False
    assert (await env.step("up"))[0] == "step 2"  # the first one was done, and is not done again
    await env.close()


@pytest.mark.parametrize("after", ["step", "call_tool", "snapshot"])
async def test_a_call_that_never_arrived_is_sent_before_the_next_one(serve: Any, proxy: Any, after: str) -> None:
    between = proxy(serve(STAIRS).url)
    env = await begun(between.url, patience_s=0.0)
    await env.step("up")
    between.swallows = lambda route: True
    steps = Stairs.steps
    with pytest.raises(RequestTimeout):
        await env.step("up")
    assert Stairs.steps == steps
    between.swallows = lambda route: False
    if after == "step":
        assert (await env.step("down"))[0] == "step 2"
    elif after == "call_tool":
        tool = env.tools[0]
        assert await tool.call(tool.remote, {"far": True}) == "2 steps below you"
    else:
        assert (await optional_part(env, "snapshot")())["height"] == 2
    assert Stairs.steps - steps == (2 if after == "step" else 1)
    assert (await env.step("up"))[:2] == ("step 3", 1.0)
    await env.close()


async def test_a_killed_server_ends_the_episode_with_its_address(serve: Any) -> None:
    running = serve(STAIRS)
    spec = await asyncio.to_thread(resolve_environment, running.url)
    pool = EnvPool(spec, options={"patience_s": 0.1})

    async def play() -> None:
        async with pool.borrow("test") as environment:
            await environment.reset(Task(id="a", environment=running.url, seed=1))
            await asyncio.to_thread(running.close)
            await environment.step("up")

    with pytest.raises(EnvironmentFailure, match=rf"{running.url} failed: got ClientConnectorError.*tries in"):
        await play()
    await pool.close()


async def test_expired_lease_ends_the_episode_and_the_next_opens_a_session(serve: Any) -> None:
    running = serve(STAIRS)
    env = await begun(running.url)
    await asyncio.to_thread(running.expire)
    with pytest.raises(SessionLost, match=f"{running.url} lost a session: got no session .* is open.*idle for"):
        await env.step("up")
    assert (await env.reset(seed=2))[0] == "stairs 2"
    await asyncio.to_thread(running.expire)
    assert (await env.reset(seed=3))[0] == "stairs 3"
    assert running.count() == 1
    await env.close()


async def test_a_full_server_is_waited_for(serve: Any, proxy: Any) -> None:
    running = serve(STAIRS, max_sessions=1)
    between = proxy(running.url)
    first = await begun(running.url)
    hasty = await make(running.url, patience_s=0.0)
    with pytest.raises(RequestTimeout, match=r"is full: got all 1 sessions are in use; 1 tries.*Raise --max-sessions"):
        await hasty.reset(seed=1)
    await hasty.close()
    waiting = await make(between.url)
    reset = asyncio.create_task(waiting.reset(seed=7))
    await asyncio.to_thread(between.refused.wait)
    await first.close()
    assert (await reset)[0] == "stairs 7"
    await waiting.close()


async def test_a_step_that_was_given_up_is_finished_before_the_next_one(serve: Any) -> None:
    Waiting.gate = gate = asyncio.Event()
    running = serve(WAITING)
    env = await begun(running.url)
    step = asyncio.create_task(env.step("wait"))
    await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    running.thread.loop.call_soon_threadsafe(gate.set)
    for number, truncated in enumerate((False, False, True)):
        assert (await env.step(f"{number}"))[3] is truncated  # the fourth turn: "wait" was one, too
    await env.close()


async def test_abandoned_step_still_changes_the_state(serve: Any) -> None:
    env = await begun(serve(STAIRS).url)
    state_key = optional_part(env, "state_key")
    assert await state_key() == "0"
    step = asyncio.create_task(env.step("up"))
    await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert await state_key() == "1"
    await env.close()


async def test_a_missed_deadline_throws_the_environment_away(serve: Any) -> None:
    Waiting.gate = asyncio.Event()
    running = serve(WAITING)
    spec = await asyncio.to_thread(resolve_environment, running.url)
    pool = EnvPool(spec, step_timeout_s=0.2)

    async def play() -> None:
        async with pool.borrow("test") as environment:
            await environment.reset(Task(id="a", environment=running.url, seed=1))
            await environment.step("wait")

    with pytest.raises(EnvironmentFailure, match=rf"step of environment {running.url} \(task a, step 1\) missed its d"):
        await play()
    await pool.close()
    assert running.count() == 0


async def test_failures_of_the_environment_keep_their_kinds(serve: Any) -> None:
    url = serve(STAIRS).url
    env = await make(url)
    with pytest.raises(EnvironmentFailure, match=r"step of .* was called before reset"):
        await env.step("up")
    with pytest.raises(UsageError, match=f"{url} refused the request: there are no such stairs: got impossible"):
        await env.reset(seed=1, options={"impossible": True})
    await env.reset(seed=1)
    near, stumble = env.tools
    with pytest.raises(ToolError, match=r"^there is nothing near$"):
        await near.call(near.remote, {"far": False})
    with pytest.raises(ToolError, match="wrong arguments for look_around"):
        await near.call(near.remote, {"fra": False})
    with pytest.raises(ToolError, match=r"^stumble failed \(ValueError\)$"):
        await stumble.call(stumble.remote, {})
    with pytest.raises(EnvironmentFailure, match=rf"the environment at {url} failed: got step of .*the stairs broke"):
        await env.step("fail")
    await env.close()


@pytest.mark.slow
async def test_hundreds_of_episodes_share_their_connections(serve: Any) -> None:
    running = serve(STAIRS)
    spec = await asyncio.to_thread(resolve_environment, running.url)
    envs = [spec.make() for _ in range(200)]

    async def play(number: int) -> float:
        await envs[number].reset(seed=number)
        return sum([(await envs[number].step("up"))[1] for _ in range(3)])

    assert await asyncio.gather(*map(play, range(200))) == [1.0] * 200
    links = {env._link for env in envs}
    assert len(links) == 1
    await asyncio.gather(*(env.close() for env in envs))
    assert links.pop()._session is None
    assert running.count() == 0


def test_the_token_comes_from_the_environment_variable(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url = serve(STAIRS, token="secret").url
    with pytest.raises(UsageError, match=r"refused the token: got no token.*AGENTRL_ENV_TOKEN"):
        resolve_environment(url)
    monkeypatch.setenv("AGENTRL_ENV_TOKEN", "guess")
    with pytest.raises(UsageError, match="refused the token: got wrong token"):
        resolve_environment(url)
    monkeypatch.setenv("AGENTRL_ENV_TOKEN", "secret")
    assert len(resolve_environment(url).tasks("train")) == 250


def other_server(loop_thread: Any, answer: Any) -> str:
    async def start() -> str:
        application = web.Application()
        application.router.add_get("/health", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        loop_thread.ending.append(runner.cleanup)
        return "http://127.0.0.1:{1}".format(*runner.addresses[0][:2])

    return str(loop_thread.run(start()))


async def _another_version(_: web.Request) -> web.Response:
    return web.json_response({"protocol": "agentrl-environment", "versions": [2, 3]})


async def _a_page(_: web.Request) -> web.Response:
    return web.Response(text="<html>welcome</html>")


async def _other_json(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _nothing(_: web.Request) -> web.Response:
    raise web.HTTPNotFound


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (_another_version, "has a different protocol version: got 2, 3, expected 1"),
        (_a_page, r"no environment server found at \S+: got status 200, '<html>welcome</html>'"),
        (_other_json, r"no environment server found at \S+: got \{'status': 'ok'\}"),
        (_nothing, r"no environment server found at \S+: got status 404"),
    ],
)
def test_other_servers_are_detected(loop_thread: Any, answer: Any, words: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve_environment(other_server(loop_thread, answer))
    assert re.search(words, str(error.value))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9", "no environment server answers at http://127.0.0.1:9: got ClientConnectorError"),
        ("http://:80", "http://:80 is not a valid URL"),
    ],
)
def test_wrong_url_is_reported(url: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve_environment(url)
    assert words in str(error.value)


def test_unknown_split_or_option_is_reported(serve: Any) -> None:
    spec = resolve_environment(serve(STAIRS).url)
    with pytest.raises(TypeError, match="size"):
        spec.make(size=3)
