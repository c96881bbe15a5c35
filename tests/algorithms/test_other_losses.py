"""Losses that are not functions of a `LossInput`: critic, pairs, reward model, teacher."""

import math

import pytest
import torch

from agentrl.algorithms.correction import loglinear
from agentrl.algorithms.critic_advantages import ValueInput
from agentrl.algorithms.off_policy_losses import PreferencePairs, ScoredAnswers, implicit_reward
from agentrl.algorithms.types import EpisodeBatch, LossInput
from agentrl.registry import Kind, lookup

ROWS = 1000


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(4)


def draw(generator, *size):
    return torch.randn(*size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("clip", [0.5, None])
def test_value_loss_equals_the_formula(generator, clip):
    v, old, target = draw(generator, ROWS).requires_grad_(), draw(generator, ROWS), draw(generator, ROWS)
    loss = lookup(Kind.LOSS, "value")(ValueInput(values=v, old_values=old, targets=target), clip=clip)
    (gradient,) = torch.autograd.grad(loss.values.sum(), v)
    for row, (a, b, g) in enumerate(zip(v.tolist(), old.tolist(), target.tolist(), strict=True)):
        bounded = a if clip is None else min(max(a, b - clip), b + clip)
        worse = (bounded - g) ** 2 > (a - g) ** 2
        assert loss.values[row].item() == pytest.approx(0.5 * max((a - g) ** 2, (bounded - g) ** 2))
        assert gradient[row].item() == pytest.approx(0.0 if worse else a - g)


@pytest.mark.parametrize("name", ["dpo", "spin"])
def test_pair_losses_equal_the_formula(generator, name):
    chosen, rejected, chosen_reference, rejected_reference = (draw(generator, ROWS) * 5 for _ in range(4))
    chosen.requires_grad_()
    pairs = PreferencePairs(
        chosen_logp=chosen,
        rejected_logp=rejected,
        chosen_reference_logp=chosen_reference,
        rejected_reference_logp=rejected_reference,
    )
    loss = lookup(Kind.LOSS, name)(pairs, beta=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), chosen)
    margins = 0.2 * (chosen.detach() - chosen_reference - rejected + rejected_reference)
    for row in range(ROWS):
        margin = float(margins[row])
        assert loss[row].item() == pytest.approx(math.log1p(math.exp(-margin)))
        assert gradient[row].item() == pytest.approx(-0.2 / (1 + math.exp(margin)))


def test_reward_model_of_prime_equals_the_formula(generator):
    logp, reference = draw(generator, ROWS).requires_grad_(), draw(generator, ROWS)
    episode = torch.arange(ROWS) // 4
    success = (draw(generator, ROWS // 4) > 0).double()
    answers = ScoredAnswers(rm_logp=logp, reference_logp=reference, episode=episode, success=success)
    loss = lookup(Kind.LOSS, "prime")(answers)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    for e in range(ROWS // 4):
        logit = 0.05 * float((logp.detach() - reference)[4 * e : 4 * e + 4].sum())
        chance = 1 / (1 + math.exp(-logit))
        assert loss[e].item() == pytest.approx(-math.log(chance if success[e] else 1 - chance))
        assert gradient[4 * e].item() == pytest.approx(0.05 * (chance - float(success[e])))
    assert implicit_reward(logp.detach(), reference).tolist() == pytest.approx(
        (0.05 * (logp.detach() - reference)).tolist()
    )


def test_distillation_from_the_top_k(generator):
    """Two of five tokens are named, and the other three count as one; with all named it is the forward KL."""
    student, teacher = draw(generator, ROWS, 5).log_softmax(-1), draw(generator, ROWS, 5).log_softmax(-1)
    top, ids = teacher.topk(2, dim=-1)
    found = distilled(student.gather(-1, ids), top)
    for row in range(ROWS):
        p, q = ([math.exp(column[row, v]) for v in ids[row].tolist()] for column in (teacher, student))
        p, q = [*p, 1 - sum(p)], [*q, 1 - sum(q)]
        assert found[row].item() == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    whole = (teacher.exp() * (teacher - student)).sum(-1)
    torch.testing.assert_close(distilled(student, teacher), whole, atol=2e-5, rtol=0)
    assert bool((found <= whole + 1e-9).all())
    torch.testing.assert_close(distilled(top, top), torch.zeros(ROWS, dtype=top.dtype))


def distilled(own, teacher):
    zeros = torch.zeros(len(own), dtype=own.dtype)
    tokens = LossInput(
        logp=zeros,
        old_logp=zeros,
        behaviour_logp=zeros,
        advantage=zeros,
        episode_return=zeros,
        sequence=zeros.long(),
        sequences=1,
        teacher_top_logp=teacher,
        top_logp=own,
    )
    return lookup(Kind.LOSS, "distill_top_k")(tokens).values


def test_the_proximal_policy_between_versions(generator):
    logp, mu, version = draw(generator, ROWS), draw(generator, ROWS), torch.arange(ROWS) % 6
    found = loglinear(logp, mu, version, old_version=5)
    for row in range(ROWS):
        a = (5 - int(version[row])) / (6 - int(version[row]))
        assert found[row].item() == pytest.approx(float(mu[row] + a * (logp[row] - mu[row])))
    assert found[version == 5].tolist() == mu[version == 5].tolist()  # just sampled: mu itself


def test_dqo_is_the_squared_error_of_the_policys_q_function():
    """(beta log(pi / pi_ref) - (r + sum of later rewards without their KL - V))^2, from the paper's formula."""
    beta = 0.03
    logp = torch.tensor([-0.5, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-0.7, -0.8, -2.5], dtype=torch.float64)
    reference = torch.tensor([-1.0, -0.9, -1.5], dtype=torch.float64)
    values = torch.tensor([0.2, 0.4, 0.6], dtype=torch.float64)
    one = torch.zeros(1, dtype=torch.int64)
    episodes = EpisodeBatch(
        returns=torch.ones(1, dtype=torch.float64),
        group=one,
        turn_reward=torch.ones(1, dtype=torch.float64),
        turn_episode=one,
        turn_state=one,
        token_turn=torch.zeros(3, dtype=torch.int64),
        values=values,
    ).with_token_reward(-beta * (old - reference))
    tokens = LossInput(
        logp=logp,
        old_logp=old,
        behaviour_logp=old,
        advantage=lookup(Kind.ADVANTAGE, "dqo")(episodes).advantage,
        episode_return=torch.ones(3, dtype=torch.float64),
        sequence=torch.zeros(3, dtype=torch.int64),
        sequences=1,
    )
    later = [1 - beta * sum((old - reference)[t + 1 :].tolist()) for t in range(3)]
    expected = (beta * (logp - reference) - (torch.tensor(later, dtype=torch.float64) - values)).square()
    torch.testing.assert_close(lookup(Kind.LOSS, "dqo")(tokens, beta=beta).values, expected)
