"""Values and gradients of each policy loss, token by token, against plain Python."""

import dataclasses
import math

import pytest
import torch

from agentrl.algorithms.options import ClipRange, clip_range
from agentrl.algorithms.traits import advantage_weighted
from agentrl.algorithms.types import LossInput
from agentrl.errors import ConfigError
from agentrl.registry import Kind, lookup, names

# Two sequences of 3 and 2 tokens; ratios 1.5, 0.5, 1.1, 1.0, e^30 (clamped to e^20).
RATIOS = [1.5, 0.5, 1.1, 1.0, math.exp(30)]
OLD = [-2.0, -1.0, -0.5, -3.0, -31.0]
ADVANTAGES = [1.0, 1.0, -2.0, -1.0, -0.5]


def loss_input(ratios=RATIOS, advantages=ADVANTAGES):
    old = torch.tensor(OLD, dtype=torch.float64)
    logp = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    return LossInput(
        logp=logp,
        old_logp=old,
        behaviour_logp=old,
        advantage=torch.tensor(advantages, dtype=torch.float64),
        episode_return=torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5], dtype=torch.float64),
        sequence=torch.tensor([0, 0, 0, 1, 1]),
        sequences=2,
        turn=torch.tensor([0, 0, 1, 2, 2]),
    )


def run(name, tokens, **options):
    loss = lookup(Kind.LOSS, name)(tokens, **options)
    (gradient,) = torch.autograd.grad(loss.values.sum(), tokens.logp)
    return loss.values.tolist(), gradient.tolist(), loss.clipped.tolist()


def test_ppo():
    values, gradient, clipped = run("ppo", loss_input())
    # max(-1.5, -1.2); max(-0.5, -0.8); max(2.2, 2.2); 1.0; min(0.5 e^20, 0.5 * 3)
    assert values == pytest.approx([-1.2, -0.5, 2.2, 1.0, 1.5])
    assert gradient == pytest.approx([0.0, -0.5, 2.2, 1.0, 0.0])
    assert clipped == [True, False, False, False, True]


def test_ppo_without_dual_clip_clamps_the_log_ratio():
    values, gradient, _ = run("ppo", loss_input(), dual_clip=None)
    assert values[4] == pytest.approx(0.5 * math.exp(20))
    assert gradient[4] == 0.0


def test_ppo_clips_low_ratios_of_negative_advantages():
    values, gradient, clipped = run("ppo", loss_input([0.5] * 5, [-1.0] * 5))
    assert values == pytest.approx([0.8] * 5)
    assert gradient == [0.0] * 5
    assert clipped == [True] * 5


@pytest.mark.parametrize(("options", "expected"), [({"clip": 0.4}, -1.4), ({"clip_high": 0.3}, -1.3)])
def test_ppo_clip_options(options, expected):
    assert run("ppo", loss_input(), **options)[0][0] == pytest.approx(expected)


def test_dapo_is_ppo_with_a_higher_ceiling():
    assert run("dapo", loss_input()) == run("ppo", loss_input(), clip_low=0.2, clip_high=0.28)
    assert run("dapo", loss_input())[0][0] == pytest.approx(-1.28)


def test_gspo_uses_the_sequence_ratio_and_keeps_token_advantages():
    ratios = [1.0006, 0.9999, 1.0, 1.0001, 0.9995]
    values, gradient, clipped = run("gspo", loss_input(ratios))
    first = math.exp(sum(map(math.log, ratios[:3])) / 3)
    second = math.exp(sum(map(math.log, ratios[3:])) / 2)
    assert values == pytest.approx([-first, -first, 2 * first, second, 0.5 * second])
    assert gradient == pytest.approx(values), "each token's own, through sg(s) pi / sg(pi)"
    assert clipped == [False] * 5


def test_gspo_clips_whole_sequences():
    values, gradient, clipped = run("gspo", loss_input([1.01, 1.01, 1.01, 1.0, 1.0]))
    assert values == pytest.approx([-1.0004, -1.0004, 2.02, 1.0, 0.5])
    assert gradient == pytest.approx([0.0, 0.0, 2.02, 1.0, 0.5])
    assert clipped == [True, True, False, False, False]


def test_cispo_cap_is_one_plus_epsilon_and_keeps_the_gradient():
    values, gradient, clipped = run("cispo", loss_input(), clip_high=0.28)
    logps = [old + math.log(ratio) for old, ratio in zip(OLD, RATIOS, strict=True)]
    weights = [1.28, 0.5, 1.1, 1.0, 1.28]
    expected = [-w * a for w, a in zip(weights, ADVANTAGES, strict=True)]
    assert gradient == pytest.approx(expected)
    assert values == pytest.approx([e * logp for e, logp in zip(expected, logps, strict=True)])
    assert clipped == [True, False, False, False, True]


def test_cispo_bounds_weights_at_five():
    _, gradient, clipped = run("cispo", loss_input([4.9, 5.1, 0.01, 1.0, 1.0], [1.0] * 5))
    assert gradient[:3] == pytest.approx([-4.9, -5.0, -0.01])
    assert clipped == [False, True, False, False, False]


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_single_log_ratios_of_a_sequence_are_not_bounded_but_their_mean_is(name):
    """Of three tokens at -40, 25 and 15 the mean is 0; of two at 12 it is above 10."""
    tokens = loss_input([math.exp(-40), math.exp(25), math.exp(15), math.exp(12), math.exp(12)], [-1.0] * 5)
    options = {"clip_low": 100.0, "clip_high": 1e9}
    values, gradient, clipped = run(name, tokens, **options)
    assert values == pytest.approx([1.0] * 3 + [math.exp(10)] * 2, rel=1e-9)
    assert gradient == pytest.approx([1.0] * 3 + [0.0] * 2, rel=1e-9)
    assert clipped == [False] * 3 + [True] * 2


@pytest.mark.parametrize("name", ["dppo", "dppo_binary_kl"])
def test_dppo_caps_the_weight_of_a_rare_token(name):
    rare = loss_input([1.0, 1.0, 1.0, 1.0, 1.0], [1.0] * 5)
    rare = dataclasses.replace(
        rare,
        logp=torch.full((5,), -6.0, dtype=torch.float64).requires_grad_(),
        old_logp=torch.full((5,), -10.0, dtype=torch.float64),
        behaviour_logp=torch.full((5,), -6.0, dtype=torch.float64),
    )
    assert run(name, rare)[1:] == ([-20.0] * 5, [True] * 5)
    assert run(name, rare, cap=100.0)[1] == pytest.approx([-math.exp(4)] * 5)


def test_reinforce():
    values, gradient, _ = run("reinforce", loss_input())
    assert gradient == [-a for a in ADVANTAGES]
    assert values[0] == pytest.approx(-(OLD[0] + math.log(1.5)))


@pytest.mark.parametrize("name", names(Kind.LOSS))
def test_marked_losses_vanish_with_the_advantage(name):
    if advantage_weighted.of(lookup(Kind.LOSS, name)) and name not in ("luffy", "rl_plus"):
        values, gradient, _ = run(name, loss_input(advantages=[0.0] * 5))
        assert values == [0.0] * 5
        assert gradient == [0.0] * 5


@pytest.mark.parametrize("sides", [{"clip_low": 0.1}, {"clip_high": 0.3}, {"clip_low": 0.1, "clip_high": 0.3}])
def test_symmetric_and_asymmetric_clip_conflict(sides):
    with pytest.raises(ConfigError, match=r"clip=0\.2 and clip_(low|high)"):
        lookup(Kind.LOSS, "ppo")(loss_input(), clip=0.2, **sides)


def test_negative_clip():
    with pytest.raises(ConfigError, match=r"negative: got -0\.1"):
        clip_range(None, -0.1, 0.2, default=ClipRange(low=0.2, high=0.2))
