"""agentrl's side of the rollout comparison, over HTTP or on an engine in this process.

python rollout_agentrl.py URL FOLDER [in_process]
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gymnasium
from side import Play, serve
from transformers import AutoTokenizer
from work import FOUND, QUESTION, look

from agentrl.config.derived import make_agent_loop
from agentrl.config.engines import VLLMEngineConfig
from agentrl.engine import GenerateRequest, PolicyEngine, SamplingParams
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import Outcome
from agentrl.render.renderer import Renderer
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.heap import settled_heap
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import Assignment, EpisodeRunner, play_all
from agentrl.serving.scripted import ScriptedEngine
from agentrl.serving.vllm import VLLMServer
from agentrl.task import SeedTasks, Task
from agentrl.testing import ServerEngine
from agentrl.tool import tool

LOOK = tool(look, inline=True)
UNTIL_THE_END = ExitStack()


class Rooms(gymnasium.Env[str, str]):
    """Environment with one tool; the answer without a call ends the episode."""

    observation_space = action_space = gymnasium.spaces.Text(1000)

    def __init__(self) -> None:
        self.tools = [LOOK]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        return QUESTION.format(seed), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge the last answer."""
        return "", 1.0, True, False, {"success": action == FOUND}


class Answers:
    """The answers of the instant server, for an engine in this process."""

    def __init__(self, folder: Path) -> None:
        self._script = json.loads((folder / "script.json").read_bytes())
        self.next = 0

    def __call__(self, request: GenerateRequest) -> list[int]:
        """Return the answer to a prompt."""
        prompt, script = list(request.prompt_ids), self._script
        turn = (prompt.count(script["end_id"]) - script["first_messages"]) // 2
        if turn >= script["turns"] - 1:
            found: list[int] = script["found"]
            return found
        self.next += 1
        call: list[int] = script["calls"][self.next - 1]
        return call


async def make(url: str, folder: str) -> Play:
    """Prepare the runner."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size, answers = len(tokenizer), Answers(Path(folder))
    engine: PolicyEngine
    if "in_process" in sys.argv:
        engine = ScriptedEngine(script=answers, vocab_size=size, max_context=32_768)
    else:
        engine = ServerEngine(VLLMServer(url, VLLMEngineConfig(), vocab_size=size))
        await engine.start()
    spec = EnvironmentSpec(name="rooms", make=Rooms, tasks=SeedTasks, isolation=Isolation.INLINE)
    runner = EpisodeRunner(
        pool=EnvPool(spec, max_concurrent=10_000),
        loop=make_agent_loop("tool_calling", {}),
        policy=EngineEpisodePolicy(engine, Renderer(tokenizer), SamplingParams(max_tokens=128)),
        limits=EpisodeLimits(max_turns=100),
    )

    UNTIL_THE_END.enter_context(settled_heap(runner.pool.waits))  # a run does it once, too

    async def play(episodes: int, at_once: int) -> int:
        tasks = [Task(id=str(n), environment="rooms", seed=n) for n in range(episodes)]
        assignments = [Assignment(task=task, group_id=task.id, member=0, seed=0) for task in tasks]
        kept = []  # as a trainer keeps them
        async for trajectory in play_all(runner, assignments, concurrency=at_once):
            if trajectory.outcome is not Outcome.FINISHED:
                raise RuntimeError(f"an episode failed: {trajectory.outcome}, {trajectory.error}")
            kept.append(trajectory)
        return sum(bool(trajectory.success) for trajectory in kept)

    return play


if __name__ == "__main__":
    serve(make)
