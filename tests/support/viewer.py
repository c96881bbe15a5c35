"""A viewer and a client of it, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from agentrl.errors import Outcome
from agentrl.message import Message, user
from agentrl.observe.trajectory_store import TrajectoryStore
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn
from agentrl.viewer.server import ViewerServer, ViewerSettings


@dataclass
class Viewer:
    """A viewer and its client."""

    server: ViewerServer
    client: TestClient[Any, Any]

    async def get(self, path: str, **options: Any) -> Any:
        """Return the JSON of an address that exists."""
        async with self.client.get(path, **options) as answer:
            data = await answer.read()
            assert answer.status == 200, data
            return orjson.loads(data)

    async def refuse(self, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        """Return the status and the error of an address."""
        async with self.client.get(path, **options) as answer:
            return answer.status, orjson.loads(await answer.read())["error"]

    async def answer(self, path: str, **options: Any) -> tuple[ClientResponse, bytes]:
        """Return an answer and its body."""
        async with self.client.get(path, allow_redirects=False, **options) as answer:
            return answer, await answer.read()

    async def indexed(self, key: str) -> None:
        """Wait until the whole store of a source is in the index."""
        opened = self.server.library[key]
        opened.want_index()
        assert await asyncio.to_thread(opened.index.scanned.wait, 100)

    async def rows(self, key: str, query: str = "") -> list[dict[str, Any]]:
        """Return episodes."""
        await self.indexed(key)
        found: list[dict[str, Any]] = (await self.get(f"/api/r/{key}/episodes?{query}"))["rows"]
        return found


def episode_path(key: str, identity: str) -> str:
    """Return the address of an episode."""
    return f"/api/r/{key}/episode/{quote(identity, safe='')}"


@asynccontextmanager
async def open_viewer(*folders: Path, **settings: Any) -> AsyncIterator[Viewer]:
    """Open a viewer of some folders, with settings of `ViewerSettings`."""
    server = ViewerServer(ViewerSettings(folders=folders, **settings))
    await server.open()
    client = TestClient(TestServer(server.application))
    await client.start_server()
    try:
        yield Viewer(server, client)
    finally:
        server.hub.close()
        await client.close()
        await server.close()


def an_episode(number: int, *, turns: int = 2) -> Trajectory:
    """Return an episode of group ``9-new`` with answers ``aaa``."""
    sequence = TokenSequence()
    sequence.extend([5, 6, 7], Source.PROMPT)
    episode = Trajectory(
        id=f"9-new/{number}.0",
        task_id="new",
        environment="letters:Letters",
        seed=1,
        group_id="9-new",
        sequences=[sequence],
    )
    messages = [user("Write a.")]
    for index in range(turns):
        start = len(sequence)
        sequence.extend_sampled([8, 9], logprobs=[-0.5, -0.1], versions=[3, 3])
        sequence.turns.append(Turn(index=index, start=start, end=len(sequence)))
        sequence.extend([5], Source.OBSERVATION)
        answer = Message(role="assistant", content="aaa")
        messages += [answer, user("More.")]
        episode.answers.append(answer)
        episode.completions.append("aaa")
    episode.conversations.append(messages)
    episode.outcome, episode.reward, episode.success = Outcome.FINISHED, 0.5, True
    return episode


def store(folder: Path, *episodes: Trajectory, step: int = 5) -> None:
    """Write episodes into the store of a run; those without an outcome have not ended."""
    with TrajectoryStore(folder / "trajectories", step=step) as written:
        for episode in episodes:
            written.start(episode)
            for turn in episode.turns:
                written.turn(episode, turn)
            if episode.outcome is not None:
                written.end(episode)
