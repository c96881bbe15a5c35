"""Cost of the rollout runtime.

Without an engine: CPU time per turn of many concurrent episodes on the scripted engine, in one process. It includes
everything between two requests to a model: the agent loop, rendering and the token ledger, the environment pool with a
trivial inline environment, budgets, records, and the scripted engine's few microseconds. Episodes have as many
turns and about as many tokens per turn as household episodes. With tool_calling, each turn is a call of an inline tool.

With vllm or sglang: tokens per second through the whole runtime on a server, compared with a bare client of the same
server that requests the same numbers of tokens in the same order; household episodes as in the quick start, with longer
answers. The model has random weights and is larger than the quick start's, because with the smallest models on few
shared cores, a turn costs the server little more than the runtime.

    agentrl bench rollout
    agentrl bench rollout --engine vllm --json rollout.json
    agentrl bench rollout --engine vllm stand_in=true
    agentrl bench rollout --versus all --json versus.json
    agentrl bench rollout --versus trl,verifiers --engine vllm at_once=[64]

With `stand_in`, vLLM is not needed: a process without a model replaces it, and `cpu_ms_per_turn` of the runtime is
compared with the bare client's, and with the runtime's on an engine without HTTP. The last two commands alternate with
other frameworks, which play the same tool episodes on a server that answers immediately or on a vLLM server
(`peers.rollout_versus`).
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
from peers.rollout_versus import compare_rollouts
from support.tokenizers import build_tokenizer
from throughput.measure import Load, measure

from agentrl.config import load_config
from agentrl.config.derived import make_agent_loop
from agentrl.config.engines import ServerEngineConfig
from agentrl.engine import GenerateRequest, SamplingParams
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import UsageError
from agentrl.render.renderer import Renderer
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import Assignment, EpisodeRunner, play_all
from agentrl.serving.scripted import ScriptedEngine
from agentrl.task import SeedTasks, Task
from agentrl.tool import tool

ANSWER_TOKENS = 64
"""Maximum number of tokens of an answer on a server."""
SCRATCH = "model.scratch={layers: 4, hidden_size: 384, heads: 6, kv_heads: 2}"
"""Sizes of the served model with random weights: 7 M parameters."""
ANSWERS = ("<think>I have to look further.</think><action>go to cabinet {}</action>", 20)
CALLS = ('<tool_call>\n{{"name": "look", "arguments": {{"cabinet": {}}}}}\n</tool_call>', 20)
"""Answer of the policy that calls a tool."""


class Cabinets(gymnasium.Env[str, str]):
    """Environment that answers any action with a sentence, `turns` times."""

    observation_space = action_space = gymnasium.spaces.Text(200)

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._taken = 0
        self._room = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._taken, self._room = 0, int(self.np_random.integers(10**6))
        return "You are in a room with cabinets 1 to 20. Your task is to: put a clean mug in cabinet 7.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Count a step."""
        self._taken += 1
        done = self._taken >= self._turns
        return (
            f"The cabinet {self._taken} of room {self._room} is closed. You did: {action}.",
            float(done),
            done,
            False,
            {"success": done},
        )


def make_runner(loop: str, options: dict[str, Any], turns: int) -> EpisodeRunner:
    """Create a runner whose policy always gives valid answers."""
    tokenizer = build_tokenizer("qwen2.5")
    renderer = Renderer(tokenizer)
    template, count = CALLS if loop == "tool_calling" else ANSWERS
    answers = [[*renderer.encoder.encode(template.format(n)), renderer.boundary.end_id] for n in range(count)]

    def script(request: GenerateRequest) -> list[int]:
        return answers[(request.params.seed or 0) % count]

    spec = EnvironmentSpec(name="cabinets", make=Cabinets, tasks=SeedTasks, isolation=Isolation.INLINE)
    pool = EnvPool(spec, options={"turns": turns}, max_concurrent=10_000)
    engine = ScriptedEngine(script=script, vocab_size=len(tokenizer))
    return EpisodeRunner(
        pool=pool,
        loop=make_agent_loop(loop, options),
        policy=EngineEpisodePolicy(engine, renderer, SamplingParams()),
        tools=[tool(look, inline=True)] if loop == "tool_calling" else [],
        limits=EpisodeLimits(max_turns=turns),
    )


def look(cabinet: int) -> str:
    """Look into a cabinet.

    Args:
        cabinet: Its number.
    """
    return f"The cabinet {cabinet} is closed. You see nothing else in this room."


async def measure_scripted(loop: str, options: dict[str, Any], *, episodes: int, turns: int) -> dict[str, float]:
    """Play all episodes concurrently."""
    runner = make_runner(loop, options, turns)
    assignments = [
        Assignment(task=Task(id=str(n), environment="cabinets", seed=n), group_id=str(n), member=0, seed=n)
        for n in range(episodes)
    ]
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = taken = 0
    async for trajectory in play_all(runner, assignments, concurrency=episodes):
        tokens += sum(len(sequence) for sequence in trajectory.sequences)
        taken += len(trajectory.turns)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    await runner.pool.close()
    return {
        "episodes": episodes,
        "turns": taken,
        "tokens_per_episode": tokens / episodes,
        "cpu_ms_per_turn": 1000 * cpu / taken,
        "turns_per_second": taken / wall,
    }


def run(
    *,
    engine: str | None = None,
    model: str | None = None,
    url: str | None = None,
    episodes: int | None = None,
    turns: int | None = None,
    concurrency: int = 64,
    rounds: int = 6,
    stand_in: bool = False,
    versus: str | None = None,
    at_once: Sequence[int] = (1, 64, 1000),
) -> dict[str, Any]:
    """Return the runtime's figures.

    Args:
        engine: ``vllm`` or ``sglang``; the scripted engine by default.
        model: Model folder or name, or a run; a model with random weights by default.
        url: Address of a server that serves `model`; by default, one is launched.
        episodes: Number of episodes; 1,000, or 64 per round on a server.
        turns: Maximum number of turns of an episode; 20, or 8 on a server.
        concurrency: Concurrent episodes on a server.
        rounds: Measurements on a server; medians are reported.
        stand_in: True for a mock vLLM server, which allows only CPU times to be measured.
        versus: Peers to compare with, separated by commas, or ``all``.
        at_once: Numbers of concurrent episodes of the comparison with peers.
    """
    if versus is not None:
        if model is not None or url is not None or stand_in or episodes is not None:
            raise UsageError("the comparison has a model of its own", expected="engine, rounds, turns and at_once only")
        return asyncio.run(compare_rollouts(versus, engine=engine, at_once=at_once, rounds=rounds, turns=turns or 8))
    if engine is not None:
        if stand_in and (engine != "vllm" or url is not None):
            raise UsageError("the stand-in answers as a vLLM server would", expected="--engine vllm, without --url")
        load = Load(episodes=episodes or 64, concurrency=concurrency, rounds=rounds, stand_in=stand_in)
        return run_on_server(engine, model, url, load, turns=turns or 8)
    if model is not None or url is not None or stand_in:
        raise UsageError("the scripted engine does not serve a model", expected="--engine vllm or sglang")
    sizes = {"episodes": episodes or 1000, "turns": turns or 20}
    figures: dict[str, Any] = {
        loop: asyncio.run(measure_scripted(loop, {}, **sizes))
        for loop in ("react_text", "step_independent", "tool_calling")
    }
    figures["max_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return figures


def run_on_server(engine: str, model: str | None, url: str | None, load: Load, *, turns: int) -> dict[str, Any]:
    """Return tokens per second of the whole runtime and of the bare client."""
    config = load_config(
        "quickstart",
        [
            f"engine={engine}",
            f"agent.max_turns={turns}",
            f"agent.max_answer_tokens={ANSWER_TOKENS}",
            "agent.max_rejected_actions=null",  # most actions of an untrained model are rejected
            SCRATCH if model is None else f"model.path={model}",
            *([] if url is None else [f"engine.servers=[{url}]"]),
            f"rollout.max_concurrent={load.concurrency}",
        ],
    )
    if not isinstance(config.engine, ServerEngineConfig):
        raise UsageError("this engine is not a server", got=f"--engine {engine}", expected="vllm or sglang")
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        return asyncio.run(measure(config, config.engine, load, Path(folder)))
