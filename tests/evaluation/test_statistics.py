"""Intervals and pass@k against numbers computed by hand or by enumeration."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.evaluation.result import (
    bootstrap_mean,
    clustered_success,
    pass_at_k,
    pass_hat_k,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # z = 1.959964, z^2 = 3.841459. 8 of 10: centre (0.8 + 0.1920729) / 1.3841459 = 0.7167401,
        # half-width 1.959964 sqrt(0.016 + 0.0096036) / 1.3841459 = 0.2265776.
        (8, 10, 0.4901625, 0.9433178),
        # 0 of 10: high = (z^2 / 10) / (1 + z^2 / 10) = 0.3841459 / 1.3841459.
        (0, 10, 0.0, 0.2775328),
        # All of 134: low = 134 / (134 + z^2).
        (134, 134, 0.9721313, 1.0),
    ],
)
def test_wilson_interval_by_hand(successes: int, trials: int, low: float, high: float) -> None:
    estimate = wilson_interval(successes, trials)
    assert estimate.mean == successes / trials
    assert (estimate.low, estimate.high) == (pytest.approx(low, abs=2e-7), pytest.approx(high, abs=2e-7))


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_what_is_no_proportion(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="not a proportion"):
        wilson_interval(successes, trials)


@given(trials=st.integers(1, 500), data=st.data())
def test_wilson_contains_the_mean_and_mirrors(trials: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, trials))
    estimate = wilson_interval(successes, trials)
    mirrored = wilson_interval(trials - successes, trials)
    assert 0 <= estimate.low <= estimate.mean <= estimate.high <= 1
    assert mirrored.low == pytest.approx(1 - estimate.high, abs=2e-7)


def test_one_sample_per_task_is_plain_wilson() -> None:
    assert clustered_success([[True]] * 8 + [[False]] * 2) == wilson_interval(8, 10)


def test_samples_of_a_task_that_always_agree_count_once() -> None:
    # Task means are 0 or 1, so their variance is p(1-p) n/(n-1): 8 and 2 of 10 tasks give 0.16 * 10/9 / 10, and an
    # effective number of trials of 0.16 / 0.01777 = 9, raised to the number of tasks.
    estimate = clustered_success([[True] * 4] * 8 + [[False] * 4] * 2)
    assert estimate == wilson_interval(8, 10)


def test_equal_task_means_count_every_episode() -> None:
    assert clustered_success([[True, False]] * 10) == wilson_interval(10, 20)


def test_effective_trials_by_hand() -> None:
    # Means 1, .5, .5, 0: p = .5, variance of the means 1/6, over 4 tasks 1/24; .25 * 24 = 6 trials, 3 successes.
    estimate = clustered_success([[True, True], [True, False], [False, True], [False, False]])
    expected = wilson_interval(3, 6)
    assert (estimate.low, estimate.high) == (pytest.approx(expected.low), pytest.approx(expected.high))


def test_tasks_without_samples_are_left_out_and_nothing_at_all_is_an_error() -> None:
    assert clustered_success([[True], [], [False]]) == wilson_interval(1, 2)
    with pytest.raises(ValueError, match="no finished episode"):
        clustered_success([[]])


def test_unanimous_samples_do_not_shrink_the_interval_below_the_tasks() -> None:
    assert clustered_success([[True] * 8] * 5) == wilson_interval(5, 5)


@pytest.mark.parametrize("values", [[0.25] * 7, [3.0]])
def test_the_interval_of_equal_values_is_unknown(values: list[float]) -> None:
    estimate = bootstrap_mean(values)
    assert not estimate.is_bounded
    assert estimate.to_json() == {"mean": values[0], "low": None, "high": None}


def test_bootstrap_agrees_with_the_normal_interval_and_repeats() -> None:
    values = [float(i % 10) for i in range(400)]
    estimate = bootstrap_mean(values, seed=3)
    # Standard deviation of 0..9 is 2.8723; over sqrt(400) and times 1.96 it is 0.2815.
    assert estimate.mean == 4.5
    assert estimate.high - estimate.mean == pytest.approx(0.2815, rel=0.1)
    assert estimate.mean - estimate.low == pytest.approx(0.2815, rel=0.1)
    assert estimate == bootstrap_mean(values, seed=3)
    with pytest.raises(ValueError, match="nothing to estimate"):
        bootstrap_mean([])


@given(samples=st.integers(1, 7), data=st.data())
def test_pass_at_k_and_pass_hat_k_by_enumeration(samples: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    solved = [True] * successes + [False] * (samples - successes)
    picks = list(combinations(solved, k))
    assert pass_at_k(samples, successes, k) == pytest.approx(sum(map(any, picks)) / len(picks))
    assert pass_hat_k(samples, successes, k) == pytest.approx(sum(map(all, picks)) / len(picks))


@pytest.mark.parametrize(("samples", "successes", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 2)])
def test_k_outside_its_range_is_refused(samples: int, successes: int, k: int) -> None:
    for measure in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match="samples"):
            measure(samples, successes, k)
