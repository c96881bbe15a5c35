"""The AgentGym adapter, against exchanges in the form of AgentGym's own servers (which need their data).

The exchanges are written out for each world: five from what the project says in its clients, the others in the shapes
that the adapter expects. Nothing is imported from the adapter.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from agentrl.envs.agentgym import SPEC, WORLDS, AgentGymEnv
from aiohttp import web

from agentrl.errors import EnvironmentFailure, UsageError

Exchange = tuple[str, Any, Any]
"""Method and route, what is sent (``None``: nothing), what is answered."""


def by_reset(number: str, reset: dict[str, Any], told: dict[str, Any], steps: list[dict[str, Any]]) -> list[Exchange]:
    """Of a server whose reset tells the observation."""
    actions = ("wait", "go", "go")
    taken = [("POST /step", {number: 0, "action": action}, step) for action, step in zip(actions, steps, strict=True)]
    return [("POST /reset", {number: 0, **reset}, told), *taken, ("POST /close", {number: 0}, True)]


def by_observation(reset: dict[str, Any], steps: list[dict[str, Any]]) -> list[Exchange]:
    """Of a server that is asked for the observation."""
    first, *others = by_reset("env_idx", reset, {}, steps)
    answers = (first[0], first[1], ["a text", None])
    return [answers, ("GET /observation?env_idx=0", None, "the start"), *others]


EACH = [
    {"observation": "no", "reward": 0.0, "done": False},
    {"observation": "half", "reward": 0.0, "done": False},
    {"observation": "won", "reward": 1.0, "done": True},
]
"""The reward is the step's."""
TOTAL = [
    {"observation": "no", "reward": 0.0, "done": False},
    {"observation": "half", "reward": 0.5, "done": False},
    {"observation": "won", "reward": 1.0, "done": True},
]
"""The reward is the best so far."""
STATE = [{"state": step["observation"], "reward": step["reward"], "done": step["done"]} for step in EACH]
SCORE = [{**step, "reward": 7.0, "score": step["reward"]} for step in TOTAL]
LISTED = [{**step, "available_actions": ["go", "look"]} for step in EACH]
START = {"observation": "the start", "reward": 0.0, "done": False}
CREATED: Exchange = ("POST /create", None, {"id": 0})
TOOLS = [("POST /create", {"id": 0}, 0), *by_observation({"id": 7}, TOTAL)]

EXCHANGES: dict[str, list[Exchange]] = {
    "academia": TOOLS,
    "alfworld": [
        CREATED,
        *by_reset("id", {"game": 7, "world_type": "Text"}, START | {"available_actions": ["go"]}, LISTED),
    ],
    "babyai": [CREATED, *by_reset("id", {"data_idx": 7}, START | {"score": 0.0}, SCORE)],
    "maze": [CREATED, *by_reset("id", {"game": 7}, START, EACH)],
    "movie": TOOLS,
    "sciworld": [CREATED, *by_reset("id", {"data_idx": 7}, START | {"task_description": "Find a seed."}, SCORE)],
    "searchqa": [("POST /create", {"id": 0}, 0), *by_observation({"id": 7}, EACH)],
    "sheet": TOOLS,
    "sqlgym": [("POST /create", None, 0), *by_observation({"item_id": 7}, STATE)],
    "textcraft": [("POST /create", {}, {"id": 0, "observation": "?"}), *by_reset("id", {"data_idx": 7}, START, EACH)],
    "todo": TOOLS,
    "weather": TOOLS,
    "webshop": [("POST /create", None, 0), *by_observation({"session_id": 7}, STATE)],
    "wordle": [CREATED, *by_reset("id", {"seed": 7}, START, EACH)],
}
HALVES = {"academia", "babyai", "movie", "sciworld", "sheet", "todo", "weather"}
"""Worlds that pay for half of the way."""


@dataclass
class Server:
    """Answers exchanges in order, and notes what differs from them."""

    left: list[Exchange]
    url: str = ""

    async def answer(self, request: web.Request) -> web.Response:
        route, sent, answered = self.left.pop(0)
        text = await request.text()
        assert (f"{request.method} {request.path_qs}", await request.json() if text else None) == (route, sent)
        if isinstance(answered, web.HTTPException):
            raise answered
        return web.json_response(answered)


Start = Callable[[list[Exchange]], Awaitable[Server]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a server of exchanges."""
    runners: list[web.AppRunner] = []

    async def start(exchanges: list[Exchange]) -> Server:
        server, application = Server([*exchanges]), web.Application()
        application.add_routes([web.route("*", "/{name}", server.answer)])
        runners.append(web.AppRunner(application))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        server.url = "http://127.0.0.1:{1}".format(*runners[-1].addresses[0][:2])
        return server

    yield start
    for runner in runners:
        await runner.cleanup()


def test_exchanges_of_all_worlds_are_written_out() -> None:
    assert WORLDS.keys() == EXCHANGES.keys()


@pytest.mark.parametrize("world", EXCHANGES)
async def test_an_episode_of_every_world(start: Start, world: str) -> None:
    server = await start(EXCHANGES[world])
    env = AgentGymEnv(world=world, url=server.url + "/")
    observation, _ = await env.reset(seed=1, options={"index": 7})
    assert observation == ("Find a seed.\nthe start" if world == "sciworld" else "the start")
    half = 0.5 if world in HALVES else 0.0
    assert (await env.step("wait"))[:4] == ("no", 0.0, False, False)
    assert await env.step("go") == ("half", half, False, False, {"success": False})
    assert await env.step("go") == ("won", 1.0 - half, True, False, {"success": True})
    await env.close()
    assert server.left == []


async def test_a_second_episode_begins_from_nothing(start: Start) -> None:
    create, *episode, _ = EXCHANGES["babyai"]
    server = await start([create, *episode, *episode])
    env = AgentGymEnv(world="babyai", url=server.url)
    for _ in range(2):
        await env.reset(seed=7)
        assert [(await env.step(action))[1] for action in ("wait", "go", "go")] == [0.0, 0.5, 0.5]
    assert server.left == []
    server.left.append(("POST /close", {"id": 0}, True))
    await env.close()


async def test_admissible_actions_come_from_the_last_answer(start: Start) -> None:
    server = await start(EXCHANGES["alfworld"])
    env = AgentGymEnv(world="alfworld", url=server.url, max_steps=1)
    await env.reset(seed=7)
    assert env.admissible_actions() == ["go"]
    assert (await env.step("wait"))[3] is True
    assert env.admissible_actions() == ["go", "look"]
    del server.left[:-1]
    await env.close()
    assert not hasattr(AgentGymEnv(world="textcraft", url=server.url), "admissible_actions")


async def test_failures_of_the_server_are_failures_of_the_environment(start: Start) -> None:
    create, reset, *_, close = EXCHANGES["textcraft"]
    broken = ("POST /step", {"id": 0, "action": "break"}, {"error": "the bench broke"})
    crashed = ("POST /step", {"id": 0, "action": "crash"}, web.HTTPInternalServerError(text="out of memory"))
    server = await start([create, reset, broken, crashed, close])
    env = AgentGymEnv(world="textcraft", url=server.url)
    await env.reset(seed=7)
    with pytest.raises(EnvironmentFailure, match=rf"server {server.url} failed: got /step: the bench broke"):
        await env.step("break")
    with pytest.raises(EnvironmentFailure, match=rf"{server.url} refuses a request: got 500 of /step: out of memory"):
        await env.step("crash")
    await env.close()
    lost = AgentGymEnv(world="textcraft", url="http://127.0.0.1:9")
    with pytest.raises(EnvironmentFailure, match=r"server http://127\.0\.0\.1:9 is lost: got ClientConnectorError"):
        await lost.reset(seed=0)
    await lost.close()


def test_options_select_the_server_and_the_tasks() -> None:
    train, test = (SPEC.tasks(split, train=[0, 374], test=[374, 474], world="textcraft") for split in SPEC.splits)
    assert (len(train), len(test)) == (374, 100)
    assert {train[i].seed for i in range(374)} & {test[i].seed for i in range(100)} == set()
    assert (test[0].id, test[0].options) == ("test-374", {"index": 374})
    with pytest.raises(IndexError):
        _ = test[100]
    with pytest.raises(UsageError, match=r"tasks of split train is not valid: got \[\], expected \[first, end\]"):
        SPEC.tasks("train", test=[1, 2])
    with pytest.raises(UsageError, match=r"share tasks: got \[0, 5\] and \[4, 6\]"):
        SPEC.tasks("test", train=[0, 5], test=[4, 6])
    with pytest.raises(TypeError, match="max_step"):
        SPEC.make(world="textcraft", url="http://127.0.0.1:1", max_step=3)
    with pytest.raises(TypeError, match="max_step"):
        SPEC.tasks("test", test=[0, 6], max_step=3)
    with pytest.raises(UsageError, match=r"the AgentGym server is not set: got world minecraft"):
        SPEC.make(world="minecraft", url="http://127.0.0.1:1")
