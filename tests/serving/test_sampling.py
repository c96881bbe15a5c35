import math

import numpy as np
import pytest
import torch

from agentrl.engine import SamplingParams
from agentrl.serving.local import sample, uniform

LOGITS = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))


def _tokens(params: SamplingParams, numbers: list[float]) -> list[int]:
    rows = LOGITS.repeat(len(numbers), 1)
    return sample(rows, [params] * len(numbers), np.array(numbers)).token_ids


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        ({}, [0, 0, 1, 2, 3]),
        ({"top_k": 2}, [0, 0, 0, 1, 1]),
        ({"top_p": 0.79}, [0, 0, 0, 1, 1]),
        ({"top_p": 0.81}, [0, 0, 1, 2, 2]),
        ({"min_p": 0.29}, [0, 0, 1, 2, 2]),
        ({"min_p": 0.31}, [0, 0, 0, 1, 1]),
        ({"top_p": 1e-9}, [0, 0, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.6}, [0, 0, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.7}, [0, 0, 0, 1, 1]),
        ({"temperature": 0.0}, [0, 0, 0, 0, 0]),
    ],
)
def test_the_inverse_of_the_cumulative_distribution_by_hand(params, tokens):
    # cumulative: 0.5 0.8 0.95 1.0; of the two likeliest: 0.625 1.0; of the three likeliest: 0.526 0.842 1.0
    assert _tokens(SamplingParams(**params), [0.0, 0.49, 0.6, 0.9, 1 - 2**-53]) == tokens


def test_tokens_as_likely_as_min_p_asks_stay():
    logits = torch.log(torch.tensor([[0.2, 0.4, 0.4]])).repeat(3, 1)
    assert sample(logits, [SamplingParams(min_p=1.0)] * 3, np.array([0.0, 0.49, 0.51])).token_ids == [1, 1, 2]


@pytest.mark.parametrize(("temperature", "at"), [(1.0, 1.0), (0.5, 0.5), (2.0, 2.0), (0.0, 1.0)])
@pytest.mark.parametrize("cut", [{}, {"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.9}])
@pytest.mark.capability("local", "cuts")
def test_logprobs_are_those_before_the_cut(temperature, at, cut):
    powers = [p ** (1 / at) for p in (0.5, 0.3, 0.15, 0.05)]
    sampled = sample(LOGITS, [SamplingParams(temperature=temperature, **cut)], np.array([0.1]))
    assert sampled.token_ids == [0]
    assert sampled.logprobs == pytest.approx([math.log(powers[0] / sum(powers))], rel=1e-5)


def test_rows_have_settings_of_their_own():
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=2), SamplingParams(temperature=9)]
    rows = sample(LOGITS.repeat(4, 1), params, np.full(4, 0.96))
    assert rows.token_ids == [0, 3, 1, 3]


def test_sampled_frequencies_follow_the_distribution():
    count = 20_000
    numbers = uniform([3] * count, list(range(count)))
    tokens = sample(LOGITS.repeat(count, 1), [SamplingParams()] * count, numbers).token_ids
    frequencies = np.bincount(tokens, minlength=4) / count
    assert frequencies == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.015)


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(torch.tensor([[0.0, float("nan")]]), [SamplingParams()], np.array([0.3]))


def test_numbers_depend_on_seed_and_counter_only():
    together = uniform([5, 6, 5, 2**63 + 5], [0, 0, 1, 0])
    assert [uniform([5], [0])[0], uniform([6], [0])[0], uniform([5], [1])[0]] == list(together[:3])
    assert together[3] == together[0]
    assert len(set(together[:3])) == 3
    assert ((together >= 0) & (together < 1)).all()


def test_numbers_are_uniform_along_seeds_and_counters():
    for numbers in (uniform([1] * 10_000, list(range(10_000))), uniform(list(range(10_000)), [0] * 10_000)):
        assert numbers.mean() == pytest.approx(0.5, abs=0.015)
        assert numbers.var() == pytest.approx(1 / 12, abs=0.003)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
