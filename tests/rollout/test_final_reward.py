"""The reward of an environment for an episode that something else has ended: `final_reward`."""

import functools
import json

import pytest
from rollout_worlds import Judged

import agentrl
from agentrl.agent_loop import AgentLoop
from agentrl.env import Isolation
from agentrl.errors import Outcome
from agentrl.message import user
from agentrl.rollout.budget import EpisodeLimits

TWO_TURNS = EpisodeLimits(max_turns=2)


def call(name):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {}})}\n</tool_call>"


@pytest.mark.parametrize("isolation", [Isolation.INLINE, Isolation.THREAD, Isolation.PROCESS])
async def test_a_limit_ends_the_episode_and_the_environment_judges_its_state(make_runner, play, isolation):
    trajectory = await play(make_runner(Judged, "forward", limits=TWO_TURNS, isolation=isolation))
    assert trajectory.outcome is Outcome.TRUNCATED_TURNS
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.2]
    assert (trajectory.reward, trajectory.success) == (0.2, True)
    assert trajectory.reward_components == {"walked": 2.0, "place": 2.0}
    assert trajectory.reward_sources == {"environment/final_reward": 0.2}


async def test_every_limit_counts(make_runner, play):
    limits = EpisodeLimits(max_tokens=300)
    trajectory = await play(
        make_runner(Judged, "forward", limits=limits, options={"format": "plain"}), options={"length": 99}
    )
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS
    walked = trajectory.reward_components["walked"]
    assert walked >= 1
    assert trajectory.reward == pytest.approx(walked / 10)


async def test_an_episode_that_the_environment_ended_is_not_judged_again(make_runner, play):
    trajectory = await play(make_runner(Judged, "forward"))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)
    assert "place" not in trajectory.reward_components
    assert trajectory.reward_sources == {"environment/step": 1.0}


async def test_a_tool_of_the_environment_that_ends_the_episode_has_judged_it(make_runner, play):
    trajectory = await play(make_runner(Judged, call("leave"), loop="tool_calling"))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.STOPPED_BY_TOOL, 0.25)
    assert trajectory.reward_sources == {"tool/leave": 0.25}


async def test_a_tool_of_the_run_that_ends_the_episode_has_not(make_runner, play):
    def submit() -> str:
        """Submit."""
        return "Submitted."

    tools = [agentrl.tool(submit, stop=True)]
    factory = functools.partial(Judged, judgement=0.75)
    trajectory = await play(make_runner(factory, call("submit"), loop="tool_calling", tools=tools))
    assert (trajectory.outcome, trajectory.reward, trajectory.success) == (Outcome.STOPPED_BY_TOOL, 0.75, None)


class Talking(AgentLoop):
    """Answers without using the environment."""

    async def run(self, episode):
        await episode.open([user("Hello.")]).generate()


async def test_an_environment_that_was_not_reset_judges_nothing(make_runner, play):
    """It may still be in the state of another episode, which it would judge again."""
    runner = make_runner(Judged, "forward", limits=TWO_TURNS)
    assert (await play(runner)).reward == 0.2
    runner.loop = Talking()
    trajectory = await play(runner)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 0.0)


async def test_none_is_no_judgement(make_runner, play, worlds):
    class Undecided(worlds.Judged):
        def final_reward(self):
            return None

    trajectory = await play(make_runner(Undecided, "forward", limits=TWO_TURNS))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TRUNCATED_TURNS, 0.0)


@pytest.mark.parametrize(
    ("judgement", "message"),
    [
        ("good", "final_reward is invalid: got str 'good', expected a finite number"),
        (float("nan"), "final_reward is invalid"),
        ((1.0, "solved"), "info of final_reward is invalid: got str 'solved', expected a dictionary"),
        ((1.0, {"success": "yes"}), "success of info is invalid"),
    ],
)
async def test_an_invalid_judgement_is_an_error_of_the_environment(make_runner, play, judgement, message):
    factory = functools.partial(Judged, judgement=judgement)
    trajectory = await play(make_runner(factory, "forward", limits=TWO_TURNS, retries=0))
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert message in trajectory.error
    assert trajectory.reward is None
