"""agentrl's gateway in front of a server, using its token-id route.

python agentrl_proxy.py UPSTREAM SESSIONS
"""

from __future__ import annotations

import asyncio
import json
import sys

import gymnasium
from support.tokenizers import build_tokenizer

from agentrl.agent_loop import AgentLoop, Episode
from agentrl.config.engines import VLLMEngineConfig
from agentrl.engine import SamplingParams
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.gateway import Gateway
from agentrl.render.renderer import Renderer
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import Assignment, EpisodeRunner, play_all
from agentrl.serving.vllm import VLLMServer
from agentrl.task import SeedTasks, Task
from agentrl.testing import ServerEngine

VOCABULARY = 100_000


class Nothing(gymnasium.Env[str, str]):
    """Environment without a task."""

    observation_space = action_space = gymnasium.spaces.Text(10)

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[str, dict[str, object]]:
        """Start an episode."""
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """End the episode."""
        return "", 0.0, True, False, {}


class Open(AgentLoop):
    """Loop that keeps a session open for the clients."""

    def __init__(self, gateway: Gateway, sessions: int) -> None:
        self._gateway, self._sessions = gateway, sessions
        self._addresses: list[list[str]] = []

    async def run(self, episode: Episode) -> None:
        """Keep one session until this process ends."""
        await episode.reset()
        async with self._gateway.session(episode) as session:
            self._addresses.append([self._gateway.url_of(session), session.key])
            if len(self._addresses) == self._sessions:
                print("READY " + json.dumps(self._addresses), flush=True)
            await asyncio.Event().wait()


async def main() -> None:
    """Serve, and print the address and key of each session."""
    upstream, sessions = sys.argv[1], int(sys.argv[2])
    engine, gateway = ServerEngine(VLLMServer(upstream, VLLMEngineConfig(), vocab_size=VOCABULARY)), Gateway()
    await engine.start()
    await gateway.start()
    spec = EnvironmentSpec(name="nothing", make=Nothing, tasks=SeedTasks, isolation=Isolation.INLINE)
    policy = EngineEpisodePolicy(engine, Renderer(build_tokenizer("qwen3")), SamplingParams())
    limits = EpisodeLimits(max_turns=10_000, max_tokens=VOCABULARY)
    pool = EnvPool(spec, max_concurrent=sessions)
    runner = EpisodeRunner(pool=pool, loop=Open(gateway, sessions), policy=policy, limits=limits)
    tasks = [Task(id=str(number), environment="nothing", seed=number) for number in range(sessions)]
    assignments = [Assignment(task=task, group_id=task.id, member=0, seed=0) for task in tasks]
    async for trajectory in play_all(runner, assignments, concurrency=sessions):
        raise RuntimeError(trajectory.error)


if __name__ == "__main__":
    asyncio.run(main())
