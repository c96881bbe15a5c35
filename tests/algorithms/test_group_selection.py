"""Selection of groups and episodes: each rule against its source on tables of cases."""

import random

import pytest
import torch

from agentrl.algorithms.group_selection import (
    Compared,
    compared_by,
    group_spreads,
    in_band,
    resample_on_correct,
    top_p_groups,
)
from agentrl.algorithms.types import EpisodeBatch
from agentrl.config.config import AlgorithmConfig
from agentrl.registry import Kind, lookup
from agentrl.training.gradients import Objective


@pytest.mark.parametrize(
    ("low", "high", "rewards", "kept"),
    [
        (0.2, 0.8, [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]], [False, False, True, True]),
        (0.25, 0.75, [[1, 0, 0, 0], [1, 1, 1, 0]], [True, True]),  # PRIME's bounds belong to the band
        (0.01, 0.99, [[1] * 8, [1] * 7 + [0], [0] * 7 + [1], [0] * 8], [False, True, True, False]),  # ARES
    ],
)
def test_bands_of_accuracy(low, high, rewards, kept):
    means = torch.tensor([sum(group) / len(group) for group in rewards], dtype=torch.float64)
    assert in_band(means, low, high).tolist() == kept


def ragen_linear(scores, p):
    """RAGEN's rule: scores from the largest on, until they add up to p of the sum; without those of 0."""
    order = sorted((i for i in range(len(scores)) if scores[i] > 0), key=lambda i: -scores[i])
    goal, total, kept = p * sum(scores), 0.0, []
    for i in order:
        if total >= goal - 1e-9:
            break
        kept.append(i)
        total += scores[i]
    return sorted(kept)


@pytest.mark.parametrize(
    ("scores", "p", "kept"),
    [
        ([4.0, 3.0, 2.0, 1.0], 0.7, [0, 1]),
        ([4.0, 3.0, 2.0, 1.0], 0.71, [0, 1, 2]),
        ([1.0, 0.0, 0.0, 3.0], 1.0, [0, 3]),
        ([0.5] * 4, 0.5, [0, 1]),
        ([2.8284, 0.0, 0.5, 0.0], 0.75, [0]),
        ([0.0, 0.0], 0.9, []),
    ],
)
def test_top_p_by_hand(scores, p, kept):
    assert top_p_groups(torch.tensor(scores, dtype=torch.float64), p).nonzero()[:, 0].tolist() == kept
    assert ragen_linear(scores, p) == kept


def test_top_p_on_random_scores_equals_the_rule_of_its_source():
    generator = random.Random(4)
    for _ in range(200):
        scores = [generator.choice([0.0, generator.random(), generator.random() * 9]) for _ in range(12)]
        p = generator.uniform(0.05, 1.0)
        found = top_p_groups(torch.tensor(scores, dtype=torch.float64), p).nonzero()[:, 0].tolist()
        assert found == ragen_linear(scores, p)


def test_top_p_with_softmax_weighs_groups_by_exponentials():
    scores = torch.tensor([2.0, 1.0, 0.0, 1.5], dtype=torch.float64)
    shares = torch.softmax(scores[[0, 1, 3]], 0)  # 0.51, 0.19, 0.31
    assert top_p_groups(scores, float(shares[0]) - 0.01, scale="softmax").tolist() == [True, False, False, False]
    assert top_p_groups(scores, 0.6, scale="softmax").tolist() == [True, False, False, True]


def rstar(rewards, penalties, keep, least_wrong, least_right):
    """rStar2-Agent's choice within a group of more than `keep` episodes, as its release computes it."""
    n = len(rewards)
    wrong = [(i, penalties[i]) for i in range(n) if rewards[i] <= 0]
    right = sorted(((i, penalties[i]) for i in range(n) if rewards[i] > 0), key=lambda pair: pair[1])
    wrong_count, right_count = round(len(wrong) * keep / n), round(len(right) * keep / n)
    if wrong_count < least_wrong and right_count < least_right:
        return set(range(n))
    if wrong_count <= min(least_wrong, len(wrong)):
        wrong_count = min(least_wrong, len(wrong))
        right_count = keep - wrong_count
    if right_count <= min(least_right, len(right)):
        right_count = min(least_right, len(right))
        wrong_count = keep - right_count
    return {i for i, _ in right[:right_count]} | {i for i, _ in wrong[:wrong_count]}


@pytest.mark.parametrize(
    ("right", "penalty", "keep", "chosen"),
    [
        ([1, 1, 1, 1, 0, 0, 0, 0], [0.9, 0.1, 0.5, 0.2, 0, 0, 0, 0], 4, [1, 3, 4, 5]),
        ([1, 0, 0, 0, 0, 0, 0, 0], [0.9] * 8, 4, [0, 1, 2, 3]),  # the only right one stays
        ([1] * 7 + [0], [7, 6, 5, 4, 3, 2, 1, 0], 4, [4, 5, 6, 7]),
        ([1] * 8, [8, 7, 6, 5, 4, 3, 2, 1], 4, [4, 5, 6, 7]),
        ([0] * 8, [0] * 8, 4, [0, 1, 2, 3]),
        ([1, 0, 1], [0, 0, 0], 4, [0, 1, 2]),
    ],
)
def test_resampling_on_correct_by_hand(right, penalty, keep, chosen):
    found = resample_on_correct([bool(one) for one in right], penalty, keep=keep)
    assert found == chosen
    if len(right) > keep:
        assert set(found) == rstar(right, penalty, keep, 2, 2)


def test_resampling_on_correct_equals_its_source_on_random_groups():
    generator = random.Random(5)
    for _ in range(300):
        right = [generator.random() < generator.choice([0.1, 0.5, 0.9]) for _ in range(32)]
        penalty = [generator.choice([0.0, 0.25, 0.5, 1.0]) + generator.choice([0.0, 1.0]) for _ in range(32)]
        found = resample_on_correct(right, penalty, keep=16, least_right=2, least_wrong=2)
        assert set(found) == rstar([float(one) for one in right], penalty, 16, 2, 2)


@pytest.mark.parametrize(
    ("advantage", "compared"),
    [
        *[(name, Compared.RETURNS) for name in ("grpo", "rloo", "dr_grpo", "opo", "maxrl", "remax")],
        *[(name, Compared.TURNS) for name in ("gigpo", "hgpo", "turn_discounted", "gae", "reinforce")],
        ("gdpo", Compared.COMPONENTS),
    ],
)
def test_compared_rewards_depend_on_the_estimator(advantage, compared):
    objective = Objective(AlgorithmConfig(advantage=advantage))
    assert compared_by(lookup(Kind.ADVANTAGE, advantage), objective.estimate) is compared


def test_spreads_by_hand():
    episodes = EpisodeBatch(
        returns=torch.tensor([1.0, 1.0, 4.0, 0.0], dtype=torch.float64),
        group=torch.tensor([0, 0, 1, 1]),
        turn_reward=torch.tensor([1.0, 0.0, 0.0, 1.0, 4.0, 0.0, 0.0], dtype=torch.float64),
        turn_episode=torch.tensor([0, 0, 1, 1, 2, 3, 3]),
        turn_state=torch.arange(7),
        token_turn=torch.arange(7),
        components={"a": torch.tensor([1.0, 0.0, 2.0, 2.0]), "b": torch.tensor([0.0, 1.0, 2.0, -2.0])},
    )
    assert group_spreads(Compared.RETURNS, episodes).tolist() == pytest.approx([0, 8**0.5])
    assert group_spreads(Compared.TURNS, episodes).tolist() == pytest.approx([1, 8**0.5])
    assert group_spreads(Compared.COMPONENTS, episodes).tolist() == pytest.approx([1, 8**0.5])
    assert group_spreads(Compared.COMPONENTS, episodes, weights={"b": 0.0}).tolist() == pytest.approx([0.5**0.5, 0])
