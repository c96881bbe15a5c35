"""Aggregation against loops over owners, and counts that do not depend on how a step is split."""

from statistics import fmean

import pytest
import torch

from agentrl.algorithms.aggregation import Aggregation, TokenOwners, token_weights
from agentrl.errors import ConfigError

# Tokens of four sequences; trajectory 0 is split in sequences 0 and 1; groups {0, 1} and {2}.
SEQUENCE = [0, 0, 1, 2, 2, 2, 3]
TRAJECTORY = [0, 0, 0, 1, 1, 1, 2]
GROUP = [0, 0, 0, 0, 0, 0, 1]
LOSSES = [1.0, 2.0, 6.0, 3.0, 3.0, 9.0, 4.0]
OWNERS = TokenOwners(sequence=torch.tensor(SEQUENCE), trajectory=torch.tensor(TRAJECTORY), group=torch.tensor(GROUP))


def members(owner):
    return [[loss for loss, o in zip(LOSSES, owner, strict=True) if o == name] for name in sorted(set(owner))]


EXPECTED = {
    "token-mean": fmean(LOSSES),
    "seq-mean-token-mean": fmean(fmean(own) for own in members(SEQUENCE)),
    "seq-mean-token-sum": fmean(sum(own) for own in members(SEQUENCE)),
    "seq-mean-token-sum-norm": fmean(sum(own) / 10 for own in members(SEQUENCE)),
    "traj-mean-token-mean": fmean(fmean(own) for own in members(TRAJECTORY)),
    "prompt-mean": fmean(fmean(own) for own in members(GROUP)),
}


def aggregate(mode, owners=OWNERS, losses=LOSSES):
    norm = 10 if mode == "seq-mean-token-sum-norm" else None
    weights = token_weights(Aggregation(mode), owners, norm_length=norm)
    return float((weights * torch.tensor(losses, dtype=torch.float64)).sum())


def test_every_mode_is_tested():
    assert set(EXPECTED) == {mode.value for mode in Aggregation}


@pytest.mark.parametrize("mode", EXPECTED)
def test_mode_equals_the_loop(mode):
    assert aggregate(mode) == pytest.approx(EXPECTED[mode], abs=1e-12)


def test_by_hand():
    assert aggregate("traj-mean-token-mean") == pytest.approx((3 + 5 + 4) / 3)
    assert aggregate("prompt-mean") == pytest.approx((4 + 4) / 2)


def test_a_split_trajectory_counts_once():
    joined = TokenOwners(sequence=torch.tensor([0, 0, 0, 2, 2, 2, 3]), trajectory=OWNERS.trajectory, group=OWNERS.group)
    for mode in ("traj-mean-token-mean", "prompt-mean", "token-mean"):
        assert aggregate(mode) == aggregate(mode, joined)


def test_dropped_tokens_are_in_no_denominator():
    kept = torch.tensor([0, 1, 2, 3, 6])
    losses = [LOSSES[i] for i in kept]
    assert aggregate("token-mean", OWNERS.select(kept), losses) == pytest.approx(16 / 5)
    assert aggregate("seq-mean-token-mean", OWNERS.select(kept), losses) == pytest.approx((1.5 + 6 + 3 + 4) / 4)


@pytest.mark.parametrize("mode", EXPECTED)
def test_order_does_not_matter(mode):
    order = torch.tensor([6, 3, 0, 5, 2, 1, 4])
    losses = [LOSSES[i] for i in order]
    assert aggregate(mode, OWNERS.select(order), losses) == pytest.approx(EXPECTED[mode], abs=1e-12)


def test_a_constant_length_must_be_given():
    with pytest.raises(ConfigError, match="norm_length"):
        token_weights(Aggregation.SEQ_MEAN_TOKEN_SUM_NORM, OWNERS)
