"""Horizons: by step, by success, each environment for itself."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.environment import HorizonConfig
from agentrl.rollout.curriculum import GroupOutcome, Horizon


def outcome(successes, tries=8, *, turns=10, environment="a"):
    return GroupOutcome(
        position=0,
        environment=environment,
        task_id="t",
        task_type=None,
        horizon=turns,
        episodes=tries,
        tries=tries,
        successes=successes,
    )


def by_success(over_steps=2):
    return Horizon(HorizonConfig(turns=[10, 20, 30], success_above=0.5, over_steps=over_steps))


def test_by_steps():
    horizon = Horizon(HorizonConfig(turns=[10, 20, 30], at_steps=[0, 100, 200]))
    steps = (0, 99, 100, 199, 200, 10_000)
    assert [horizon.turns("a", step) for step in steps] == [10, 10, 20, 20, 30, 30]


def test_it_grows_once_the_mean_of_enough_steps_is_above():
    horizon, seen = by_success(), []
    for successes in (8, 0, 4, 5, 5, 8, 8):
        seen.append(horizon.turns("a", 0))
        horizon.learn([outcome(successes, turns=seen[-1])])
    # 8 and 0 of 16 are not above one half, nor are 0 and 4; 4 and 5 are; then it counts anew: 5 and 8 are.
    assert seen == [10, 10, 10, 10, 20, 20, 30]


def test_every_environment_grows_for_itself():
    horizon = by_success(over_steps=1)
    horizon.learn([outcome(8, environment="a"), outcome(0, environment="b")])
    assert (horizon.turns("a", 0), horizon.turns("b", 0), horizon.turns("c", 0)) == (20, 10, 10)


def test_groups_of_an_earlier_stage_do_not_count():
    horizon = by_success(over_steps=1)
    horizon.learn([outcome(8)])
    horizon.learn([outcome(8, turns=10), outcome(0, turns=20)])
    assert horizon.turns("a", 0) == 20


def test_a_step_without_the_environment_is_no_step():
    horizon = by_success()
    horizon.learn([outcome(8)])
    horizon.learn([])
    horizon.learn([outcome(8)])
    assert horizon.turns("a", 0) == 20


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 8), max_size=60))
def test_a_horizon_never_shrinks_or_leaves_its_stages_and_can_be_saved_at_any_step(successes):
    horizon, last = by_success(), 0
    for count in successes:
        turns = horizon.turns("a", 0)
        assert turns in (10, 20, 30)
        assert turns >= last
        last = turns
        horizon.learn([outcome(count, turns=turns)])
        restored = by_success()
        restored.load_state_dict(json.loads(json.dumps(horizon.state_dict())))
        assert restored.state_dict() == horizon.state_dict()
        horizon = restored
