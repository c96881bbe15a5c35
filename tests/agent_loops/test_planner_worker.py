"""A planner and a worker: visible messages, trained tokens, and a planner that does not answer."""

import gymnasium
import pytest

import agentrl
from agentrl.config.derived import make_agent_loop
from agentrl.errors import ConfigError, Outcome


class Corridor(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(100)
    action_hint = "forward or back, for example: forward"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return "You are at 0. Your task is to reach 3.", {}

    def step(self, action):
        self.place += action == "forward"
        done = self.place == 3
        return f"You are at {self.place}.", float(done), done, False, {"success": done}


def loop(**options):
    return {"format": "plain", **options}


async def test_the_worker_acts_by_the_plan_and_both_have_the_return(play):
    played = await play(Corridor, "planner_worker", "Walk on.", "forward", options=loop())
    assert [turn.role for turn in played.trajectory.turns] == ["planner", "worker", "worker", "worker"]
    assert played.trajectory.role_returns == {"planner": 1.0, "worker": 1.0}
    planner, worker = played.texts
    assert "Write the plan for the worker." in planner
    assert "You are at 1." not in planner
    assert "reach 3.\n\nFollow this plan: Walk on." in worker
    assert "Now you do not act" not in worker


async def test_the_planner_plans_again_after_some_steps(play):
    played = await play(
        Corridor, "planner_worker", "A", "forward", "forward", "B", "forward", options=loop(replan_every=2)
    )
    assert [turn.role for turn in played.trajectory.turns] == ["planner", "worker", "worker", "planner", "worker"]
    planner, worker = played.texts
    assert "You are at 2.\nYou are at 0. Your task is to reach 3.\n\nWrite the plan" in planner
    assert "You are at 2.\n\nFollow this plan: B" in worker


async def test_a_planner_that_says_nothing_is_counted_and_ends_an_episode_that_it_plays_alone(play):
    played = await play(Corridor, "planner_worker", "", "forward", options=loop())
    assert "Follow this plan" not in played.texts[1]
    assert [turn.valid for turn in played.trajectory.turns] == [False, True, True, True]
    alone = await play(Corridor, "planner_worker", "", options=loop(), max_parse_failures=1)
    assert (alone.trajectory.outcome, alone.trajectory.reward) == (Outcome.POLICY_ERROR, 0.0)


@pytest.mark.parametrize("options", [{"replan_every": -1}, {"replan_every": True}, {"format": "x"}])
def test_options_that_do_not_fit_are_refused(options):
    with pytest.raises(ConfigError):
        make_agent_loop("planner_worker", options)


def test_scripted_policies_play_the_worker(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["agent.loop=planner_worker"]
    result = agentrl.evaluate("guess_number/valid", policy="expert", tasks=4, samples=1, overrides=overrides)
    assert result.success.mean == 1.0
