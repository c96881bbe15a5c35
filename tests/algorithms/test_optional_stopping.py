"""Expected policy gradients on a bandit of two turns in which the policy may stop after the first, by enumeration.

First the policy stops (reward 0.3) or goes on (reward -0.1); then it takes one of two arms (rewards 1 and 0). Groups
have three episodes, so that 27 groups with their probabilities give the expectation of any estimator exactly.
"""

import itertools

import pytest
import torch
from torch.nn.functional import cosine_similarity, logsigmoid

from agentrl.algorithms.aggregation import Aggregation, TokenOwners, token_weights
from agentrl.algorithms.traits import needed_inputs
from agentrl.algorithms.types import EpisodeBatch
from agentrl.registry import Kind, lookup, names

MEMBERS = 3
REWARDS = {"stop": [0.3], "good": [-0.1, 1.0], "bad": [-0.1, 0.0]}
UNDISCOUNTED = {name: {"gamma": 1.0} for name in ("gigpo", "hgpo", "turn_discounted")}
UNBIASED = {"reinforce", "rloo", "tree", "turn_rloo"}
PROPORTIONAL = {"dr_grpo": 2 / 3, "gpg": 2 / 3}
"""Estimators whose expectation is this share of the gradient; for gpg only as no return equals a mean of others."""
ESTIMATORS = [
    name for name in names(Kind.ADVANTAGE) if ":" not in name and not needed_inputs(lookup(Kind.ADVANTAGE, name))
]


@pytest.fixture(scope="module")
def weights():
    return torch.tensor([-0.6, 0.4], dtype=torch.float64, requires_grad=True)


def turn_logprobs(weights):
    stop, good = weights
    return {
        "stop": [logsigmoid(stop)],
        "good": [logsigmoid(-stop), logsigmoid(good)],
        "bad": [logsigmoid(-stop), logsigmoid(-good)],
    }


def exact_gradient(weights):
    value = sum(sum(own).exp() * sum(REWARDS[name]) for name, own in turn_logprobs(weights).items())
    return torch.autograd.grad(value, weights)[0]


def episodes_of(group):
    lengths = [len(REWARDS[name]) for name in group]
    turns = torch.tensor([reward for name in group for reward in REWARDS[name]], dtype=torch.float64)
    return EpisodeBatch(
        returns=torch.tensor([sum(REWARDS[name]) for name in group], dtype=torch.float64),
        group=torch.zeros(len(group), dtype=torch.int64),
        turn_reward=turns,
        turn_episode=torch.arange(len(group)).repeat_interleave(torch.tensor(lengths)),
        turn_state=torch.tensor([k for length in lengths for k in range(length)]),
        token_turn=torch.arange(len(turns)),
    )


def expected_gradient(estimate, weights, aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM):
    """Sum over groups of their probability times the gradient of the aggregated sum of A log pi."""
    total = torch.zeros(2, dtype=torch.float64)
    for group in itertools.product(REWARDS, repeat=MEMBERS):
        episodes, logprobs = episodes_of(group), turn_logprobs(weights)
        owner = episodes.token_episode
        owners = TokenOwners(sequence=owner, trajectory=owner, group=episodes.group[owner])
        share = token_weights(aggregation, owners)
        logp = torch.stack([own for name in group for own in logprobs[name]])
        (gradient,) = torch.autograd.grad((share * estimate(episodes) * logp).sum(), weights)
        chance = sum(sum(turn_logprobs(weights)[name]) for name in group).exp()
        total += float(chance.detach()) * gradient
    return total


def estimator(name):
    options = UNDISCOUNTED.get(name, {})
    if name == "maxrl":
        return lambda episodes: lookup(Kind.ADVANTAGE, name)(shifted(episodes))
    return lambda episodes: lookup(Kind.ADVANTAGE, name)(episodes, **options)


def shifted(episodes):
    """The same with 0.1 more for every episode, so that no return is negative."""
    episodes.returns.add_(0.1)
    return episodes


@pytest.mark.parametrize("name", sorted(UNBIASED))
def test_the_expectation_is_the_gradient(weights, name):
    found = expected_gradient(estimator(name), weights)
    torch.testing.assert_close(found, exact_gradient(weights), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(PROPORTIONAL))
def test_the_expectation_is_a_share_of_the_gradient(weights, name):
    found = expected_gradient(estimator(name), weights)
    torch.testing.assert_close(found, PROPORTIONAL[name] * exact_gradient(weights), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - UNBIASED - set(PROPORTIONAL)))
def test_the_expected_gradient_of_other_estimators_has_another_direction(weights, name):
    found = expected_gradient(estimator(name), weights)
    assert float(cosine_similarity(found, exact_gradient(weights), dim=0)) < 1 - 1e-9


def test_turns_compared_by_state_are_unbiased(weights):
    found = expected_gradient(lambda episodes: lookup(Kind.ADVANTAGE, "turn_rloo")(episodes, compare="state"), weights)
    torch.testing.assert_close(found, exact_gradient(weights), rtol=1e-12, atol=1e-12)


def test_a_mean_over_the_turns_that_includes_the_own_one_is_biased(weights):
    """`gigpo` without deviations and without its part of whole episodes: (m - 1) / m depends on the turn."""

    def own_turns(episodes):
        gigpo, dr_grpo = lookup(Kind.ADVANTAGE, "gigpo"), lookup(Kind.ADVANTAGE, "dr_grpo")
        return gigpo(episodes, gamma=1.0, normalize=False) - dr_grpo(episodes)

    exact = exact_gradient(weights)
    first, second = (expected_gradient(own_turns, weights) / exact).tolist()
    assert first == pytest.approx(2 / 3)
    assert second < 0.6


@pytest.mark.parametrize("aggregation", [Aggregation.TOKEN_MEAN, Aggregation.SEQ_MEAN_TOKEN_MEAN])
def test_means_over_tokens_are_biased(weights, aggregation):
    found = expected_gradient(estimator("turn_rloo"), weights, aggregation)
    assert float(cosine_similarity(found, exact_gradient(weights), dim=0)) < 1 - 1e-6
