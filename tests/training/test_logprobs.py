"""Chunked log-probabilities against the model's own full logits."""

import numpy as np
import pytest
import torch

from agentrl.errors import LedgerError
from agentrl.models.threads import ThreadWorkers
from agentrl.training.forward.layout import PADDED, Layout
from agentrl.training.forward.logprobs import score
from agentrl.training.forward.runner import ModelRunner, RunnerSettings
from agentrl.training.forward.sequences import group_by_length, pad, padded_indices, scored_sequence
from agentrl.training.forward.tree_attention import ATTENTION

PACKED = Layout(packed=True)

IDS = [np.array([5, 6, 7, 8, 9, 10, 11]), np.array([3, 4, 5]), np.array([9, 9, 8, 7, 6, 5, 4, 3, 2, 12, 13])]
MASKS = [np.array([0, 0, 1, 1, 0, 1, 0]), np.array([0, 1, 1]), np.array([0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0])]


def sequences():
    return [scored_sequence(ids, mask.astype(bool)) for ids, mask in zip(IDS, MASKS, strict=True)]


def reference(model, temperature):
    """One sequence at a time, full logits."""
    logps, entropies = [], []
    for ids, mask in zip(IDS, MASKS, strict=True):
        distribution = (model(torch.tensor(ids)[None]).logits[0] / temperature).log_softmax(-1)
        wanted = np.flatnonzero(mask)
        logps.append(distribution[wanted - 1, torch.tensor(ids)[wanted]])
        entropies.append(torch.distributions.Categorical(logits=distribution[wanted - 1]).entropy())
    return torch.cat(logps), torch.cat(entropies)


@pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients(model, layout, temperature):
    model.config._attn_implementation = ATTENTION
    weights = torch.linspace(-1, 2, 8)
    found = score(model, sequences(), temperature=temperature, layout=layout, entropy_gradient=True)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad((weights * found.logp + found.entropy).sum(), parameters)
    logp, entropies = reference(model, temperature)
    expected = torch.autograd.grad((weights * logp + entropies).sum(), parameters)
    torch.testing.assert_close(found.logp, logp, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.entropy, entropies, atol=1e-6, rtol=1e-5)
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_temperature_zero_counts_as_one(model):
    with torch.no_grad():
        zero, one = (score(model, sequences(), temperature=t).logp for t in (0.0, 1.0))
    assert torch.equal(zero, one)


def test_entropy_is_a_measurement_unless_asked(model):
    assert not score(model, sequences(), temperature=1.0).entropy.requires_grad


def test_padding_does_not_matter(model, monkeypatch):
    found = []
    for number in (0, 17):
        monkeypatch.setattr("agentrl.training.forward.sequences.PAD_ID", number)
        with torch.no_grad():
            found.append(score(model, sequences(), temperature=1.0).logp)
    assert torch.equal(*found)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("budget", [1, 7, 22, 1000])
def test_logprobs_keep_the_order(model, budget, lanes):
    runner = ModelRunner(model, RunnerSettings(layout=Layout(budget=budget), lanes=ThreadWorkers(lanes)))
    found = runner.logprobs(sequences(), temperature=1.0)
    for scores, wanted in zip((found.logp, found.entropy), reference(model, 1.0), strict=True):
        torch.testing.assert_close(scores, wanted.detach(), atol=1e-6, rtol=1e-5)


def test_bias_of_the_head(model):
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, 40))
    found = score(model, sequences(), temperature=1.0).logp
    torch.testing.assert_close(found, reference(model, 1.0)[0], atol=1e-6, rtol=1e-5)


def test_sequence_is_cut_after_the_last_wanted_token():
    assert [len(sequence) for sequence in sequences()] == [5, 2, 8]


def test_first_token_cannot_be_wanted():
    with pytest.raises(LedgerError, match="first token"):
        scored_sequence(np.array([1, 2]), np.array([True, False]))


def test_micro_batches_hold_every_sequence_once_within_the_budget():
    lengths = [5, 100, 7, 7, 30, 28, 1, 64, 3, 2]
    batches = group_by_length(lengths, budget=64)
    assert sorted(i for batch in batches for i in batch) == list(range(10))
    for batch in batches:
        longest = max(lengths[i] for i in batch)
        assert longest * len(batch) <= 64 or len(batch) == 1
        assert all(2 * lengths[i] >= longest for i in batch)


def test_pad():
    two = sequences()[:2]
    assert pad(two).tolist() == [[5, 6, 7, 8, 9], [3, 4, 0, 0, 0]]
    assert pad(two, longest=6).tolist() == [[5, 6, 7, 8, 9, 0], [3, 4, 0, 0, 0, 0]]
    assert [place.tolist() for place in padded_indices(two, 6)] == [[0, 1, 2, 3, 4], [6, 7]]
