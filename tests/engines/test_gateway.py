"""Random sessions of OpenAI and Anthropic clients on real servers are recorded token by token.

AGENTRL_GATEWAY_SESSIONS sets how many there are of each dialect and server.
"""

import asyncio
import json
import os
from collections import Counter

import aiohttp
import gymnasium
import numpy as np
import openai
import pytest
from support.gateway_client import DIALECTS, RandomClient
from support.tokenizers import build_tokenizer

from agentrl.agent_loop import AgentLoop
from agentrl.engine import SamplingParams
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import Outcome
from agentrl.gateway import Gateway
from agentrl.render.renderer import Renderer
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import EpisodeRunner
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


SHORT = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SHORT}} for name in ("add", "sub")]


class Nothing(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(10)

    def reset(self, *, seed=None, options=None):
        return "", {}

    def step(self, action):
        return "", 0.0, True, False, {}


class Held(AgentLoop):
    """Asks for JSON and for calls, of a model that knows neither."""

    def __init__(self):
        self._gateway = Gateway()
        self.failure = None

    async def run(self, episode):
        await episode.reset()
        await self._gateway.start()
        async with self._gateway.session(episode) as session:
            client = openai.AsyncOpenAI(base_url=f"{self._gateway.url}/v1", api_key=session.key, max_retries=0)
            try:
                async with client:
                    await self._ask(client.chat.completions.create)
            except Exception as error:
                self.failure = error
                raise

    async def _ask(self, create):
        asked = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
        held = {"type": "json_schema", "json_schema": {"name": "n", "schema": SHORT}}
        whole = await create(**asked, response_format=held, logprobs=True)
        assert set(json.loads(whole.choices[0].message.content)) == {"n"}
        rows = whole.choices[0].logprobs.content
        assert "".join(row.token for row in rows) == whole.choices[0].message.content
        assert max(row.logprob for row in rows) > -1e-3, "a token without an alternative: others were left out"
        streamed = [chunk async for chunk in await create(**asked, response_format=held, stream=True)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        assert set(json.loads(text)) == {"n"}
        forced = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}
        (call,) = (await create(**asked, **forced)).choices[0].message.tool_calls
        assert (call.function.name, set(json.loads(call.function.arguments))) == ("sub", {"n"})
        (call,) = (await create(**asked, tools=TOOLS, tool_choice="required")).choices[0].message.tool_calls
        assert call.function.name in ("add", "sub")
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nonsense"}}}
        with pytest.raises(openai.BadRequestError) as refused:
            await create(**asked, response_format=schema)
        assert refused.value.param == "response_format"

    async def close(self):
        await self._gateway.close()


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


@pytest.mark.capability("{engine}", "schemas")
async def test_a_server_holds_answers_to_schemas_and_calls(client_of):
    engine, loop = ServerEngine(client_of()), Held()
    await engine.start()
    renderer = Renderer(build_tokenizer("qwen3"))
    policy = EngineEpisodePolicy(engine, renderer, SamplingParams(), trains=False)
    spec = EnvironmentSpec(name="nothing", make=Nothing, tasks=SeedTasks, isolation=Isolation.INLINE)
    # between two marks of JSON the forms allow blanks without end, and a random model writes many
    limits = EpisodeLimits(max_turns=1000, max_answer_tokens=500)
    runner = EpisodeRunner(pool=EnvPool(spec), loop=loop, policy=policy, limits=limits)
    try:
        task = Task(id="t", environment="nothing", seed=1)
        trajectory = await runner.run(task, group_id="g", member=0, seed=1)
    finally:
        await runner.close()
        await engine.close()
    assert not loop.failure, loop.failure
    assert trajectory.outcome is Outcome.FINISHED
