"""Train/inference correction: weights, dropped tokens and metrics."""

import math

import pytest
import torch

from agentrl.algorithms.correction import CorrectionMode, correction, mismatch

RHO = [1.5, 4.0, 0.25, 0.8, 2.0]
BEHAVIOUR = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.0], dtype=torch.float64)
OLD = BEHAVIOUR + torch.tensor(RHO, dtype=torch.float64).log()
SEQUENCE = torch.tensor([0, 0, 0, 1, 1])


def correct(mode, **options):
    return correction(CorrectionMode(mode), OLD, BEHAVIOUR, SEQUENCE, **options)


def test_token_weights_are_truncated_at_two():
    found = correct("token")
    assert found.weights.tolist() == pytest.approx([1.5, 2.0, 0.25, 0.8, 2.0])
    assert found.truncated.tolist()[:4] == [False, True, False, False]
    assert found.kept.all()
    assert correct("token", cap=1.0).weights.tolist() == pytest.approx([1.0, 1.0, 0.25, 0.8, 1.0])


def test_sequence_weights_are_the_truncated_product():
    assert correct("sequence").weights.tolist() == pytest.approx([1.5] * 3 + [1.6] * 2)
    assert correct("sequence", cap=1.55).weights.tolist() == pytest.approx([1.5] * 3 + [1.55] * 2)


def test_sequence_product_is_clamped():
    old = torch.zeros(40)
    found = correction(CorrectionMode.SEQUENCE, old, old - 19, torch.zeros(40, dtype=torch.long))
    assert found.weights.tolist() == [5.0] * 40
    found = correction(CorrectionMode.SEQUENCE, old, old + 19, torch.zeros(40, dtype=torch.long))
    assert found.weights.tolist() == pytest.approx([math.exp(-20)] * 40)


def test_single_log_ratios_of_a_product_are_not_bounded():
    old = torch.tensor([-41.0, -1.0], dtype=torch.float64)
    found = correction(
        CorrectionMode.SEQUENCE, old, old - torch.tensor([-40.0, 24.9]), torch.zeros(2, dtype=torch.long)
    )
    assert found.weights.tolist() == pytest.approx([math.exp(-15.1)] * 2)


def test_icepop_drops_single_tokens_not_sequences():
    found = correction(CorrectionMode.ICEPOP, OLD, BEHAVIOUR, SEQUENCE, band=(0.5, 3.0))
    assert found.kept.tolist() == [True, False, False, True, True]
    assert found.weights.tolist() == pytest.approx([1.5, 0.0, 0.0, 0.8, 2.0])
    assert found.truncated.tolist() == [False, True, True, False, False]
    assert correct("icepop").kept.tolist()[:4] == [True, True, False, True]
    assert correct("icepop", band=(0.0, 1.9)).kept.tolist()[:4] == [True, False, True, True]


def test_off():
    found = correct("off")
    assert found.weights.tolist() == [1.0] * 5
    assert found.kept.all()
    assert not found.truncated.any()


@pytest.mark.parametrize("mode", [mode.value for mode in CorrectionMode])
def test_weights_carry_no_gradient(mode):
    old = OLD.clone().requires_grad_()
    assert not correction(CorrectionMode(mode), old, BEHAVIOUR, SEQUENCE).weights.requires_grad


def test_mismatch_by_hand():
    found = mismatch(torch.tensor([0.5, 0.2]).log(), torch.tensor([0.25, 0.4]).log())
    assert found.prob_abs_mean == pytest.approx((0.25 + 0.2) / 2)
    assert found.prob_abs_max == pytest.approx(0.25)
    assert found.k3 == pytest.approx(((2 - math.log(2) - 1) + (0.5 - math.log(0.5) - 1)) / 2)
    assert found.effective_sample_size == pytest.approx(2.5**2 / (2 * 4.25))


def test_equal_log_probabilities_do_not_differ():
    found = mismatch(OLD, OLD)
    assert (found.prob_abs_mean, found.prob_abs_max, found.k3, found.effective_sample_size) == (0.0, 0.0, 0.0, 1.0)
