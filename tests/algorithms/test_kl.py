"""KL estimators."""

import math

import pytest
import torch

from agentrl.algorithms.kl import KLEstimator, kl_divergence, policy_kl
from agentrl.algorithms.types import LossInput

X = [0.5, -0.25, 0.0]
VALUES = {
    "k1": [-x for x in X],
    "k2": [x * x / 2 for x in X],
    "k3": [math.exp(x) - x - 1 for x in X],
    "k1+": [-x for x in X],
    "k3+": [math.exp(x) - x - 1 for x in X],
    "k3_ratio": [math.exp(x) - x - 1 for x in X],
}
# d/dlogp with x = ref - logp
GRADIENTS = {
    "k1": [1.0] * 3,
    "k2": [-x for x in X],
    "k3": [1 - math.exp(x) for x in X],
    "k1+": [-x for x in X],
    "k3+": [-x for x in X],
    "k3_ratio": [1 - math.exp(x) for x in X],
}


@pytest.mark.parametrize("name", [estimator.value for estimator in KLEstimator])
def test_estimator(name):
    logp = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    values = kl_divergence(KLEstimator(name), logp, logp.detach() + torch.tensor(X, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(values.sum(), logp)
    assert values.tolist() == pytest.approx(VALUES[name])
    assert gradient.tolist() == pytest.approx(GRADIENTS[name])


@pytest.mark.parametrize(("name", "gradients"), [("k3", [0.0, 0.0]), ("k3+", [-2.8, -15.0])])
def test_k3_is_at_most_ten(name, gradients):
    logp = torch.tensor([-3.0, -16.0], dtype=torch.float64, requires_grad=True)
    values = kl_divergence(KLEstimator(name), logp, logp.detach() + torch.tensor([2.8, 15.0], dtype=torch.float64))
    assert values.tolist() == [10.0, 10.0]
    assert torch.autograd.grad(values.sum(), logp)[0].tolist() == pytest.approx(gradients)


@pytest.mark.parametrize("gap", [-60.0, 60.0])
def test_a_token_beyond_the_clamp_keeps_its_gradient(gap):
    """Otherwise the tokens that a teacher finds most unlikely would cost nothing to learn."""
    logp = torch.tensor([-70.0], dtype=torch.float64, requires_grad=True)
    values = kl_divergence(KLEstimator.K1_PLUS, logp, logp.detach() + gap)
    assert values.tolist() == torch.autograd.grad(values.sum(), logp)[0].tolist() == [-math.copysign(20, gap)]


def test_k3_of_distant_policies_is_finite():
    assert kl_divergence(KLEstimator.K3, torch.tensor([-200.0]), torch.tensor([0.0])).tolist() == [10.0]


def test_k2_gradient_is_the_divergence_gradient():
    """Over all tokens of a small vocabulary, weighted by their probability."""
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    exact = (logp.exp() * (logp - reference)).sum()
    estimated = (logp.exp().detach() * kl_divergence(KLEstimator.K3_PLUS, logp, reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (found,) = torch.autograd.grad(estimated, logits)
    assert found.tolist() == pytest.approx(wanted.tolist())


@pytest.mark.parametrize("old", [[0.3, -1.0, 0.7], [1.0, 0.2, -0.4]])
def test_k3_with_ratios_is_unbiased_in_value_and_gradient(old):
    """Over all tokens of a small vocabulary that pi_old sampled: what TRL computes with `use_bias_correction_kl`."""
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64).log_softmax(0)
    logp, old_logp = logits.log_softmax(0), torch.tensor(old, dtype=torch.float64).log_softmax(0)
    exact = (logp.exp() * (logp - reference)).sum()
    zeros = torch.zeros(3, dtype=torch.float64)
    tokens = LossInput(
        logp=logp,
        old_logp=old_logp,
        behaviour_logp=old_logp,
        advantage=zeros,
        episode_return=zeros,
        sequence=torch.arange(3),
        sequences=3,
        reference_logp=reference,
    )
    estimated = (old_logp.exp() * policy_kl(KLEstimator.K3_RATIO, tokens)).sum()
    trl = (old_logp.exp() * (logp - old_logp).exp() * ((reference - logp).exp() - (reference - logp) - 1)).sum()
    torch.testing.assert_close(estimated, exact)
    torch.testing.assert_close(estimated, trl)
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (found,) = torch.autograd.grad(estimated, logits)
    assert found.tolist() == pytest.approx(wanted.tolist())
