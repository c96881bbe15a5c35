import pytest
from support.tokenizers import build_tokenizer

from agentrl.config.derived import make_agent_loop
from agentrl.engine import SamplingParams
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.render.renderer import Renderer
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import EpisodeRunner
from agentrl.serving.scripted import ScriptedEngine
from agentrl.task import SeedTasks, Task


class Played:
    """An episode, and its sequences as text."""

    def __init__(self, trajectory, renderer):
        self.trajectory = trajectory
        self.texts = [renderer.encoder.decode(s.ids_list()) for s in trajectory.sequences]
        self.text = "" if not self.texts else self.texts[0]


@pytest.fixture(scope="session")
def renderer():
    return Renderer(build_tokenizer("qwen2.5"))


@pytest.fixture
def play(renderer):
    """Let a policy that says the given texts, one per turn, play a world through a loop; checks the ledger.

    Every turn trains, but for those whose indexes are in `untrained`.
    """

    async def run(
        factory,
        loop,
        *answers,
        options=None,
        tools=(),
        roles=(),
        instructions="",
        tool_instructions="",
        seed=0,
        untrained=(),
        **limits,
    ):
        sent = {}

        def script(request):
            turn = int(request.request_id.rpartition("-")[2])
            sent[turn] = list(request.prompt_ids)
            return [*renderer.encoder.encode(answers[min(turn, len(answers) - 1)]), renderer.boundary.end_id]

        spec = EnvironmentSpec(
            name="w",
            make=factory,
            tasks=SeedTasks,
            isolation=Isolation.INLINE,
            instructions=instructions,
            tool_instructions=tool_instructions,
        )
        pool = EnvPool(spec)
        engine = ScriptedEngine(script=script, vocab_size=400)
        runner = EpisodeRunner(
            pool=pool,
            loop=make_agent_loop(loop, options or {}),
            policy=EngineEpisodePolicy(engine, renderer, SamplingParams()),
            tools=tools,
            roles=roles,
            limits=EpisodeLimits(**limits),
        )
        trajectory = await runner.run(Task(id="t", environment="w", seed=seed), group_id="g", member=0, seed=0)
        await pool.close()
        for sequence in trajectory.sequences:
            if not len(sequence):
                continue  # a role without tokens
            for turn in sequence.turns:
                prompt = sent[turn.index]
                assert prompt == sequence.ids_list()[: len(prompt)]
                assert turn.start <= len(prompt) <= turn.end  # a prefill belongs to the answer, and is sent
                assert sequence.loss_mask[len(prompt) : turn.end].tolist() == [turn.index not in untrained] * (
                    turn.end - len(prompt)
                )
            trained = [turn for turn in sequence.turns if turn.index not in untrained]
            assert int(sequence.loss_mask.sum()) == sum(turn.end - len(sent[turn.index]) for turn in trained)
        return Played(trajectory, renderer)

    return run
