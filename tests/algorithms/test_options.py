"""Options are the keyword-only parameters of a function."""

import pytest

from agentrl.algorithms.options import check_options
from agentrl.errors import ConfigError
from agentrl.registry import Kind, lookup


def ppo():
    return lookup(Kind.LOSS, "ppo")


def test_known_options_pass_and_are_converted():
    # "3e-4" without a dot is text in YAML
    assert check_options(ppo(), {"clip_low": "3e-4", "dual_clip": None}) == {"clip_low": 3e-4, "dual_clip": None}


def test_a_dual_clip_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"ppo: dual_clip bounds ratios above 1: got 0\.9, expected at least 1"):
        check_options(ppo(), {"dual_clip": 0.9})


def test_unknown_option_names_the_nearest():
    with pytest.raises(ConfigError, match=r"ppo does not take this option: got 'clip_hgih'.*Did you mean 'clip_high'"):
        check_options(ppo(), {"clip_hgih": 0.3})


def test_function_without_options():
    with pytest.raises(ConfigError, match="expected no options"):
        check_options(lookup(Kind.ADVANTAGE, "grpo"), {"gamma": 1.0})


def test_positional_parameters_are_no_options():
    with pytest.raises(ConfigError, match="tokens"):
        check_options(ppo(), {"tokens": 1})


def test_wrong_type():
    with pytest.raises(ConfigError, match="option clip_low is of a wrong type: got 'small'"):
        check_options(ppo(), {"clip_low": "small"})


@pytest.mark.parametrize(
    ("kind", "name", "options", "message"),
    [
        (Kind.ADVANTAGE, "gigpo", {"gamma": 1.5}, "gamma is out of range: got 1.5, expected less than or equal to 1"),
        (Kind.ADVANTAGE, "vapo", {"alpha": 0}, "alpha is out of range: got 0, expected greater than 0"),
        (Kind.ADVANTAGE, "hgpo", {"depth": -1}, "expected greater than or equal to 0"),
        (Kind.LOSS, "kl_cov", {"share": 2}, "share is out of range"),
        (Kind.LOSS, "m2po", {"tau": float("inf")}, "expected a finite number"),
        (Kind.LOSS, "m2po", {"tau": "low"}, "tau is of a wrong type: got 'low', expected float"),
        (Kind.FILTER, "k3", {"limit": -0.1}, "limit is out of range"),
        (Kind.SHAPING, "pf_ppo", {"power": 0}, "power is out of range"),
    ],
)
def test_options_out_of_range(kind, name, options, message):
    with pytest.raises(ConfigError) as caught:
        check_options(lookup(kind, name), options)
    assert message in str(caught.value)


def test_missing_option_of_a_users_function():
    def estimator(episodes, *, alpha: float, beta=1):
        raise NotImplementedError

    with pytest.raises(ConfigError, match="estimator needs the option alpha"):
        check_options(estimator, {"beta": object()})
    assert check_options(estimator, {"alpha": 1}) == {"alpha": 1.0}


def test_conflicting_clips():
    with pytest.raises(ConfigError, match="symmetric and an asymmetric"):
        check_options(ppo(), {"clip": 0.2, "clip_high": 0.28})
