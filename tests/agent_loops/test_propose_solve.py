"""A proposer and attempts of a solver: who is paid what, and what is trained."""

import sys

import pytest
from agentrl.agent_loops.propose_solve import learnability
from support.fixtures import WORLDS

from agentrl.agent_loop import AgentRole
from agentrl.config.derived import make_agent_loop
from agentrl.engine import SamplingParams
from agentrl.errors import ConfigError, Outcome, UsageError
from agentrl.observe.metrics import trajectory_metrics
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.roles.run_roles import RoleSetup
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.waits import WaitTracker
from agentrl.serving.scripted import ScriptedEngine
from agentrl.task import Task
from agentrl.training.roles import role_members

PENALTIES = {"attempts": 2, "wrong": -0.5, "malformed": -1.0}


@pytest.fixture
def play(renderer, monkeypatch):
    """Plays an episode of `proposed_letters` in which the turns say the given texts."""
    monkeypatch.syspath_prepend(WORLDS)
    import proposed_letters

    async def run(*answers, letter=None, options=PENALTIES, roles=(), **limits):
        def script(request):
            turn = int(request.request_id.rpartition("-")[2])
            return [*renderer.encoder.encode(answers[turn]), renderer.boundary.end_id]

        pool = EnvPool(proposed_letters.SPEC, waits=WaitTracker())
        runner = EpisodeRunner(
            pool=pool,
            loop=make_agent_loop("propose_solve", options),
            policy=EngineEpisodePolicy(ScriptedEngine(script=script, vocab_size=400), renderer, SamplingParams()),
            limits=EpisodeLimits(**limits),
            roles=roles,
        )
        given = {"kind": "vowel", **({} if letter is None else {"letter": letter})}
        task = Task(id="t", environment="proposed", options=given)
        try:
            return await runner.run(task, group_id="g", member=0, seed=0)
        finally:
            await pool.close()
            sys.modules.pop("proposed_letters", None)

    return run


CASES = [
    (("a", "a", "x"), {"proposer": 0.5, "solver#1": 1.0, "solver#2": -0.5}, True),
    (("a", "a", "a"), {"proposer": -0.5, "solver#1": 1.0, "solver#2": 1.0}, False),
    (("a", "x", "x"), {"proposer": -0.5, "solver#1": -0.5, "solver#2": -0.5}, False),
    (("a", "x", " "), {"proposer": -0.5, "solver#1": -0.5, "solver#2": -1.0}, False),
    (("x",), {"proposer": -1.0}, False),
]


@pytest.mark.parametrize(("answers", "returns", "success"), CASES)
async def test_each_turn_gets_the_reward_of_its_role(play, answers, returns, success):
    trajectory = await play(*answers)
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.role_returns == returns
    assert trajectory.success is success
    assert trajectory.proposals == ([{"kind": "vowel", "letter": "a"}] if answers[0] == "a" else [])
    assert trajectory.task_type == "vowel"


@pytest.mark.parametrize(("answer", "reward"), [("xe", 1.0), ("x", -0.5), ("", -1.0)])
async def test_a_posed_task_is_solved_once(play, answer, reward):
    trajectory = await play(answer, letter="e")
    assert trajectory.role_returns == {"solver": reward}
    assert trajectory.success is (reward == 1.0)


async def test_an_attempt_reads_only_the_task(play, renderer):
    trajectory = await play("ea", "yes e", "no")
    texts = [renderer.encoder.decode(sequence.ids_list()) for sequence in trajectory.sequences]
    assert len(texts) == 3
    assert all("Write e." in text for text in texts[1:])
    assert "yes" not in texts[2]


async def test_attempts_can_be_left_out_of_training(play):
    trajectory = await play("a", "a", "x", options={**PENALTIES, "train_attempts": False})
    assert trajectory.trained_roles == ("proposer",)
    assert trajectory.role_returns == {"proposer": 0.5}
    (member,) = role_members([trajectory])
    assert member.reward == 0.5


async def test_the_attempts_of_a_role_that_is_not_trained_still_decide_the_reward(play):
    frozen = [RoleSetup(role=AgentRole(name=name, trained=False)) for name in ("solver#1", "solver#2")]
    assert (await play("a", "a", "x", roles=frozen)).role_returns == {"proposer": 0.5}


async def test_a_prompt_without_room_is_malformed(play):
    trajectory = await play("a", "a", "a", max_tokens=8)
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS


async def test_other_numbers_of_attempts_are_refused(play):
    with pytest.raises(UsageError, match=r"agent\.options\.attempts and environment\.options\.attempts"):
        await play("a", options={"attempts": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attempts": 1}, "attempts of propose_solve is too small"),
        ({"attempts": True}, "attempts of propose_solve is too small"),
        ({"wrong": 0.5}, "wrong of propose_solve is not a penalty"),
        ({"malformed": float("nan")}, "malformed of propose_solve is not a penalty"),
        ({"train_attempts": "no"}, "train_attempts is not a boolean"),
    ],
)
def test_options_that_are_not_valid_are_rejected(options, message):
    with pytest.raises(ConfigError, match=message):
        make_agent_loop("propose_solve", options)


@pytest.mark.parametrize(
    ("solved", "worth"),
    [
        ([], 0.0),
        ([0] * 8, 0.0),
        ([1] * 8, 0.0),
        ([1] + [0] * 7, 0.875),
        ([1, 0], 0.5),
        ([0.25, 0.25], 0.75),
        ([1], 0.0),
    ],
)
def test_learnability(solved, worth):
    assert learnability(solved) == worth


async def test_metrics_join_the_attempts(play):
    trajectory = await play("a", "a", "x")
    found = trajectory_metrics([trajectory], version=0)
    assert (found["role/solver/return/mean"], found["role/solver/turns/mean"]) == (0.25, 2.0)
    assert found["role/proposer/return/mean"] == 0.5
    assert trajectory.metrics["reward_of/solver"] == 0.5
    assert not any("#" in name for name in found)
