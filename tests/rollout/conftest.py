import sys
from pathlib import Path

import pytest
from support.tokenizers import build_tokenizer

from agentrl.config.derived import make_agent_loop
from agentrl.engine import SamplingParams
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.registry import Kind, register, unregister
from agentrl.render.renderer import Renderer
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import EpisodeRunner
from agentrl.serving.scripted import ScriptedEngine
from agentrl.task import SeedTasks, Task

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def renderer():
    return Renderer(build_tokenizer("qwen2.5"))


@pytest.fixture
def worlds():
    import rollout_worlds

    return rollout_worlds


@pytest.fixture
def make_spec():
    def make(factory, *, isolation=Isolation.INLINE, **fields):
        return EnvironmentSpec(name="world", make=factory, tasks=SeedTasks, isolation=isolation, **fields)

    return make


@pytest.fixture
async def make_pool(make_spec):
    pools = []

    def make(factory, isolation=Isolation.INLINE, **options):
        pool = EnvPool(make_spec(factory, isolation=isolation), **options)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        await pool.close()


@pytest.fixture
def make_engine(renderer):
    """A scripted engine that says the given texts, one per turn, over and over."""

    def make(*answers, **options):
        def script(request):
            turn = int(request.request_id.rpartition("-")[2])
            answer = answers[turn % len(answers)]
            return renderer.encoder.encode(answer) if isinstance(answer, str) else answer

        return ScriptedEngine(script=script, vocab_size=400, **options)

    return make


def taken(fields, *names):
    return {name: fields.pop(name) for name in names if name in fields}


@pytest.fixture
async def make_runner(renderer, make_spec, make_engine, worlds):
    """A runner over a world; `answers` are what the engine says."""
    pools = []

    def make(factory=None, *answers, engine=None, policy=None, loop="react_text", options=None, pool=None, **fields):
        spec_fields = taken(fields, "isolation", "max_turns", "success_threshold")
        pool_fields = taken(fields, "workers", "max_concurrent", "reset_timeout_s", "step_timeout_s", "waits")
        pool = pool or EnvPool(make_spec(factory or worlds.Corridor, **spec_fields), **pool_fields)
        pools.append(pool)
        policy = policy or EngineEpisodePolicy(engine or make_engine(*answers), renderer, SamplingParams())
        loop_options = {"format": "plain"} if options is None and loop == "react_text" else options or {}
        return EpisodeRunner(pool=pool, loop=make_agent_loop(loop, loop_options), policy=policy, **fields)

    yield make
    for pool in pools:
        await pool.close()


@pytest.fixture
def play():
    """Play one task with a runner."""

    async def run(runner, *, options=None, seed=1, task_id="t", prompt=None, group_id="g", member=0):
        task = Task(id=task_id, environment="world", seed=5, options=options or {}, prompt=prompt)
        return await runner.run(task, group_id=group_id, member=member, seed=seed)

    return run


@pytest.fixture
def texts(renderer):
    """What tools said in an episode."""

    def read(trajectory):
        text = renderer.encoder.decode(trajectory.sequences[0].ids_list())
        return [part.partition("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]

    return read


@pytest.fixture
def named():
    """Register functions under names, for one test."""
    given = []

    def give(**functions):
        for name, function in functions.items():
            register(Kind.REWARD, name, function)
            given.append(name)

    yield give
    for name in given:
        unregister(Kind.REWARD, name)
