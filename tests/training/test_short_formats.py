"""bfloat16 against float32: log-probabilities, losses and gradients within stated bounds."""

import copy

import pytest
import torch

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.training.forward.logprobs import score
from agentrl.training.forward.sequences import scored_sequence
from agentrl.training.trainer import Trainer

LOGP_MEAN, LOGP_MAX = 0.03, 0.3
"""Differences of log-probabilities, in nats: bfloat16 has 8 bits of precision, logits here are of size 1 to 5."""
LOSS = 0.03
"""Difference of losses, over the mean size of an advantage."""
GRADIENT = 0.08
"""Norm of the difference of gradients, over the norm."""


def rounded(model):
    """The model whose weights are what bfloat16 can hold: both formats compute with the same weights."""
    return copy.deepcopy(model).bfloat16().float()


def gradient_of_step(model, trajectories, **settings):
    trainer = Trainer(
        model,
        AlgorithmConfig(correction={"mode": "off"}),
        TrainerConfig(tokens_per_micro_batch=80, **settings),
        seed=0,
        max_tokens=100,
    )
    seen, update = {}, trainer._optimizer.update

    def record():
        seen.update({name: p.grad.float().clone() for name, p in model.named_parameters()})
        return update()

    trainer._optimizer.update = record
    return trainer.step(trajectories, temperature=1.0), seen


def test_log_probabilities(model, trajectories):
    whole = rounded(model)
    sequences = [scored_sequence(s.token_ids, s.loss_mask) for t in trajectories for s in t.sequences]
    with torch.no_grad():
        expected = score(whole, sequences, temperature=1.0).logp
        found = score(copy.deepcopy(whole).bfloat16(), sequences, temperature=1.0).logp
    apart = (found - expected).abs()
    assert found.dtype == torch.float32
    assert 0 < float(apart.mean()) < LOGP_MEAN
    assert float(apart.max()) < LOGP_MAX


@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_and_gradients(model, trajectories, checkpointing):
    whole = rounded(model)
    expected, exact = gradient_of_step(whole, trajectories, gradient_checkpointing=checkpointing)
    short = copy.deepcopy(rounded(model)).bfloat16()
    found, seen = gradient_of_step(short, trajectories, gradient_checkpointing=checkpointing)
    size = expected.metrics["train/advantage_abs_mean"]
    assert abs(found.metrics["train/loss"] - expected.metrics["train/loss"]) < LOSS * size
    apart = sum(float((seen[name] - gradient).square().sum()) for name, gradient in exact.items())
    assert 0 < (apart / sum(float(g.square().sum()) for g in exact.values())) ** 0.5 < GRADIENT
