"""Episodes behind a gateway, with the scripted engine, which keeps what it was sent."""

import sys
import textwrap
import time
from types import SimpleNamespace

import gymnasium
import pytest
from support.tokenizers import build_tokenizer

from agentrl.agent_loop import AgentLoop
from agentrl.engine import SamplingParams
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.gateway import Gateway
from agentrl.render.renderer import Renderer
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import EpisodeRunner
from agentrl.serving.scripted import ScriptedEngine
from agentrl.task import SeedTasks, Task

AGENT = """
import json, os, sys, urllib.request

def ask(text):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": [{"role": "user", "content": text}]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def post(route, key, body):
    request = urllib.request.Request(
        os.environ["AGENTRL_URL"] + route, json.dumps(body).encode(), {"Authorization": "Bearer " + key}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)
"""


class Question(gymnasium.Env):
    """Pays 1 for the answer 42."""

    observation_space = action_space = gymnasium.spaces.Text(1000)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "What is 6 times 7?", {}

    def step(self, action):
        right = "42" in action
        return "Right." if right else "Wrong.", float(right), True, False, {"success": right}


class Played(AgentLoop):
    """Lets a coroutine function play: it gets the gateway and its session."""

    def __init__(self, play, **options):
        self._play = play
        self.failure = None
        self._options = options

    async def run(self, episode):
        await episode.reset()
        gateway = Gateway()
        await gateway.start()
        try:
            async with gateway.session(episode, **self._options) as session:
                await self._play(gateway, session)
        except Exception as error:  # an assertion would be an error of the environment
            self.failure = error
            raise
        finally:
            await gateway.close()


@pytest.fixture(scope="session")
def renderer():
    return Renderer(build_tokenizer("qwen2.5"))


class Recording:
    """An engine's script, and the requests that it has answered."""

    newest = None

    def __init__(self, renderer, answers):
        Recording.newest = self
        self.requests, self.asked_at = [], None
        self._renderer, self._answers = renderer, answers

    def __call__(self, request):
        self.requests.append(request)
        self.asked_at = self.asked_at or time.monotonic()
        answer = self._answers[(len(self.requests) - 1) % len(self._answers)]
        if not isinstance(answer, str):
            return answer
        return [*self._renderer.encoder.encode(answer), self._renderer.boundary.end_id]

    def check(self, trajectory):
        """What was recorded before each turn is what the engine was sent, and each answer is trained once."""
        sent = {request.request_id: list(request.prompt_ids) for request in self.requests}
        for sequence in trajectory.sequences:
            for turn in sequence.turns:
                assert sequence.ids_list()[: turn.start] == sent[f"{trajectory.id}/turn-{turn.index}"]
        assert len(trajectory.turns) == len(sent)


@pytest.fixture
def run_loop(renderer):
    """Play one episode of a loop; the trajectory and what the engine was sent."""

    async def run(
        loop, *answers, make=Question, engine=None, max_context=32768, structures=False, trains=True, **fields
    ):
        spec = EnvironmentSpec(name="question", make=make, tasks=SeedTasks, isolation=Isolation.INLINE)
        script = Recording(renderer, answers)
        scripted = ScriptedEngine(engine, script=script, vocab_size=400, max_context=max_context, structures=structures)
        policy = EngineEpisodePolicy(scripted, renderer, SamplingParams(), trains=trains)
        runner = EpisodeRunner(pool=EnvPool(spec), loop=loop, policy=policy, **fields)
        task = Task(id="t", environment="question", seed=5)
        try:
            return await runner.run(task, group_id="g", member=0, seed=1), script
        finally:
            await runner.close()

    return run


@pytest.fixture
def time_from_the_first_request(monkeypatch):
    """Count the time of external programs from their first request: starting one takes long on a busy machine."""

    def seconds():
        asked_at = Recording.newest.asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    monkeypatch.setattr("agentrl.agent_loops.external.time", SimpleNamespace(monotonic=seconds))


@pytest.fixture
def played(run_loop):
    """Play one episode with a coroutine function of the gateway and its session."""

    async def run(play, *answers, options=None, **fields):
        loop = Played(play, **(options or {}))
        found = await run_loop(loop, *answers, **fields)
        if loop.failure is not None:
            raise loop.failure
        return found

    return run


@pytest.fixture
def program(tmp_path):
    """A program of these lines after `AGENT`, as the words of its command."""

    def write(lines):
        path = tmp_path / "agent.py"
        path.write_text(AGENT + textwrap.dedent(lines))
        return [sys.executable, str(path)]

    return write
