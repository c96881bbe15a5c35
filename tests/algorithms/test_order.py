"""Selections among tokens do not depend on the order of tokens, even with ties."""

import dataclasses
import itertools

import pytest
import torch

from agentrl.algorithms.segments import top_shares
from agentrl.algorithms.types import LossInput
from agentrl.registry import Kind, lookup

FIRST = (2.0, -0.7, 0.1)
"""Entropy, log pi and log rho of the first token, which all four members share."""
REST = [(1.5, -0.2, 0.3), (0.1, -1.1, -0.2), (2.5, -0.4, 0.0), (1.9, -2.0, 0.4)]
ADVANTAGE = [1.0, -1.0, 1.0, -1.0]


def batch(order=range(4)):
    """Four members of two tokens each."""
    rows = [row for member in order for row in (FIRST, REST[member])]
    advantage = [ADVANTAGE[member] for member in order for _ in range(2)]
    entropy, logp, rho = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    return LossInput(
        logp=logp.requires_grad_(),
        old_logp=logp.detach() + torch.tensor([0.05, -0.1] * 4, dtype=torch.float64),
        behaviour_logp=logp.detach() + torch.tensor([0.05, -0.1] * 4, dtype=torch.float64) - rho,
        advantage=torch.tensor(advantage, dtype=torch.float64),
        episode_return=torch.zeros(8, dtype=torch.float64),
        sequence=torch.arange(4).repeat_interleave(2),
        sequences=4,
        entropy=entropy,
        draw=5,
    )


def by_member(values, order):
    """Values of each member's tokens, in the order of members."""
    rows = values.reshape(4, 2).tolist()
    return [rows[list(order).index(member)] for member in range(4)]


BAND = {"cov_low": -9.0, "cov_high": 9.0}
CHOICES = [
    *(("kl_cov", {"share": share}) for share in (0.25, 0.5, 0.75)),
    *(("clip_cov", {"share": share, **BAND, "clip": 9.0}) for share in (0.25, 0.5, 0.75)),
    *(("m2po", {"tau": tau}) for tau in (0.005, 0.01, 0.02, 0.03, 0.06)),
]


@pytest.mark.parametrize(("name", "options"), CHOICES)
def test_losses_that_choose_do_not_depend_on_the_order_of_members(name, options):
    loss, found = lookup(Kind.LOSS, name), []
    for order in itertools.permutations(range(4)):
        tokens = batch(order)
        values = loss(tokens, **options).values
        (gradient,) = torch.autograd.grad(values.sum(), tokens.logp)
        found.append(torch.tensor([by_member(values.detach(), order), by_member(gradient, order)]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("share", [0.125, 0.25, 0.375, 0.5, 0.75, 1.0])
def test_top_entropy_does_not_depend_on_the_order_of_members(share):
    keep = lookup(Kind.FILTER, "top_entropy")
    found = {str(by_member(keep(batch(order), share=share), order)) for order in itertools.permutations(range(4))}
    assert len(found) == 1


@pytest.mark.parametrize(("share", "kept"), [(0.125, 1), (0.25, 5), (0.5, 5), (0.75, 6), (1.0, 8)])
def test_tokens_that_tie_with_the_last_one_are_kept_by_top_entropy(share, kept):
    assert int(lookup(Kind.FILTER, "top_entropy")(batch(), share=share).sum()) == kept


def test_equal_first_tokens_tie_in_float32_too():
    entropy = batch().entropy.float()
    entropy[0] += 3e-7  # another micro-batch
    tokens = dataclasses.replace(batch(), entropy=entropy)
    assert int(lookup(Kind.FILTER, "top_entropy")(tokens, share=0.25).sum()) == 5


@pytest.mark.parametrize(
    ("values", "count", "expected"),
    [
        ([3.0, 1.0, 2.0], 2, [1, 0, 1]),
        ([1.0, 1.0, 1.0, 1.0], 1, [0.25] * 4),
        ([2.0, 1.0, 1.0, 1.0, 0.0], 3, [1, 2 / 3, 2 / 3, 2 / 3, 0]),
        ([-5.0, -5.0, -5.0], 3, [1, 1, 1]),
        ([0.0, 0.0], 1, [0.5, 0.5]),
    ],
)
def test_ties_share_the_places_that_are_left(values, count, expected):
    assert top_shares(torch.tensor(values), count).tolist() == pytest.approx(expected)
    assert float(top_shares(torch.tensor(values), count).sum()) == pytest.approx(count)


def test_tied_tokens_are_drawn_with_the_share_that_one_of_them_would_have():
    """Three of four tokens tie; over many draws of one token each gets a quarter."""
    choose, total = lookup(Kind.LOSS, "clip_cov").choice.choose, torch.zeros(4, dtype=torch.float64)
    columns = {"logp": [-1.0, -1.0, -1.0, -3.0], "advantage": [1.0, 1.0, 1.0, -1.0]}
    few = batch().select(torch.arange(4))
    changed = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    few = dataclasses.replace(few, **changed, old_logp=changed["logp"])
    for draw in range(400):
        part = choose(dataclasses.replace(few, draw=draw), share=0.25, **BAND)
        assert len({round(value, 9) for value in part[:3].tolist()}) == 1
        assert float(part.sum()) == pytest.approx(1)
        total += part
    assert (total / 400).tolist() == pytest.approx([0.25] * 4, abs=0.06)
