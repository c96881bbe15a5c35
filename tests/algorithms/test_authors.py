"""Values that the authors' code gives for random inputs.

`authors.json` holds inputs, and the values that the code at ``source`` (repository@commit, path) computed from them.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from agentrl.algorithms.aggregation import Aggregation, TokenOwners, token_weights
from agentrl.algorithms.correction import CorrectionMode, correction
from agentrl.algorithms.segments import differs
from agentrl.algorithms.types import EpisodeBatch, LossInput
from agentrl.registry import Kind, lookup

AUTHORS = json.loads((Path(__file__).parent / "authors.json").read_text())


def cases(name):
    return pytest.mark.parametrize("case", AUTHORS[name]["cases"], ids=str)


def numbers(values):
    return torch.tensor(values, dtype=torch.float64)


def assert_equal(found, expected, tolerance=2e-6):
    torch.testing.assert_close(found.detach().double(), numbers(expected), rtol=tolerance, atol=tolerance)


def episodes_of(case):
    """Episodes with one token per turn, all of whose reward comes at the end."""
    states = [f"{group} {state}" for group, own in zip(case["group"], case["states"], strict=True) for state in own]
    known = list(dict.fromkeys(states))
    lengths = torch.tensor([len(own) for own in case["states"]])
    turn_reward = torch.zeros(len(states), dtype=torch.float64)
    turn_reward[lengths.cumsum(0) - 1] = numbers(case["rewards"])
    return EpisodeBatch(
        returns=numbers(case["rewards"]),
        group=torch.tensor(case["group"]),
        turn_reward=turn_reward,
        turn_episode=torch.arange(len(lengths)).repeat_interleave(lengths),
        turn_state=torch.tensor([known.index(state) for state in states]),
        token_turn=torch.arange(len(states)),
    )


def tokens_of(case):
    """One sequence per row; the engine's log-probabilities are pi_old's."""
    lengths = torch.tensor([len(row) for row in case["logp"]])
    row = torch.arange(len(lengths)).repeat_interleave(lengths)

    def column(name, default=0.0):
        rows = case.get(name, [[default] * int(length) for length in lengths])
        return numbers([value for own in rows for value in own])

    return LossInput(
        logp=column("logp").requires_grad_(),
        old_logp=column("old_logp"),
        behaviour_logp=column("old_logp"),
        advantage=column("advantage"),
        reference_logp=column("reference_logp"),
        episode_return=numbers(case["rewards"])[row],
        sequence=row,
        sequences=len(lengths),
        turn=column("turns").long() + 100 * row,
        episode=row,
        group=row // case["members"],
        expert=torch.tensor(case.get("expert", [False] * len(lengths)))[row],
    )


LOSSES = {
    "pacs": ("seq-mean-token-sum", ("beta",), {}),
    "gvpo": ("seq-mean-token-sum", ("beta",), {}),
    "flowrl": ("seq-mean-token-sum", ("beta",), {}),
    "online_dpo": ("seq-mean-token-sum", ("beta",), {}),
    "luspo": ("seq-mean-token-sum", (), {"clip_low": 3e-3, "clip_high": 4e-3}),
    "vespo": ("token-mean", (), {}),
    "ppo_turn": ("token-mean", (), {"dual_clip": None}),
    "rl_plus": ("token-mean", (), {"clip": 1e9, "dual_clip": None}),
}
"""Aggregation, options that are in the cases, and others. The authors of gvpo sum over 2 groups; a mean is half of it.
"""


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in LOSSES for case in AUTHORS[name]["cases"]])
def test_losses_and_gradients(name, case):
    aggregation, given, options = LOSSES[name]
    tokens = tokens_of(case)
    options = {**options, **{option: case[option] for option in given}}
    owners = TokenOwners(sequence=tokens.sequence, trajectory=tokens.episode, group=tokens.group)
    share = token_weights(Aggregation(aggregation), owners)
    loss = (share * lookup(Kind.LOSS, name)(tokens, **options).values).sum() * (2 if name == "gvpo" else 1)
    (gradient,) = torch.autograd.grad(loss, tokens.logp)
    assert float(loss.detach()) == pytest.approx(case["loss"], rel=1e-5, abs=1e-6)
    assert_equal(gradient, [value for row in case["gradient"] for value in row], 1e-5)


@pytest.mark.parametrize("peer", ["trl", "slime"])
def test_off_policy_sequences(peer):
    for case in AUTHORS[f"off_policy_sequence_{peer}"]["cases"]:
        tokens = tokens_of(case)
        kept = lookup(Kind.FILTER, "off_policy_sequence")(tokens, delta=case["delta"])
        assert kept.tolist() == [case["kept"][row] for row in tokens.sequence.tolist()]
        assert len(set(case["kept"])) == 2


@cases("otb")
def test_optimal_token_baselines(case):
    """In a group with equal returns, ours are 0; the authors' need not be."""
    lengths = torch.tensor([len(row) for row in case["logp"]])
    row = torch.arange(len(lengths)).repeat_interleave(lengths)
    logp, squares, reward, expected = (
        numbers([value for own in case[name] for value in own])
        for name in ("logp", "sum_squares", "token_reward", "advantages")
    )
    returns = torch.zeros(len(lengths), dtype=torch.float64).index_add(0, row, reward)
    episodes = EpisodeBatch(
        returns=returns,
        group=torch.tensor(case["group"]),
        turn_reward=returns,
        turn_episode=torch.arange(len(lengths)),
        turn_state=torch.arange(len(lengths)),
        token_turn=row,
        token_reward=reward,
        score_norm=1 - 2 * logp.exp() + squares,
    )
    unequal = differs(returns, episodes.group, 2)[episodes.group[row]]
    assert_equal(lookup(Kind.ADVANTAGE, "otb")(episodes), torch.where(unequal, expected, 0.0).tolist(), 1e-5)
    assert bool(unequal.any())


@cases("prpo")
def test_prpo(case):
    assert_equal(lookup(Kind.ADVANTAGE, "prpo")(episodes_of(case)), case["advantages"], 1e-5)


@cases("graphgpo")
@pytest.mark.parametrize(("mode", "normalize"), [("mean_std_norm", True), ("mean_norm", False)])
def test_graphgpo(case, mode, normalize):
    """The part of single turns; that of whole episodes is ours, with each episode counted once, not once per turn."""
    graphgpo, whole = lookup(Kind.ADVANTAGE, "graphgpo"), "grpo" if normalize else "dr_grpo"
    episodes = episodes_of(case)
    found = graphgpo(episodes, normalize=normalize) - lookup(Kind.ADVANTAGE, whole)(episodes)
    assert_equal(found, case["advantages"][mode], 1e-5)


def test_seq_mask_tis_is_a_filter_and_a_correction():
    """NeMo RL: raw token weights in sequences whose geometric mean is in the band, 0 elsewhere."""
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(60, generator=generator, dtype=torch.float64)
    mu, sequence = old - torch.randn(60, generator=generator, dtype=torch.float64) * 0.5, torch.arange(60) // 5
    case = {"logp": [[0.0] * 5] * 12, "rewards": [0.0] * 12, "members": 12}
    tokens = dataclasses.replace(tokens_of(case), old_logp=old, behaviour_logp=mu, sequence=sequence, sequences=12)
    kept = lookup(Kind.FILTER, "geometric")(tokens, band=(0.9, 1.1))
    weights = correction(CorrectionMode.TOKEN, old, mu, sequence, cap=1e9).weights
    rho = (old - mu).exp().reshape(12, 5)
    mean = (old - mu).reshape(12, 5).mean(1).exp()
    expected = torch.where(((mean >= 0.9) & (mean <= 1.1))[:, None], rho, 0.0)
    torch.testing.assert_close(torch.where(kept, weights, 0.0), expected.flatten())
    assert 0 < int(kept.sum()) < 60


@cases("ares")
def test_ares(case):
    """The number of passages is given; see tests/training/test_window_entropy.py for the passages themselves."""
    shaping = lookup(Kind.SHAPING, "ares")()
    found = shaping.rewards(numbers(case["counts"]), torch.tensor(case["right"]), torch.tensor(case["group"]))
    assert_equal(found, case["rewards"], 1e-6)
