"""Random sessions of clients of OpenAI and Anthropic, answered by real servers, are recorded token by token.

AGENTRL_GATEWAY_SESSIONS sets how many there are of each dialect and server.
"""

import asyncio
import os
from collections import Counter

import aiohttp
import gymnasium
import numpy as np
import pytest
from support.gateway_client import DIALECTS, RandomClient
from support.tokenizers import build_tokenizer

from agentrl.agent_loop import AgentLoop
from agentrl.engine import SamplingParams
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import Outcome
from agentrl.gateway import Gateway
from agentrl.render.renderer import Renderer
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.turns import EpisodeLimits
from agentrl.task import SeedTasks, Task
from agentrl.testing import ServerEngine

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]
SESSIONS = int(os.environ.get("AGENTRL_GATEWAY_SESSIONS", "40"))
TURNS, TOGETHER = 5, 32
LIMITS = EpisodeLimits(max_turns=1000, max_answer_tokens=16)


class Recording(ServerEngine):
    """Keeps what the server was sent and what it sampled."""

    def __init__(self, server):
        super().__init__(server)
        self.seen = Counter()

    async def generate(self, request):
        sampled = await super().generate(request)
        self.seen[tuple(request.prompt_ids), tuple(sampled.token_ids), tuple(sampled.logprobs)] += 1
        return sampled


class Nothing(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(10)

    def reset(self, *, seed=None, options=None):
        return "", {}

    def step(self, action):
        return "", 0.0, True, False, {}


class Random(AgentLoop):
    """Lets a random client play each episode."""

    def __init__(self, dialect):
        self._dialect = dialect
        self._gateway = Gateway()
        self.failures = []

    async def run(self, episode):
        await episode.reset()
        await self._gateway.start()
        async with aiohttp.ClientSession() as http, self._gateway.session(episode) as session:
            url = self._gateway.url_of(session)
            client = RandomClient(http, url, session.key, self._dialect, episode.task.seed)
            try:
                await client.play(TURNS)
            except Exception as error:
                self.failures.append(error)
                raise

    async def close(self):
        await self._gateway.close()


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request):
    return request.param


def recorded_in(trajectory):
    """The prompt, tokens and log-probabilities of each turn."""
    for sequence in trajectory.sequences:
        ids = sequence.ids_list()
        for turn in sequence.turns:
            logprobs = tuple(float(value) for value in sequence.logprobs[turn.start : turn.end])
            yield tuple(ids[: turn.start]), tuple(ids[turn.start : turn.end]), logprobs


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_a_server_was_sent_and_sampled_is_what_is_recorded(client_of, dialect):
    recording, loop = Recording(client_of()), Random(dialect)
    await recording.start()
    policy = EngineEpisodePolicy(recording, Renderer(build_tokenizer("qwen3")), SamplingParams())
    spec = EnvironmentSpec(name="nothing", make=Nothing, tasks=SeedTasks, isolation=Isolation.INLINE)
    runner = EpisodeRunner(pool=EnvPool(spec), loop=loop, policy=policy, limits=LIMITS)
    free = asyncio.Semaphore(TOGETHER)

    async def play(number):
        async with free:
            task = Task(id=f"t{number}", environment="nothing", seed=number)
            return await runner.run(task, group_id=f"g{number}", member=0, seed=number)

    try:
        trajectories = await asyncio.gather(*(play(number) for number in range(SESSIONS)))
    finally:
        await runner.close()
        await recording.close()
    assert not loop.failures
    assert {trajectory.outcome for trajectory in trajectories} == {Outcome.FINISHED}
    recorded = Counter(turn for trajectory in trajectories for turn in recorded_in(trajectory))
    rounded = Counter(
        {
            (prompt, ids, tuple(np.float32(logprobs).tolist())): n
            for (prompt, ids, logprobs), n in recording.seen.items()
        }
    )
    assert recorded == rounded
    for trajectory in trajectories:
        assert trajectory.sampled_tokens == sum(turn.end - turn.start for turn in trajectory.turns), "trained once"
    forks = sum(len(trajectory.sequences) - 1 for trajectory in trajectories)
    assert forks > SESSIONS / 2, "sessions fork"
