"""The AgentGym adapter, against a server written from the interface of AgentGym's own (which need their data)."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from agentrl.envs.agentgym import SPEC, WORLDS, AgentGymEnv, World
from aiohttp import web

from agentrl.errors import EnvironmentFailure, UsageError

GOAL = 2
"""Say "craft" so many times."""


class Server:
    """One of AgentGym's servers: counts crafts, and ends after two."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.crafted: dict[int, int] = {}
        self.indices: list[Any] = []
        self.closed = threading.Event()

    def number(self, body: Any) -> int:
        return int(body[self.world.handle])

    async def create(self, request: web.Request) -> web.Response:
        body = await request.text()
        assert bool(body) == (self.world.create is not None)
        number = len(self.crafted)
        self.crafted[number] = 0
        return web.json_response({"id": number} if self.world.handle == "id" else number)

    async def reset(self, request: web.Request) -> web.Response:
        body = await request.json()
        number = self.number(body)
        self.crafted[number] = 0
        self.indices.append(body[self.world.index])
        assert {**body, **self.world.reset} == body
        if self.world.handle == "env_idx":
            return web.json_response(["ignored", None])
        told = {"observation": "a bench", "reward": 0.0, "score": 0.0, "done": False}
        return web.json_response(told | {"available_actions": ["craft"], "task_description": "Craft twice."})

    async def observation(self, request: web.Request) -> web.Response:
        assert int(request.query[self.world.handle]) in self.crafted
        return web.json_response("a bench")

    async def step(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["action"] == "break":
            return web.json_response({"error": "the bench broke"})
        if body["action"] == "crash":
            raise web.HTTPInternalServerError(text="out of memory")
        number = self.number(body)
        self.crafted[number] += body["action"] == "craft"
        made = self.crafted[number]
        told = made / GOAL if self.world.is_total else float(made == GOAL)
        observed = {self.world.observation: f"crafted {made}", self.world.reward: told, "done": made == GOAL}
        return web.json_response(observed | {"available_actions": ["craft", "rest"]})

    async def close(self, request: web.Request) -> web.Response:
        self.number(await request.json())
        self.closed.set()
        return web.json_response({"closed": True})


Start = Callable[[str], Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts the server of a world: its address and itself."""
    runners: list[web.AppRunner] = []

    async def start(world: str) -> tuple[str, Server]:
        server, application = Server(WORLDS[world]), web.Application()
        posts = {"create": server.create, "reset": server.reset, "step": server.step, "close": server.close}
        application.add_routes([web.post(f"/{name}", handler) for name, handler in posts.items()])
        application.add_routes([web.get("/observation", server.observation)])
        runners.append(web.AppRunner(application))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        return "http://127.0.0.1:{1}".format(*runners[-1].addresses[0][:2]), server

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.mark.parametrize("world", WORLDS)
async def test_an_episode_of_every_world(start: Start, world: str) -> None:
    url, server = await start(world)
    env = AgentGymEnv(world=world, url=url + "/")
    for index in (7, 8):
        observation, _ = await env.reset(seed=1, options={"index": index})
        assert observation == ("Craft twice.\na bench" if world == "sciworld" else "a bench")
        assert (await env.step("rest"))[:4] == ("crafted 0", 0.0, False, False)
        first, last = await env.step("craft"), await env.step("craft")
        assert first == ("crafted 1", 0.5 if WORLDS[world].is_total else 0.0, False, False, {"success": False})
        assert last == ("crafted 2", 0.5 if WORLDS[world].is_total else 1.0, True, False, {"success": True})
    assert server.indices == [7, 8]
    assert len(server.crafted) == 1
    await env.close()
    assert server.closed.is_set()


async def test_admissible_actions_are_those_of_the_last_answer(start: Start) -> None:
    url, _ = await start("alfworld")
    env = AgentGymEnv(world="alfworld", url=url, max_steps=1)
    await env.reset(seed=3)
    assert env.admissible_actions() == ["craft"]
    assert (await env.step("rest"))[3] is True
    assert env.admissible_actions() == ["craft", "rest"]
    await env.close()
    assert not hasattr(AgentGymEnv(world="textcraft", url=url), "admissible_actions")


async def test_failures_of_the_server_are_failures_of_the_environment(start: Start) -> None:
    url, _ = await start("textcraft")
    env = AgentGymEnv(world="textcraft", url=url)
    await env.reset(seed=0)
    with pytest.raises(EnvironmentFailure, match=rf"server {url} failed: got /step: the bench broke"):
        await env.step("break")
    with pytest.raises(EnvironmentFailure, match=rf"server {url} refuses a request: got 500 of /step: out of memory"):
        await env.step("crash")
    await env.close()
    lost = AgentGymEnv(world="textcraft", url="http://127.0.0.1:9")
    with pytest.raises(EnvironmentFailure, match=r"server http://127\.0\.0\.1:9 is lost: got ClientConnectorError"):
        await lost.reset(seed=0)
    await lost.close()


def test_the_options_say_which_server_and_which_tasks() -> None:
    train, test = (SPEC.tasks(split, train=[0, 374], test=[374, 474], world="textcraft") for split in SPEC.splits)
    assert (len(train), len(test)) == (374, 100)
    assert {train[i].seed for i in range(374)} & {test[i].seed for i in range(100)} == set()
    assert (test[0].id, test[0].options) == ("test-374", {"index": 374})
    with pytest.raises(IndexError):
        _ = test[100]
    with pytest.raises(UsageError, match=r"which tasks are in train\?: got \[\], expected \[first, end\]"):
        SPEC.tasks("train", test=[1, 2])
    with pytest.raises(UsageError, match=r"share tasks: got \[0, 5\] and \[4, 6\]"):
        SPEC.tasks("test", train=[0, 5], test=[4, 6])
    with pytest.raises(UsageError, match=r"which AgentGym server\?: got world minecraft"):
        SPEC.make(world="minecraft", url="http://127.0.0.1:1")
