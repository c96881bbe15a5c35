"""Rewards near the limits of float64: variances neither overflow nor vanish, and no reward is lost silently."""

import dataclasses
import math

import pytest
import torch

from agentrl.algorithms.rewards import pf_ppo
from agentrl.algorithms.segments import segment_std, standardize, whiten
from agentrl.algorithms.types import EpisodeBatch
from agentrl.config.config import AlgorithmConfig
from agentrl.errors import Outcome, TrainingError
from agentrl.observe.metrics import trajectory_metrics
from agentrl.registry import Kind, lookup
from agentrl.training.gradients import Objective
from agentrl.trajectory import Trajectory

RETURNS = [1.0, 2.0, 4.0, 1.0]
GROUP = torch.tensor([0, 0, 0, 1, 1, 1, 1])
SCALES = [1e-3, 1.0, 1e100, 1e160, 1e300]


def episodes(scale):
    returns = torch.tensor(RETURNS, dtype=torch.float64) * scale
    return EpisodeBatch(
        returns=returns,
        group=torch.tensor([0, 0, 0, 0]),
        turn_reward=returns,
        turn_episode=torch.arange(4),
        turn_state=torch.zeros(4, dtype=torch.int64),
        token_turn=torch.tensor([0, 0, 1, 2, 3]),
        components={"whole": returns},
    )


@pytest.mark.parametrize("scale", SCALES)
def test_the_deviation_is_exact_at_any_scale(scale):
    values = torch.tensor([1.0, 2.0, 4.0, 1e-3, 7.0, -3.0, 0.5], dtype=torch.float64)
    expected = segment_std(values, GROUP, 2) * scale
    torch.testing.assert_close(segment_std(values * scale, GROUP, 2), expected, rtol=1e-12, atol=0)


def test_scaling_changes_no_bit_of_ordinary_values():
    values = torch.tensor([0.3, 0.1, 0.7, 5.0, 1.0, 0.25], dtype=torch.float64)
    expected = [math.sqrt(sum((v - m) ** 2 for v in own) / 2) for own, m in (([0.3, 0.1, 0.7], 1.1 / 3),)]
    assert segment_std(values, torch.tensor([0, 0, 0, 1, 1, 1]), 2)[0].item() == pytest.approx(expected[0], rel=1e-15)


@pytest.mark.parametrize("name", ["grpo", "gigpo", "hgpo", "turn_discounted", "gdpo", "grpo_passk"])
@pytest.mark.parametrize("scale", SCALES[2:])
def test_normalised_advantages_do_not_depend_on_the_scale_of_rewards(name, scale):
    estimator = lookup(Kind.ADVANTAGE, name)
    torch.testing.assert_close(estimator(episodes(scale)), estimator(episodes(1e6)), rtol=1e-9, atol=1e-9)
    assert estimator(episodes(scale)).abs().max() > 0.5


NAMES = [
    "turn_rloo",
    "graphgpo",
    "grpo_batch_std",
    "prpo",
    "grpo",
    "gigpo",
    "hgpo",
    "turn_discounted",
    "gdpo",
    "grpo_passk",
    "dr_grpo",
    "rloo",
    "opo",
    "gpg",
    "maxrl",
]


@pytest.mark.parametrize("name", [*NAMES, "reinforce", "reinforce++", "reinforce++_baseline"])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6, 1e9, 1e12])
def test_dynamic_sampling_is_independent_of_the_reward_scale(name, scale):
    objective, batch = Objective(AlgorithmConfig(advantage=name)), episodes(scale)
    equal = torch.full((4,), 0.7 * scale, dtype=torch.float64)
    same = dataclasses.replace(batch, returns=equal, turn_reward=equal, components={"whole": equal})
    assert objective.differing_groups(batch).tolist() == [True]
    assert objective.differing_groups(same).tolist() == [False]


def test_a_component_alone_makes_large_rewards_differ():
    objective, batch = Objective(AlgorithmConfig(advantage="gdpo")), episodes(1.0)
    total = torch.full((4,), 5e10, dtype=torch.float64)
    part = torch.tensor([1e10, 3e10, 1e10, 2e10], dtype=torch.float64)
    batch = dataclasses.replace(batch, returns=total, turn_reward=total, components={"a": part, "b": 0.3 * part})
    assert objective.differing_groups(batch).tolist() == [True]
    opposite = dataclasses.replace(batch, components={"a": part, "b": total - part})
    assert objective.differing_groups(opposite).tolist() == [False]


def test_whitening_of_large_values():
    values = torch.tensor([1e300, -1e300, 3e299], dtype=torch.float64)
    torch.testing.assert_close(whiten(values), whiten(values / 1e294), rtol=1e-12, atol=1e-12)
    assert standardize(values, torch.zeros(3, dtype=torch.int64), 1).std().item() == pytest.approx(1)


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "opo", "gpg", "reinforce"])
def test_advantages_too_large_for_float32_are_an_error(name):
    with pytest.raises(
        TrainingError, match=rf"{name} returned numbers that are too large: got an advantage of .*e\+300"
    ):
        Objective(AlgorithmConfig(advantage=name)).estimate(episodes(1e300))


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e300])
def test_episodes_are_drawn_by_return_at_any_scale(scale):
    returns = torch.tensor([0.0, 1.0, 0.0, 3.0], dtype=torch.float64)
    assert pf_ppo(returns * scale, 7).tolist() == pf_ppo(returns, 7).tolist()


def test_the_deviation_in_metrics_does_not_overflow():
    def episode(reward):
        return Trajectory(
            id="a", task_id="a", environment="e", seed=0, group_id="g", outcome=Outcome.FINISHED, reward=reward
        )

    metrics = trajectory_metrics([episode(1e300), episode(-1e300)], version=0)
    assert metrics["reward/std"] == pytest.approx(math.sqrt(2) * 1e300)
