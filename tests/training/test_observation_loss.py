"""The cross-entropy of observations, against float64 and beside the policy's loss."""

import copy

import pytest
import torch

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.training.trainer import Trainer
from agentrl.trajectory import Source


def gradients_of(model, trajectories, **algorithm):
    settings = TrainerConfig(learning_rate=1e-2, max_grad_norm=1e9, tokens_per_micro_batch=60)
    config = AlgorithmConfig(correction={"mode": "off"}, **algorithm)
    trainer = Trainer(copy.deepcopy(model), config, settings, seed=0, max_tokens=100)
    seen, update = {}, trainer._optimizer.update

    def spy():
        seen.update({name: p.grad.double().clone() for name, p in trainer.model.named_parameters()})
        return update()

    trainer._optimizer.update = spy
    report = trainer.step(trajectories, temperature=0.8)
    assert all(p.grad is None for p in trainer.model.parameters())
    return seen, report.metrics


def observation_losses(model, trajectories):
    """Of every token of an observation after a sequence's first turn; tokens of the parent of a fork count once."""
    found = []
    for trajectory in trajectories:
        for sequence in trajectory.sequences:
            if not sequence.loss_mask.any():
                continue
            ids = torch.from_numpy(sequence.token_ids.astype("int64"))
            scores = model(ids[None]).logits[0].log_softmax(-1)
            first = max(sequence.turns[0].end, sequence.shared)
            found += [
                -scores[t - 1, ids[t]] for t in range(first, len(ids)) if sequence.sources[t] == Source.OBSERVATION
            ]
    return torch.stack(found)


def test_the_gradient_is_that_of_the_mean_over_observation_tokens(model, trajectories):
    few = [t for t in trajectories if t.is_trainable and t.reward is not None]
    plain, _ = gradients_of(model, few, advantage="reinforce")
    both, metrics = gradients_of(model, few, advantage="reinforce", observation_coef=0.5)
    own = copy.deepcopy(model).double()
    losses = observation_losses(own, few)
    (0.5 * losses.mean()).backward()
    assert metrics["train/observation_loss"] == pytest.approx(float(losses.detach().mean()), rel=1e-5)
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(both[name] - plain[name], parameter.grad, atol=2e-6, rtol=1e-4, msg=name)


def test_an_update_that_is_left_out_leaves_no_gradient(model, trajectories):
    settings = TrainerConfig(learning_rate=0.5, epochs=4, max_kl=1e-9)
    config = AlgorithmConfig(advantage="reinforce", observation_coef=0.5)
    trainer = Trainer(copy.deepcopy(model), config, settings, seed=0, max_tokens=100)
    report = trainer.step(trajectories, temperature=1.0)
    assert report.metrics["train/updates_left_out"] >= 1
    assert all(p.grad is None for p in trainer.model.parameters())
