"""Norms of the policy's score, against the gradient of log pi by the logits."""

import copy

import pytest
import torch

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.training.trainer import Trainer


def test_the_norm_is_that_of_the_gradient_by_the_logits(model, trajectories):
    trainer = Trainer(copy.deepcopy(model), AlgorithmConfig(advantage="otb"), TrainerConfig(), seed=0, max_tokens=100)
    signal, seen = trainer.signals["score_norm"], []
    annotate = signal.annotate
    signal.annotate = lambda batch: seen.append(annotate(batch)) or seen[-1]
    report = trainer.step(trajectories, temperature=0.7)
    assert report.metrics["train/updates"] == 1
    (batch,) = seen
    expected = []
    own = copy.deepcopy(model).double()
    for trajectory in batch.trajectories:
        for sequence in trajectory.sequences:
            ids = torch.from_numpy(sequence.token_ids.astype("int64"))
            logits = own(ids[None]).logits[0].detach()
            for t in sequence.loss_mask.nonzero()[0]:
                scores = (logits[t - 1] / 0.7).requires_grad_()
                (gradient,) = torch.autograd.grad(scores.log_softmax(-1)[ids[t]], scores)
                expected.append(float(gradient.square().sum()))
    assert batch.episodes.score_norm.tolist() == pytest.approx(expected, rel=1e-4, abs=0.02 / 64)
