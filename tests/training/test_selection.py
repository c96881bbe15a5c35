"""Selection of trained episodes, and the rewards of a step."""

import math
import random

import pytest

from agentrl.errors import Outcome, TrainingError
from agentrl.training.batch import select, skipped_metrics
from agentrl.training.rewards import RewardShaping


@pytest.fixture
def group(make_trajectory):
    def build(name, rewards, **options):
        rng = random.Random(name)
        return [make_trajectory(rng, name, i, reward=reward, **options) for i, reward in enumerate(rewards)]

    return build


def skipped(members, selected):
    """The numbers of skipped groups, of failures and of trajectories without a reward."""
    return tuple(skipped_metrics(members, selected).values())


@pytest.mark.parametrize("outcome", list(Outcome))
def test_infrastructure_failures_are_left_out_and_counted(group, outcome):
    members = [*group("a", [0.0, 1.0]), *group("a", [1.0], outcome=outcome)]
    found = select(members, compare_groups=True)
    assert skipped(members, found) == (0, int(outcome.is_infrastructure), 0)
    assert len(found) == 3 - int(outcome.is_infrastructure)


def test_an_episode_that_has_not_ended_is_left_out(group):
    members = [*group("a", [0.0, 1.0]), *group("b", [1.0], outcome=None)]
    found = select(members, compare_groups=False)
    assert (found, skipped(members, found)) == (members[:2], (0, 1, 0))


def test_no_reward_is_not_zero(group):
    members = group("a", [0.0, 1.0, 1.0])
    members[2].reward = None
    found = select(members, compare_groups=True)
    assert (found, skipped(members, found)) == (members[:2], (0, 0, 1))


def test_a_group_of_one_is_skipped_and_counted(group):
    everything = [*group("a", [0.0, 1.0]), *group("b", [1.0])]
    found = select(everything, compare_groups=True)
    assert (found, skipped(everything, found)) == (everything[:2], (1, 0, 0))
    assert select(everything, compare_groups=False) == everything


def test_a_group_is_counted_after_failures_are_out(group):
    members = group("b", [1.0, 0.0])
    members[0].outcome = Outcome.ENGINE_ERROR
    everything = [*group("a", [0.0, 1.0]), *members]
    found = select(everything, compare_groups=True)
    assert (found, skipped(everything, found)) == (everything[:2], (1, 1, 0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite(group, value):
    members = group("a", [0.0, 1.0])
    members[1].reward = value
    message = rf"reward of task task-a is not finite \(environment maze, trajectory a-1\): got {value}"
    with pytest.raises(TrainingError, match=message):
        select(members, compare_groups=True)


@pytest.mark.parametrize("value", [1e300, -1e300, 1.001e12])
def test_rewards_that_are_too_large(group, value):
    members = group("a", [0.0, 1e12])
    members[0].reward = value
    with pytest.raises(TrainingError, match=r"reward of task task-a is too large .*between -1e12 and 1e12"):
        select(members, compare_groups=True)


def test_turn_rewards_that_are_not_finite(group):
    members = group("a", [0.0, 1.0])
    members[0].turns[0].reward = math.nan
    with pytest.raises(TrainingError, match=r"reward of turn 0 of task task-a.*agentrl env check maze"):
        select(members, compare_groups=True)


def test_nothing_left(group):
    with pytest.raises(TrainingError, match=r"no trajectory of this step can be trained on.*2 groups of one"):
        select([*group("a", [0.0]), *group("b", [1.0])], compare_groups=True)


def test_turns_add_up_to_the_scorers_verdict(group):
    members = group("a", [0.5, 1.0], turns=3)
    members[0].turns[0].reward = 0.25
    members[0].reward = 2.0
    found = RewardShaping({}, max_tokens=100)(members)
    assert found.returns.tolist() == [2.0, 1.0]
    assert found.turn_reward.tolist() == [0.25, 0.0, 1.75, 0.0, 0.0, 1.0]
    assert found.turn_episode.tolist() == [0, 0, 0, 1, 1, 1]


def test_large_rewards_of_turns_leave_no_rounding_error_in_the_scorers_rewards(group):
    members = group("a", [0.3, 0.3], turns=3)
    for turn, score in zip(members[0].turns, (3e11, 7e10, 0.1), strict=True):
        turn.reward = score
    assert RewardShaping({}, max_tokens=100)(members).returns.tolist() == [0.3, 0.3]
    assert RewardShaping({"format": {"bonus": 0.0}}, max_tokens=100)(members).returns.tolist() == [0.3, 0.3]


def test_invalid_turns_are_penalized(group):
    members = group("a", [0.0, 1.0], turns=2)
    members[1].turns[0].valid = False
    found = RewardShaping({"invalid": {"penalty": -0.1}}, max_tokens=100)(members)
    assert found.turn_reward.tolist() == [0.0, 0.0, -0.1, 1.0]
    assert found.returns.tolist() == [0.0, 0.9]


def test_turns_with_repaired_calls_are_penalized(group):
    members = group("a", [0.0, 1.0], turns=2)
    members[0].turns[1].repaired_calls = 2
    found = RewardShaping({"repaired": {"penalty": -0.1}}, max_tokens=100)(members)
    assert found.turn_reward.tolist() == [0.0, -0.1, 0.0, 1.0]


def test_long_trajectories_are_penalized(group):
    members = group("a", [0.0, 1.0], turns=2)
    longest = max(len(s) for t in members for s in t.sequences)
    found = RewardShaping({"overlong": {"buffer": 10, "factor": 0.5}}, max_tokens=longest)(members)
    expected = [t.reward - 0.5 * max(max(len(s) for s in t.sequences) - (longest - 10), 0) / 10 for t in members]
    assert found.returns.tolist() == pytest.approx(expected)
    assert min(e - t.reward for e, t in zip(expected, members, strict=True)) == pytest.approx(-0.5)
