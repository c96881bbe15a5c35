"""Cost of the gateway: CPU time per request, and the delay from the engine to the first text of a stream.

The gateway and the scripted engine run in this process. Clients run all sessions concurrently in another process, and
send their growing histories as the vendors' packages do. The figures include all CPU time of this process: HTTP, JSON,
matching of histories, rendering, the token ledger, and the scripted engine's few microseconds per token. For
comparison, the same turns are also run without HTTP, through the same ledger.

    agentrl bench gateway
    agentrl bench gateway --versus all sessions=16 turns=4
    agentrl bench gateway sessions=50 turns=20 'dialects=["chat"]' --json gateway.json
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import gymnasium
from proxies.side_by_side import compare
from support.gateway_client import DIALECTS
from support.tokenizers import build_tokenizer

from agentrl.agent_loop import AgentLoop, Episode
from agentrl.config.engines import ScriptedEngineConfig
from agentrl.engine import SamplingParams
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import Outcome, UsageError
from agentrl.gateway import Gateway
from agentrl.message import user
from agentrl.render.renderer import Renderer
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import Assignment, EpisodeRunner, play_all
from agentrl.serving.scripted import ScriptedEngine
from agentrl.task import SeedTasks, Task

ANSWER = "I have to look further, so I open the next cabinet and see what is in it."
QUESTION = "On the shelf you see a mug, two plates and a book."
TOKEN_S = 0.03
"""Seconds between two tokens of a measured stream."""
STREAMS = 16
FIRST_TEXTS = (b'"content":"I', b'"delta":"I', b'"text":"I')
"""Encodings of the first text of `ANSWER` in a stream."""


class _Nothing(gymnasium.Env[str, str]):
    observation_space = action_space = gymnasium.spaces.Text(10)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {}


class _Behind(AgentLoop):
    """Agent loop in which clients in another process play each episode."""

    def __init__(self, gateway: Gateway, address: Callable[[str], Awaitable[None]]) -> None:
        self._gateway, self._address = gateway, address

    async def run(self, episode: Episode) -> None:
        await episode.reset()
        async with self._gateway.session(episode) as session:
            await self._address(f"{self._gateway.url_of(session)} {session.key}")


class _Direct(AgentLoop):
    """Agent loop with the same turns without HTTP."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def run(self, episode: Episode) -> None:
        await episode.reset()
        conversation = episode.open([user(QUESTION)])
        for _ in range(self._turns):
            await conversation.generate()
            conversation.add(user(QUESTION))


class _Engine(ScriptedEngine):
    """Scripted engine that records when it sent the first token of each answer."""

    def __init__(self, renderer: Renderer, delay_s: float = 0.0) -> None:
        ids = [*renderer.encoder.encode(ANSWER), renderer.boundary.end_id]
        super().__init__(ScriptedEngineConfig(delay_s=delay_s), script=lambda request: ids, max_context=100_000)
        self.first_s: list[float] = []

    def _advance(self, playing: Any, most: int) -> None:
        if not playing.played:
            self.first_s.append(time.monotonic())
        super()._advance(playing, most)


def run(
    sessions: int = 500,
    turns: int = 8,
    dialects: Sequence[str] = tuple(DIALECTS),
    versus: str = "",
    rounds: int = 3,
) -> dict[str, Any]:
    """Measure each dialect, streamed and unstreamed, or compare the gateway with other proxies.

    Args:
        sessions: Concurrent sessions.
        turns: Requests of each session.
        dialects: Names of `DIALECTS`.
        versus: Peers, separated by commas, or ``all``: Chat Completions of each in front of one server.
        rounds: Measurements of each proxy of a comparison.
    """
    if versus:
        if sessions < 1 or turns < 1 or rounds < 1:
            got = f"sessions={sessions} turns={turns} rounds={rounds}"
            raise UsageError("a size of the comparison is too small", got=got, expected="at least 1")
        renderer = Renderer(build_tokenizer("qwen3"))
        ids = [*renderer.encoder.encode(ANSWER), renderer.boundary.end_id]
        sizes = {"sessions": sessions, "turns": turns, "rounds": rounds}
        return asyncio.run(compare(ids, ANSWER, versus=versus, clients=Path(__file__), **sizes))
    figures: dict[str, Any] = {"without HTTP": {"cpu_ms_per_turn": asyncio.run(_direct(sessions, turns))}}
    for dialect in dialects:
        whole = asyncio.run(_measure(sessions, turns, dialect, streams=False))
        streamed = asyncio.run(_measure(sessions, turns, dialect, streams=True))
        late = asyncio.run(_measure(STREAMS, 2, dialect, streams=True, delay_s=TOKEN_S))
        figures[dialect] = {
            "cpu_ms_per_request": whole["cpu_ms"],
            "requests_per_s": whole["requests_per_s"],
            "cpu_ms_per_stream": streamed["cpu_ms"],
            "first_token_late_ms_median": late["late_ms_median"],
            "first_token_late_ms_p95": late["late_ms_p95"],
        }
    return figures


async def _direct(sessions: int, turns: int) -> float:
    renderer = Renderer(build_tokenizer("qwen3"))
    began = time.process_time()
    await _play(_Direct(turns), _Engine(renderer), renderer, sessions)
    return 1000 * (time.process_time() - began) / sessions / turns


async def _measure(sessions: int, turns: int, dialect: str, *, streams: bool, delay_s: float = 0.0) -> dict[str, float]:
    renderer = Renderer(build_tokenizer("qwen3"))
    engine, gateway = _Engine(renderer, delay_s), Gateway()
    await gateway.start()
    words = [sys.executable, __file__, dialect, str(turns), str(int(streams))]
    pipe = asyncio.subprocess.PIPE
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    clients = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, limit=1 << 26, env=path)
    assert clients.stdin is not None
    assert clients.stdout is not None
    stdin = clients.stdin
    addresses: list[str] = []
    all_there, is_over = asyncio.Event(), asyncio.Event()

    async def address(line: str) -> None:
        addresses.append(line)
        if len(addresses) == sessions:
            stdin.write("\n".join([*addresses, "", ""]).encode())
            all_there.set()
        await is_over.wait()

    playing = asyncio.ensure_future(_play(_Behind(gateway, address), engine, renderer, sessions))
    await all_there.wait()
    began = time.process_time()
    result = json.loads(await clients.stdout.readline())
    spent = time.process_time() - began
    is_over.set()
    await playing
    await clients.wait()
    await gateway.close()
    if result["failed"]:
        raise RuntimeError(f"{result['failed']} of {sessions * turns} requests failed: {result['example']}")
    found = {"cpu_ms": 1000 * spent / sessions / turns, "requests_per_s": sessions * turns / result["seconds"]}
    if result["first_s"]:
        # engine and clients process the answers in nearly the same order
        late = sorted(
            1000 * (seen - sent) for sent, seen in zip(sorted(engine.first_s), sorted(result["first_s"]), strict=True)
        )
        found |= {"late_ms_median": statistics.median(late), "late_ms_p95": late[int(0.95 * len(late))]}
    return found


async def _play(loop: AgentLoop, engine: ScriptedEngine, renderer: Renderer, sessions: int) -> None:
    spec = EnvironmentSpec(name="nothing", make=_Nothing, tasks=SeedTasks, isolation=Isolation.INLINE)
    policy = EngineEpisodePolicy(engine, renderer, SamplingParams())
    limits = EpisodeLimits(max_turns=10_000, max_tokens=100_000)
    runner = EpisodeRunner(pool=EnvPool(spec, max_concurrent=sessions), loop=loop, policy=policy, limits=limits)
    tasks = [Task(id=str(number), environment="nothing", seed=number) for number in range(sessions)]
    assignments = [Assignment(task=task, group_id=task.id, member=0, seed=task.seed or 0) for task in tasks]
    async for trajectory in play_all(runner, assignments, concurrency=sessions):
        assert trajectory.outcome is Outcome.FINISHED, trajectory.error
    await runner.close()


async def _clients(dialect: str, turns: int, streams: bool) -> None:
    """Play all sessions whose URLs are on standard input, and print the measurements."""
    lines = iter(sys.stdin.readline, "\n")
    addresses = [line.split() for line in lines]
    failures: list[str] = []
    first_s: list[float] = []
    waited_s: list[float] = []
    route, write, read, _ = DIALECTS[dialect]
    began = time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def play(url: str, key: str) -> None:
            history = [{"role": "user", "text": QUESTION}]
            for _ in range(turns):
                body = write(history, False) | ({"stream": True} if streams else {})
                asked_s = time.monotonic()
                async with http.post(url + route, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
                    if answer.status != 200:
                        failures.append(await answer.text())
                        return
                    if streams:
                        first_s.append(await _first_text(answer.content))
                        waited_s.append(first_s[-1] - asked_s)
                        said = {"role": "assistant", "text": ANSWER, "calls": []}
                    else:
                        said = read(await answer.json())
                history += [said, {"role": "user", "text": QUESTION}]

        await asyncio.gather(*(play(url, key) for url, key in addresses))
    seconds = time.monotonic() - began
    example = failures[0] if failures else ""
    print(
        json.dumps(
            {"seconds": seconds, "failed": len(failures), "example": example, "first_s": first_s, "waited_s": waited_s}
        )
    )


async def _first_text(content: aiohttp.StreamReader) -> float:
    """Read a stream to its end; return the time at which its text began."""
    seen = math.nan
    async for line in content:
        if math.isnan(seen) and b"I" in line and any(mark in line.replace(b": ", b":") for mark in FIRST_TEXTS):
            seen = time.monotonic()
    return seen


if __name__ == "__main__":
    asyncio.run(_clients(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"))
