"""Measurement of the whole runtime and the bare client, in alternation, on one server with the same tokens."""

from __future__ import annotations

import os
import random
import time
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from agentrl.builders.episodes import build_env_pool, build_runner, sampling_params
from agentrl.builders.models import build_renderer, resolve_model
from agentrl.builders.scratch import write_scratch_model
from agentrl.builders.servers import ServedModel, check_served, open_pool
from agentrl.config.config import SCRATCH, Config
from agentrl.config.engines import ServerEngineConfig
from agentrl.engine import GenerateRequest, PolicyEngine
from agentrl.env.lookup import resolve_environment
from agentrl.errors import AgentRLError
from agentrl.models.load import embedding_rows, load_model
from agentrl.observe.console import note
from agentrl.observe.progress import RunStatus, RunWatcher
from agentrl.observe.trajectory_store import TrajectoryStore
from agentrl.render.tokenizers import load_tokenizer
from agentrl.rollout.heap import settled_heap
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import Assignment, play_all
from agentrl.rollout.task_source import task_source
from agentrl.rollout.waits import WaitTracker
from agentrl.runs.record import EpisodeRecorder
from agentrl.serving.scripted import ScriptedEngine
from agentrl.task import TaskCursor
from throughput.bare_client import WIRES, forget, play
from throughput.server import open_server, server_version
from throughput.sessions import Session, as_session
from throughput.stand_in import open_stand_in

STOP_EVERY = 24
"""Interval of the token ids that end an answer of a model with random weights. Its answers thus differ in length like
those of other models; answers of equal length would keep all episodes in step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Size of a measurement."""

    episodes: int
    concurrency: int
    rounds: int
    """Number of rounds, each with the runtime and then the bare client with the runtime's token counts."""
    stand_in: bool = False
    """True if the server is `throughput.stand_in`; rounds then end with the runtime on an engine without HTTP."""


@dataclass(slots=True)
class Stopwatch:
    """Wall-clock seconds, and CPU seconds of this process."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def __enter__(self) -> Stopwatch:
        self.seconds, self.cpu_seconds = -time.perf_counter(), -time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter()
        self.cpu_seconds += time.process_time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One measurement."""

    sessions: list[Session]
    tokens: int
    watch: Stopwatch

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second."""
        return self.tokens / self.watch.seconds

    @property
    def cpu_ms_per_turn(self) -> float:
        """CPU milliseconds of this process per turn."""
        return 1000 * self.watch.cpu_seconds / sum(map(len, self.sessions))


async def measure(config: Config, section: ServerEngineConfig, load: Load, folder: Path) -> dict[str, Any]:
    """Return the figures of one server.

    Args:
        config: Environment, agent, model, sampling.
        section: Engine section: one server, launched or attached to.
        load: Size of the measurement.
        folder: Folder for the model, the server's log and the episodes.
    """
    path = await _model_path(config, folder)
    served = ServedModel(path=path, dtype=config.model.dtype, vocab_size=embedding_rows(path))
    opened = open_stand_in(served.vocab_size) if load.stand_in else open_server(section, served, folder)
    async with opened as url:
        attached = type(section)(servers=[url], max_num_seqs=section.max_num_seqs)
        bench = _Bench(config, attached, served, folder)
        if not load.stand_in:
            await bench.check()
        await bench.round(replace(load, episodes=load.concurrency // 2))
        runtime, bare, without_http = [], [], []
        for number in range(load.rounds):
            with_runtime, without = await bench.round(load)
            runtime.append(with_runtime)
            bare.append(without)
            if load.stand_in:
                without_http.append(await bench.without_http(load))
            note(f"round {number + 1}: {with_runtime.tokens_per_s:,.0f} and {without.tokens_per_s:,.0f} tokens/s")
        version = await server_version(url, section.type)
    figures = _figures(runtime, bare) | _conditions(runtime[-1].sessions, load, version, served)
    if without_http:
        figures["cpu_ms_per_turn_without_http"] = median(played.cpu_ms_per_turn for played in without_http)
    return figures


async def _model_path(config: Config, folder: Path) -> str:
    if config.model.path != SCRATCH:
        return resolve_model(config).model.path
    note("making a model with random weights")
    await write_scratch_model(config, folder / "model")
    return str(folder / "model")


class _Bench:
    """Benchmark on one server."""

    def __init__(self, config: Config, section: ServerEngineConfig, served: ServedModel, folder: Path) -> None:
        self._config = config
        self._section = section
        self._served = served
        self._folder = folder
        self._url = section.servers[0]
        self._wire = WIRES[section.type]
        self._tokenizer = load_tokenizer(served.path)
        self._sampling = replace(
            sampling_params(config.sampling),
            stop_token_ids=frozenset(range(0, served.vocab_size, STOP_EVERY) if config.model.path == SCRATCH else ()),
        )
        self._version = 0

    async def check(self) -> None:
        """Check that the server has the model's weights, under any version."""
        async with open_pool(self._section, self._served, self._folder) as pool:
            await check_served(pool, self._served)
            self._version = pool.version

    async def round(self, load: Load) -> tuple[Played, Played]:
        """Measure the runtime, then the bare client, each with an empty prefix cache and no other clients."""
        runtime = await self._runtime(load)
        await forget(self._url, self._wire)
        with settled_heap(WaitTracker()), Stopwatch() as watch:
            tokens = await play(self._url, self._wire, runtime.sessions, concurrency=load.concurrency)
        if tokens != runtime.tokens:
            raise AgentRLError("the bare client sampled other tokens", got=tokens, expected=runtime.tokens)
        return runtime, Played(sessions=runtime.sessions, tokens=tokens, watch=watch)

    async def without_http(self, load: Load) -> Played:
        """Measure the runtime with the scripted engine, whose answers are like those of the stand-in."""
        return await self._play(ScriptedEngine(script=self._sampled, vocab_size=self._served.vocab_size), load)

    def _sampled(self, request: GenerateRequest) -> list[int]:
        return random.choices(range(self._served.vocab_size), k=request.params.max_tokens)

    async def _runtime(self, load: Load) -> Played:
        async with open_pool(self._section, self._served, self._folder, version=self._version) as pool:
            await forget(self._url, self._wire)
            return await self._play(pool, load)

    async def _play(self, engine: PolicyEngine, load: Load) -> Played:
        config, spec = self._config, resolve_environment(self._config.sole_environment.name)
        tasks = TaskCursor(task_source(spec, config.sole_environment), seed=config.run.seed)
        assignments = [
            Assignment(task=tasks.next(), group_id=f"episode-{number}", member=0, seed=number)
            for number in range(load.episodes)
        ]
        async with AsyncExitStack() as stack:
            env_pool = build_env_pool(config, spec=spec)
            stack.push_async_callback(env_pool.close)
            store = stack.enter_context(closing(TrajectoryStore(self._folder / "trajectories", step=1)))
            renderer = build_renderer(config, self._served.path, self._tokenizer)
            policy = EngineEpisodePolicy(engine, renderer, self._sampling)
            observer = EpisodeRecorder(store, RunStatus(), RunWatcher(), env_pool.waits)
            runner = build_runner(config, env_pool, policy, observer=observer, retries=0)
            with settled_heap(env_pool.waits), Stopwatch() as watch:
                played = [
                    trajectory async for trajectory in play_all(runner, assignments, concurrency=load.concurrency)
                ]
        if failed := next((t.error for t in played if t.outcome is None or t.outcome.is_infrastructure), None):
            raise AgentRLError("an episode failed", got=failed)
        return Played(
            sessions=[as_session(trajectory) for trajectory in played],
            tokens=sum(trajectory.sampled_tokens for trajectory in played),
            watch=watch,
        )


def _figures(runtime: list[Played], bare: list[Played]) -> dict[str, Any]:
    ratios = [ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in zip(runtime, bare, strict=True)]
    return {
        "tokens_per_s": median(played.tokens_per_s for played in runtime),
        "bare_tokens_per_s": median(played.tokens_per_s for played in bare),
        "ratio_to_bare_client": median(ratios),  # adjacent in time: depends less on other load
        "ratios": ratios,
        "cpu_ms_per_turn": median(played.cpu_ms_per_turn for played in runtime),
        "bare_cpu_ms_per_turn": median(played.cpu_ms_per_turn for played in bare),
    }


def _conditions(sessions: list[Session], load: Load, engine: str, served: ServedModel) -> dict[str, Any]:
    turns = [turn for session in sessions for turn in session]
    return {
        "engine": engine,
        "cores": len(os.sched_getaffinity(0)),
        "parameters": load_model(served.path, dtype=served.dtype).num_parameters(),
        "concurrency": load.concurrency,
        "episodes": load.episodes,
        "rounds": load.rounds,
        "turns_per_episode": len(turns) / len(sessions),
        "answer_tokens_per_turn": fmean(turn.answer_tokens for turn in turns),
        "new_tokens_per_turn": fmean(len(turn.new_ids) for turn in turns),
    }
