"""Aggregations, corrections and filters on 400 random batches against loops."""

import dataclasses
import itertools
import math
import random

import pytest
import torch

from agentrl.algorithms.aggregation import Aggregation, TokenOwners, token_weights
from agentrl.algorithms.correction import CorrectionMode, correction
from agentrl.algorithms.types import LossInput
from agentrl.registry import Kind, lookup, names

BATCHES = 400


@pytest.fixture(scope="module")
def batches():
    """Tokens as (sequence, trajectory, group, q, entropy), in random order of packing."""
    rng = random.Random(3)
    return [random_batch(rng) for _ in range(BATCHES)]


def random_batch(rng):
    trajectories = rng.randint(1, 4)
    owner = [rng.randrange(trajectories) for _ in range(rng.randint(1, 5))]
    group = [rng.randrange(2) for _ in range(trajectories)]
    rows = [
        (
            s,
            trajectory,
            group[trajectory],
            rng.gauss(0, 0.4) if rng.random() < 0.8 else rng.choice([30.0, -22.0, -8.0]),
            rng.random(),
        )
        for s, trajectory in enumerate(owner)
        for _ in range(rng.randint(1, 5))
    ]
    rng.shuffle(rows)
    return rows


def owners(rows):
    sequence, trajectory, group, *_ = (torch.tensor(column) for column in zip(*rows, strict=True))
    return TokenOwners(sequence=sequence, trajectory=trajectory, group=group)


def share_of(rows, row, column):
    """A mean over owners of the mean over their tokens."""
    return 1 / len({other[column] for other in rows}) / sum(other[column] == row[column] for other in rows)


AGGREGATIONS = {
    "token-mean": lambda rows, _: 1 / len(rows),
    "seq-mean-token-mean": lambda rows, row: share_of(rows, row, 0),
    "seq-mean-token-sum": lambda rows, _: 1 / len({other[0] for other in rows}),
    "seq-mean-token-sum-norm": lambda rows, _: 1 / len({other[0] for other in rows}) / 7,
    "traj-mean-token-mean": lambda rows, row: share_of(rows, row, 1),
    "prompt-mean": lambda rows, row: share_of(rows, row, 2),
}


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregation_equals_the_loop(batches, mode):
    norm = 7 if mode == "seq-mean-token-sum-norm" else None
    for rows in batches:
        found = token_weights(Aggregation(mode), owners(rows), norm_length=norm).tolist()
        assert found == pytest.approx([AGGREGATIONS[mode](rows, row) for row in rows], rel=1e-12)


def loss_input(rows):
    q = torch.tensor([row[3] for row in rows], dtype=torch.float64)
    zero = torch.zeros_like(q)
    own = owners(rows)
    return LossInput(
        logp=zero,
        old_logp=q - 40,
        behaviour_logp=zero - 40,
        advantage=zero,
        episode_return=zero,
        sequence=own.sequence,
        sequences=int(own.sequence.max()) + 1,
        entropy=torch.tensor([row[4] for row in rows], dtype=torch.float64),
    )


def distance(row):
    return row[3]


def clamped(row):
    return max(-20.0, min(20.0, row[3]))


def sequence_sum(rows, row, of):
    return math.fsum(of(other) for other in rows if other[0] == row[0])


def sequence_mean(rows, row, of):
    return sequence_sum(rows, row, of) / sum(other[0] == row[0] for other in rows)


def sequence_weight(rows, row):
    return min(math.exp(max(-20.0, min(20.0, sequence_sum(rows, row, distance)))), 5.0)


def icepop(_, row):
    rho = math.exp(clamped(row))
    return rho if 0.5 <= rho <= 5.0 else 0.0


CORRECTIONS = {
    "token": lambda _, row: min(math.exp(clamped(row)), 2.0),
    "sequence": sequence_weight,
    "icepop": icepop,
    "off": lambda _, __: 1.0,
}


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_correction_equals_the_loop(batches, mode):
    for rows in batches:
        tokens = loss_input(rows)
        found = correction(CorrectionMode(mode), tokens.old_logp, tokens.behaviour_logp, tokens.sequence)
        assert found.weights.tolist() == pytest.approx([CORRECTIONS[mode](rows, row) for row in rows], rel=1e-9)
        assert found.kept.tolist() == [weight > 0 for weight in found.weights.tolist()]


K = {
    "k1": distance,
    "k2": lambda row: distance(row) ** 2 / 2,
    "k3": lambda row: math.exp(clamped(row)) - clamped(row) - 1,
}


@pytest.mark.parametrize(("name", "of"), list(itertools.product(K, ["token", "sequence"])))
def test_rejection_equals_the_loop(batches, name, of):
    for rows in batches:
        kept = lookup(Kind.FILTER, name)(loss_input(rows), limit=0.25, of=of).tolist()
        values = [K[name](row) if of == "token" else sequence_mean(rows, row, K[name]) for row in rows]
        assert kept == [abs(value) <= 0.25 for value in values]


def test_geometric_mean_rejects_whole_sequences(batches):
    for rows in batches:
        kept = lookup(Kind.FILTER, "geometric")(loss_input(rows), band=(0.8, 1.25)).tolist()
        assert kept == [0.8 <= math.exp(sequence_mean(rows, row, distance)) <= 1.25 for row in rows]


@pytest.mark.parametrize("advantage", [-1.0, 0.0])
def test_off_policy_sequences_lose_tokens_of_negative_advantage(batches, advantage):
    for rows in batches:
        tokens = loss_input(rows)
        logp = tokens.old_logp - torch.linspace(0, 0.3, len(rows), dtype=torch.float64)
        tokens = dataclasses.replace(tokens, logp=logp, advantage=torch.full_like(logp, advantage))
        kept = lookup(Kind.FILTER, "off_policy_sequence")(tokens, delta=0.1).tolist()
        away = (tokens.behaviour_logp - logp).tolist()
        for row, found in zip(rows, kept, strict=True):
            own = [x for x, other in zip(away, rows, strict=True) if other[0] == row[0]]
            assert found == (advantage >= 0 or sum(own) / len(own) <= 0.1)


def test_top_entropy_keeps_the_most_uncertain_tokens(batches):
    for rows in batches:
        kept = lookup(Kind.FILTER, "top_entropy")(loss_input(rows)).tolist()
        ranked = sorted((row[4] for row in rows), reverse=True)[: max(1, round(0.2 * len(rows)))]
        assert kept == [row[4] in ranked for row in rows]


def test_every_filter_is_tested():
    assert {name for name in names(Kind.FILTER) if ":" not in name} == {
        *K,
        "geometric",
        "off_policy_sequence",
        "top_entropy",
    }
