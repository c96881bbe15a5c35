"""Options are the keyword-only parameters of a function."""

import inspect

import pytest

from agentrl.algorithms.correction import ICEPOP_BAND, SEQUENCE_CAP, TOKEN_CAP
from agentrl.algorithms.options import check_options
from agentrl.algorithms.policy_losses import CISPO_CLIP, DAPO_CLIP, GMPO_CLIP, GSPO_CLIP, PPO_CLIP
from agentrl.algorithms.traits import (
    Input,
    advantage_weighted,
    compares_group,
    ignores_advantage,
    needed_inputs,
    other_input,
    weighs_behaviour,
)
from agentrl.config.algorithm import ReferenceConfig
from agentrl.errors import ConfigError
from agentrl.registry import Kind, lookup, names


def ppo():
    return lookup(Kind.LOSS, "ppo")


def test_known_options_pass_and_are_converted():
    # "3e-4" without a dot is text in YAML
    assert check_options(ppo(), {"clip_low": "3e-4", "dual_clip": None}) == {"clip_low": 3e-4, "dual_clip": None}


def test_dual_clip_below_one_is_rejected():
    with pytest.raises(ConfigError, match=r"ppo: dual_clip must bound ratios above 1: got 0\.9, expected at least 1"):
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
    with pytest.raises(ConfigError, match="option clip_low has the wrong type: got 'small'"):
        check_options(ppo(), {"clip_low": "small"})


@pytest.mark.parametrize(
    ("kind", "name", "options", "message"),
    [
        (Kind.ADVANTAGE, "gigpo", {"gamma": 1.5}, "gamma is out of range: got 1.5, expected less than or equal to 1"),
        (Kind.ADVANTAGE, "vapo", {"alpha": 0}, "alpha is out of range: got 0, expected greater than 0"),
        (Kind.ADVANTAGE, "hgpo", {"depth": -1}, "expected greater than or equal to 0"),
        (Kind.LOSS, "kl_cov", {"share": 2}, "share is out of range"),
        (Kind.LOSS, "m2po", {"tau": float("inf")}, "expected a finite number"),
        (Kind.LOSS, "m2po", {"tau": "low"}, "tau has the wrong type: got 'low', expected float"),
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


DUAL = {"dual_clip": 3.0}
BAND = {"share": 2e-4, "cov_low": 1.0, "cov_high": 5.0, "seed": 0}
DEFAULTS = {
    (Kind.ADVANTAGE, "tree"): {"normalize": False},
    (Kind.LOSS, "ppo"): DUAL,
    (Kind.LOSS, "dapo"): DUAL,
    (Kind.LOSS, "sapo"): {"tau_positive": 1.0, "tau_negative": 1.05},
    (Kind.LOSS, "decoupled_ppo"): {**DUAL, "cap": 5.0},
    (Kind.LOSS, "vapo"): {**DUAL, "positive_weight": 0.1},
    (Kind.LOSS, "kl_cov"): {"share": 2e-4, "coef": 1.0},
    (Kind.LOSS, "clip_cov"): {**DUAL, **BAND},
    (Kind.LOSS, "dppo"): {"delta_low": 0.15, "delta_high": 0.15, "cap": 20.0},
    (Kind.LOSS, "dppo_binary_kl"): {"delta_low": 0.05, "delta_high": 0.05, "cap": 20.0},
    (Kind.LOSS, "m2po"): {"tau": 0.04},
    (Kind.LOSS, "kimi"): {"tau": 0.1},
    (Kind.LOSS, "luffy"): {**DUAL, "shaping": 0.1},
    (Kind.LOSS, "ppo_turn"): DUAL,
    (Kind.LOSS, "vespo"): {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0},
    (Kind.LOSS, "rl_plus"): {**DUAL, "exploration": 0.5},
    (Kind.LOSS, "pacs"): {"beta": 1.0},
    (Kind.LOSS, "gvpo"): {"beta": 0.1},
    (Kind.LOSS, "flowrl"): {"beta": 15.0},
    (Kind.FILTER, "off_policy_sequence"): {"delta": 1e-4},
    (Kind.LOSS, "sppo"): {"eta": 1.0},
    (Kind.LOSS, "dpo"): {"beta": 0.1},
    (Kind.LOSS, "spin"): {"beta": 0.1},
    (Kind.LOSS, "dqo"): {"beta": 0.03},
    (Kind.LOSS, "online_dpo"): {"beta": 0.1},
    (Kind.LOSS, "online_spin"): {"beta": 0.1},
    (Kind.LOSS, "prime"): {"beta": 0.05},
    (Kind.LOSS, "value"): {"clip": 0.5},
    (Kind.FILTER, "k1"): {"of": "token"},
    (Kind.FILTER, "k2"): {"of": "token"},
    (Kind.FILTER, "k3"): {"of": "token"},
    (Kind.FILTER, "geometric"): {"band": (0.99, 1.01)},
    (Kind.FILTER, "top_entropy"): {"share": 0.2},
    (Kind.ADVANTAGE, "reinforce"): {"gamma": 1.0},
    (Kind.ADVANTAGE, "reinforce++"): {"gamma": 1.0},
    (Kind.ADVANTAGE, "prime"): {"gamma": 1.0},
    (Kind.ADVANTAGE, "gigpo"): {"omega": 1.0, "gamma": 0.95, "normalize": True},
    (Kind.ADVANTAGE, "hgpo"): {"depth": 2, "alpha": 1.0, "gamma": 0.95, "normalize": True},
    (Kind.ADVANTAGE, "graphgpo"): {"omega": 1.0, "gamma": 0.1, "above": 0.0, "normalize": True},
    (Kind.ADVANTAGE, "otb"): {"zero_tail": True},
    (Kind.ADVANTAGE, "rae"): {"decay": 0.95, "per": "role"},
    (Kind.ADVANTAGE, "trr++"): {"gamma": 1.0},
    (Kind.ADVANTAGE, "spo"): {"rho": 0.875},
    (Kind.ADVANTAGE, "turn_rloo"): {"gamma": 1.0, "compare": "turn_index"},
    (Kind.ADVANTAGE, "turn_discounted"): {"gamma": 0.95, "normalize_over": "turn_index"},
    (Kind.ADVANTAGE, "gae"): {"gamma": 1.0, "gae_lambda": 0.95},
    (Kind.ADVANTAGE, "gae_turn"): {"gamma_turn": 1.0, "lambda_turn": 0.95},
    (Kind.ADVANTAGE, "bi_level"): {"gamma": 1.0, "gae_lambda": 0.95, "gamma_turn": 1.0, "lambda_turn": 0.95},
    (Kind.ADVANTAGE, "vapo"): {"gamma": 1.0, "alpha": 0.05},
    (Kind.ADVANTAGE, "dqo"): {"gamma": 1.0, "gae_lambda": 1.0},
}
"""Defaults that a config does not show, as in docs/algorithms.md and the papers; others are None or needed."""


@pytest.mark.parametrize("kind", [Kind.ADVANTAGE, Kind.LOSS, Kind.FILTER])
def test_defaults_equal_the_papers(kind):
    for name in names(kind):
        parameters = inspect.signature(lookup(kind, name)).parameters.values()
        own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
        assert {key: value for key, value in own.items() if value is not None} == DEFAULTS.get((kind, name), {}), name


def test_other_defaults_equal_the_papers():
    assert inspect.signature(lookup(Kind.SHAPING, "pf_ppo")).parameters["power"].default == 2.0
    choice = inspect.signature(lookup(Kind.LOSS, "clip_cov").choice.choose).parameters
    assert {name: choice[name].default for name in (*DUAL, *BAND)} == {**DUAL, **BAND}
    assert inspect.signature(lookup(Kind.LOSS, "kl_cov").choice.choose).parameters["share"].default == 2e-4
    assert inspect.signature(lookup(Kind.LOSS, "m2po").choice.choose).parameters["tau"].default == 0.04
    sides = {(c.low, c.high) for c in (PPO_CLIP, DAPO_CLIP, GSPO_CLIP, CISPO_CLIP, GMPO_CLIP)}
    assert sides == {(0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4), (1.0, 4.0), (0.4, 0.4)}
    assert (TOKEN_CAP, SEQUENCE_CAP, ICEPOP_BAND) == (2.0, 5.0, (0.5, 5.0))
    assert ReferenceConfig().kl_estimator == "k3+"


def marked(kind, mark):
    return {name for name in names(kind) if mark(lookup(kind, name))}


def test_traits_of_each_function():
    alone = {"prpo", "rae", "spo", "reinforce", "reinforce++", "trr++", "remax", "gae", "gae_turn", "bi_level", "vapo"}
    alone |= {"dqo"}
    assert marked(Kind.ADVANTAGE, compares_group.of) == set(names(Kind.ADVANTAGE)) - alone
    assert marked(Kind.LOSS, weighs_behaviour.of) == {"decoupled_ppo", "vespo"}
    pairs = {"online_dpo", "online_spin"}
    blind = {"distill", "distill_top_k", "gvpo", "pacs", "sft", "sppo"}
    assert marked(Kind.LOSS, ignores_advantage.of) == blind | pairs
    assert marked(Kind.LOSS, other_input) == {"dpo", "spin", "prime", "value"}
    moves = {"distill", "distill_top_k", "sft", "sppo", "dpo", "spin", "prime", "value", "kimi", "kl_cov", "vapo"}
    moves |= {"dqo", "flowrl", "gvpo", "pacs"} | pairs
    assert marked(Kind.LOSS, advantage_weighted.of) == set(names(Kind.LOSS)) - moves
    needed = {
        (kind, name): needed_inputs(lookup(kind, name))
        for kind in (Kind.ADVANTAGE, Kind.LOSS, Kind.FILTER)
        for name in names(kind)
        if needed_inputs(lookup(kind, name))
    }
    assert needed == {
        (Kind.ADVANTAGE, "gdpo"): {Input.COMPONENTS},
        (Kind.ADVANTAGE, "otb"): {Input.SCORE_NORM},
        **{(Kind.ADVANTAGE, name): {Input.BASELINE} for name in ("rae", "spo")},
        (Kind.ADVANTAGE, "prime"): {Input.PROCESS_REWARD},
        (Kind.ADVANTAGE, "trr++"): {Input.ROLE_KIND},
        (Kind.ADVANTAGE, "remax"): {Input.GREEDY_RETURN},
        **{(Kind.ADVANTAGE, name): {Input.VALUES} for name in ("gae", "gae_turn", "bi_level", "vapo", "dqo")},
        (Kind.LOSS, "distill"): {Input.TEACHER},
        (Kind.LOSS, "distill_top_k"): {Input.TEACHER_TOP},
        (Kind.LOSS, "luffy"): {Input.EXPERT},
        (Kind.LOSS, "rl_plus"): {Input.EXPERT},
        (Kind.LOSS, "flowrl"): {Input.REFERENCE},
        (Kind.LOSS, "sppo"): {Input.REFERENCE},
        (Kind.LOSS, "online_dpo"): {Input.REFERENCE},
        (Kind.LOSS, "online_spin"): {Input.REFERENCE, Input.EXPERT},
        (Kind.FILTER, "top_entropy"): {Input.ENTROPY},
    }
