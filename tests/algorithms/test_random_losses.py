"""Every loss and its gradient on 400 random batches against scalar float64 formulas, token by token.

Sequences of unequal length, several per trajectory, an advantage per turn, tokens without one, stale tokens.
"""

import dataclasses
import math

import pytest
import torch
from loss_loops import COUPLED, OVER_THE_UPDATE, REFERENCES, covariances, kl_cov, m2po, ppo, ppo_clips, sequences_of

from agentrl.algorithms.traits import other_input
from agentrl.algorithms.types import LossInput
from agentrl.registry import Kind, lookup, names

BATCHES = 400
MOST = 6
"""Tokens of a sequence."""


@pytest.fixture(scope="module")
def batches():
    """Of 1 to 4 sequences each."""
    generator = torch.Generator().manual_seed(5)
    return [random_batch(generator) for _ in range(BATCHES)]


def random_batch(generator):
    def whole(low, high, *size):
        return torch.randint(low, high + 1, size, generator=generator)

    def normal(scale):
        return torch.randn(count, generator=generator, dtype=torch.float64) * scale

    lengths = whole(1, MOST, int(whole(1, 4, 1)))
    count = int(lengths.sum())
    sequence = torch.arange(lengths.numel()).repeat_interleave(lengths)
    turn = sequence * 2 + (whole(0, 1, count) == 1).long()
    return (
        LossInput(
            logp=(-normal(1.5).abs() - 0.01).requires_grad_(),
            old_logp=torch.zeros(count, dtype=torch.float64),
            behaviour_logp=torch.zeros(count, dtype=torch.float64),
            advantage=torch.tensor([-1.5, -0.5, 0.0, 0.5, 2.0], dtype=torch.float64)[whole(0, 4, 8)][turn],
            episode_return=torch.tensor([-1.0, 0.0, 0.5, 1.0], dtype=torch.float64)[whole(0, 3, 4)][sequence // 2],
            sequence=sequence,
            sequences=lengths.numel(),
            turn=turn,
            episode=sequence // 2,
            group=torch.zeros_like(sequence),
            reference_logp=-normal(1.5).abs(),
            teacher_logp=-normal(1.5).abs(),
            expert=(whole(0, 3, 4) == 0)[sequence],
        ),
        normal(0.4),
        normal(0.5),
    )


def shifted(parts):
    """pi_old and mu at a random distance; a few far away."""
    tokens, d, q = parts
    far = torch.where(d > 1.0, 25.0, d)
    old = tokens.logp.detach() - far
    return dataclasses.replace(tokens, old_logp=old, behaviour_logp=old - q)


@pytest.fixture(scope="module")
def inputs(batches):
    return [shifted(parts) for parts in batches]


@pytest.fixture(scope="module")
def joined(inputs):
    """All batches as one, for losses whose sequences do not look at one another."""
    offsets = torch.tensor([0] + [tokens.sequences for tokens in inputs]).cumsum(0)
    parts = {
        part.name: torch.cat([getattr(tokens, part.name) for tokens in inputs])
        for part in dataclasses.fields(LossInput)
        if isinstance(getattr(inputs[0], part.name), torch.Tensor) and part.name not in ("logp", "sequence", "turn")
    }
    return LossInput(
        logp=torch.cat([tokens.logp.detach() for tokens in inputs]).requires_grad_(),
        sequence=torch.cat([t.sequence + offset for t, offset in zip(inputs, offsets[:-1], strict=True)]),
        turn=torch.cat([t.turn + 2 * offset for t, offset in zip(inputs, offsets[:-1], strict=True)]),
        sequences=int(offsets[-1]),
        **parts,
    )


def assert_equal(name, tokens, expected, **options):
    logp = tokens.logp.detach().requires_grad_()
    loss = lookup(Kind.LOSS, name)(dataclasses.replace(tokens, logp=logp), **options)
    (gradient,) = torch.autograd.grad(loss.values.sum(), logp)
    for found, column in ((loss.values, 0), (gradient, 1)):
        wanted = torch.tensor([pair[column] for pair in expected], dtype=torch.float64)
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}")


def test_every_policy_loss_has_a_reference():
    policy = {name for name in names(Kind.LOSS) if ":" not in name and other_input(lookup(Kind.LOSS, name)) is None}
    assert policy == {*REFERENCES, *OVER_THE_UPDATE, "distill_top_k"}  # which reads other tokens: test_other_losses


@pytest.mark.parametrize("name", REFERENCES)
def test_loss_and_gradient_equal_the_reference(joined, name):
    expected = [pair for sequence in sequences_of(joined) for pair in REFERENCES[name](sequence)]
    assert_equal(name, joined, expected)


@pytest.mark.parametrize("name", COUPLED)
def test_losses_of_groups_equal_the_reference(inputs, name):
    for tokens in inputs:
        flat = [token for sequence in sequences_of(tokens) for token in sequence]
        assert_equal(name, tokens, COUPLED[name](flat))
        chosen = lookup(Kind.LOSS, name).choice.choose(tokens)
        assert_equal(name, dataclasses.replace(tokens, chosen=chosen), COUPLED[name](flat))


@pytest.mark.parametrize("name", ["pacs", "gvpo", "online_dpo"])
def test_slopes_of_losses_of_groups_are_derivatives(inputs, name):
    """Those of the sum over the group; in flowrl, weights and the group's mean are constants instead."""
    choose, step = lookup(Kind.LOSS, name).choice.choose, 1e-6

    def total(tokens, i, shift):
        logp = tokens.logp.detach().clone()
        logp[i] += shift
        return float(choose(dataclasses.replace(tokens, logp=logp))[:, 0].sum())

    for tokens in inputs[:50]:
        slopes = choose(tokens)[:, 1].tolist()
        for i, slope in enumerate(slopes):
            found = (total(tokens, i, step) - total(tokens, i, -step)) / (2 * step)
            assert found == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_kl_cov_equals_the_reference(inputs):
    for parts in inputs:
        distinct = torch.linspace(0, 0.1, parts.logp.numel(), dtype=torch.float64)
        tokens = dataclasses.replace(parts, advantage=parts.advantage + distinct)
        flat = [token for sequence in sequences_of(tokens) for token in sequence]
        assert_equal("kl_cov", tokens, kl_cov(flat, 0.3), share=0.3)


def test_m2po_equals_the_reference(inputs):
    for tokens in inputs:
        flat = [token for sequence in sequences_of(tokens) for token in sequence]
        assert_equal("m2po", tokens, m2po(flat, 0.1), tau=0.1)


def test_clip_cov_draws_anew_in_every_update(inputs):
    tokens = max(inputs, key=lambda parts: parts.logp.numel())
    tokens = dataclasses.replace(tokens, old_logp=tokens.logp.detach())  # nothing is clipped
    choose, options = lookup(Kind.LOSS, "clip_cov").choice.choose, {"share": 0.3, "cov_low": -9.0, "cov_high": 9.0}
    found = [choose(dataclasses.replace(tokens, draw=draw), **options).tolist() for draw in (*range(20), 0)]
    assert found[0] == found[-1]
    assert len(set(map(tuple, found))) > 10
    assert choose(tokens, seed=7, **options).tolist() == found[7]


def test_clip_cov_is_ppo_without_some_tokens_of_the_band(inputs):
    for seed, tokens in enumerate(inputs):
        flat = [token for sequence in sequences_of(tokens) for token in sequence]
        band = {
            i for i, covariance in enumerate(covariances(flat)) if 0.2 <= covariance <= 2.0 and not ppo_clips(flat[i])
        }
        options = {"share": 0.3, "cov_low": 0.2, "cov_high": 2.0, "seed": seed}
        mask = lookup(Kind.LOSS, "clip_cov").choice.choose(tokens, **options)
        chosen = set(mask.nonzero().squeeze(-1).tolist())
        assert chosen <= band
        assert math.isclose(float(mask.sum()), min(len(band), max(1, int(0.3 * len(flat)))))
        left = [1 - share for share in mask.tolist()]
        expected = [(share * value, share * slope) for share, (value, slope) in zip(left, map(ppo, flat), strict=True)]
        told = tokens if seed % 5 == 0 else dataclasses.replace(tokens, chosen=mask)  # what it would choose again
        assert_equal("clip_cov", told, expected, **options)
