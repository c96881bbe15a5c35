"""Reward shaping before advantages are estimated."""

import dataclasses
import math
import random

import pytest
import torch

from agentrl.algorithms.rewards import EpisodeRewards, RewardKL, pf_ppo
from agentrl.errors import ConfigError
from agentrl.registry import Kind, lookup

REWARDS = EpisodeRewards(
    turn_reward=torch.tensor([0.0, 2.0, -3.0], dtype=torch.float64),
    turn_episode=torch.tensor([0, 0, 1]),
    turn_valid=torch.tensor([True, True, False]),
    final=torch.tensor([0.25, 0.0, 0.5], dtype=torch.float64),  # the third episode took no turn
    group=torch.tensor([0, 0, 1]),
    sampled=torch.tensor([10, 50, 0]),
    unfinished=torch.tensor([False, True, False]),
    longest=torch.tensor([85, 100, 5]),
    max_tokens=100,
)


@pytest.mark.parametrize(
    ("name", "options", "returns", "turns"),
    [
        ("invalid", {"penalty": -0.1}, [2.25, -3.1, 0.5], [0.0, 2.0, -3.1]),
        ("unfinished", {"penalty": -1.0}, [2.25, -4.0, 0.5], [0.0, 2.0, -3.0]),
        ("format", {"bonus": 0.5}, [2.75, -3.0, 0.5], [0.0, 2.0, -3.0]),
        ("length", {"factor": 0.5}, [2.2, -3.25, 0.5], [0.0, 2.0, -3.0]),
        ("cosine", {}, [0.5 + 0.25 * (1 + math.cos(0.1 * math.pi)), -0.75, 1.0], [0.0, 2.0, -3.0]),
        ("group_length", {"factor": 2.0}, [3.25, -4.0, 0.5], [0.0, 2.0, -3.0]),
        ("overlong", {"buffer": 20, "factor": 0.5}, [2.125, -3.5, 0.5], [0.0, 2.0, -3.0]),
        ("clip", {}, [1.0, -1.0, 0.5], [0.0, 2.0, -3.0]),
        ("clip", {"low": 0.0, "high": 2.0}, [2.0, 0.0, 0.5], [0.0, 2.0, -3.0]),
        ("win_rate", {}, [1.0, 0.0, 0.5], [0.0, 2.0, -3.0]),
    ],
)
def test_shaping_by_hand(name, options, returns, turns):
    found = lookup(Kind.SHAPING, name)(REWARDS, **options)
    assert found.returns.tolist() == pytest.approx(returns)
    assert found.turn_reward.tolist() == pytest.approx(turns)


def test_repaired_calls_are_penalised_and_get_no_format_bonus():
    repaired = dataclasses.replace(REWARDS, turn_repaired=torch.tensor([False, True, False]))
    found = lookup(Kind.SHAPING, "repaired")(repaired, penalty=-0.1)
    assert found.turn_reward.tolist() == pytest.approx([0.0, 1.9, -3.0])
    assert lookup(Kind.SHAPING, "format")(repaired, bonus=0.5).returns.tolist() == REWARDS.returns.tolist()
    assert lookup(Kind.SHAPING, "repaired")(REWARDS, penalty=-0.1).returns.tolist() == REWARDS.returns.tolist()


def test_returns_that_differ_by_rounding_are_a_draw():
    ends = torch.arange(3)
    rewards = dataclasses.replace(
        REWARDS,
        turn_reward=torch.tensor([0.3, 0.1 + 0.2, 0.2], dtype=torch.float64),
        turn_episode=ends,
        final=torch.zeros(3, dtype=torch.float64),
        group=torch.zeros(3, dtype=torch.int64),
    )
    assert lookup(Kind.SHAPING, "win_rate")(rewards).returns.tolist() == [0.75, 0.75, 0.0]


def test_the_win_rate_is_the_share_of_the_others_that_are_beaten():
    turns, group = torch.arange(4), torch.tensor([0, 0, 0, 1])
    rewards = dataclasses.replace(
        REWARDS,
        turn_reward=torch.tensor([3.0, 1.0, 2.0, 7.0], dtype=torch.float64),
        turn_episode=turns,
        turn_valid=turns >= 0,
        final=torch.zeros(4, dtype=torch.float64),
        group=group,
        sampled=turns,
        unfinished=turns < 0,
        longest=turns,
    )
    assert lookup(Kind.SHAPING, "win_rate")(rewards).returns.tolist() == [1.0, 0.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("invalid", {"penalty": 0.1}, r"shaping invalid: penalty is out of range: got 0\.1, expected at most 0"),
        ("repaired", {"penalty": 0.1}, r"shaping repaired: penalty is out of range: got 0\.1, expected at most 0"),
        ("unfinished", {"penalty": 1.0}, r"shaping unfinished: penalty is out of range: got 1\.0, expected at most 0"),
        ("overlong", {"buffer": 100}, "buffer is out of range: got 100, expected above 0 and below agent.max_tokens"),
        ("overlong", {"buffer": 10, "factor": -1.0}, "factor is out of range"),
        ("clip", {"low": 1.0, "high": 1.0}, "low and high is out of range"),
    ],
)
def test_options_out_of_range(name, options, message):
    with pytest.raises(ConfigError, match=message):
        lookup(Kind.SHAPING, name)(REWARDS, **options)


def test_overlong_penalty_equals_the_formula():
    rng = random.Random(2)
    for _ in range(1000):
        longest, limit = rng.randint(0, 300), rng.randint(50, 300)
        buffer, factor = rng.randint(1, 49), rng.random()
        rewards = EpisodeRewards(
            turn_reward=torch.zeros(0).double(),
            turn_episode=torch.zeros(0).long(),
            turn_valid=torch.zeros(0).bool(),
            final=torch.zeros(1).double(),
            group=torch.zeros(1).long(),
            sampled=torch.zeros(1).long(),
            unfinished=torch.zeros(1).bool(),
            longest=torch.tensor([longest]),
            max_tokens=limit,
        )
        found = lookup(Kind.SHAPING, "overlong")(rewards, buffer=buffer, factor=factor)
        expected = min(-(longest - (limit - buffer)) / buffer * factor, 0)
        assert found.returns.item() == pytest.approx(expected, abs=1e-12)


def test_kl_in_the_reward_by_hand():
    kl = RewardKL(coef=0.5)
    mu, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl.penalty(mu, reference).tolist() == pytest.approx([-0.25, 0.5])
    assert RewardKL(coef=0.5, estimator="k2").penalty(mu, reference).tolist() == pytest.approx([-0.0625, -0.25])
    assert RewardKL(coef=1.0, estimator="k3").penalty(mu, reference).tolist() == pytest.approx(
        [-(math.exp(-0.5) + 0.5 - 1), -(math.e - 1 - 1)]
    )


def test_fixed_weight_is_constant():
    kl = RewardKL(coef=0.5)
    kl.adapt(100.0, episodes=10)
    assert kl.coef == 0.5


def test_the_adaptive_weight_moves_by_at_most_a_fifth_of_the_share():
    kl = RewardKL(coef=0.5, target=0.1, horizon=100.0)
    kl.adapt(0.11, episodes=10)  # error 0.1, a tenth of the horizon
    assert kl.coef == pytest.approx(0.5 * 1.01)
    kl.adapt(5.0, episodes=10)
    assert kl.coef == pytest.approx(0.5 * 1.01 * 1.02)
    kl.adapt(0.0, episodes=50)
    assert kl.coef == pytest.approx(0.5 * 1.01 * 1.02 * 0.9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coef": 0.0}, "coef is out of range"),
        ({"coef": 1.0, "target": 0.1}, "target and horizon must be set together"),
        ({"coef": 1.0, "target": -0.1, "horizon": 1.0}, "target is out of range"),
    ],
)
def test_kl_options_out_of_range(options, message):
    with pytest.raises(ConfigError, match=message):
        RewardKL(**options)


def test_resampling_follows_the_weights():
    returns = torch.tensor([0.0, 1.0, -2.0, 0.0]).repeat(1000)
    drawn = pf_ppo(returns, 0, power=1.0)
    assert drawn.numel() == returns.numel()
    share = returns[drawn].unique(return_counts=True)
    assert share[0].tolist() == [-2.0, 1.0]
    assert share[1][0] / share[1][1] == pytest.approx(2.0, abs=0.2)
    assert torch.equal(drawn, pf_ppo(returns, 0, power=1.0))
    assert not torch.equal(drawn, pf_ppo(returns, 1, power=1.0))


def test_resampling_with_zero_returns_draws_each_once():
    assert pf_ppo(torch.zeros(4), 0).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("max_min", [0.0, 1.0, 1.0, 0.0, 1.0]),
        ("max_random", [0.1, 0.1, 0.4, 0.1, 0.4]),
        ("power", [0.25, 0, 1, 0.0625, 1]),
    ],
)
def test_methods_of_resampling_have_the_weights_of_verl(method, weights):
    """As `compute_pf_ppo_reweight_data` of verl; a return of 0.1 + 0.2 - 0.3 is 0."""
    returns = torch.tensor([0.5, 0.1 + 0.2 - 0.3, 1.0, 0.25, 1.0], dtype=torch.float64)
    drawn = torch.cat([pf_ppo(returns, seed, method=method) for seed in range(4000)])
    share = torch.bincount(drawn, minlength=5) / len(drawn)
    assert share.tolist() == pytest.approx([weight / sum(weights) for weight in weights], abs=0.01)
