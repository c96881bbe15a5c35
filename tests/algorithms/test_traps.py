"""Common mistakes in these formulas, one test each."""

import dataclasses

import pytest
import torch

from agentrl.algorithms.group_differences import groups_with_advantages, groups_with_different_rewards
from agentrl.algorithms.options import check_options, clip_range
from agentrl.algorithms.policy_losses import PPO_CLIP
from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.algorithms.types import EpisodeBatch, Estimate, LossInput
from agentrl.errors import ConfigError, TrainingError
from agentrl.registry import Kind, lookup, names
from agentrl.reward import MIN_DIFFERENCE, rewards_differ


def loss_input(distances, advantages, *, sequence=None, mu=0.0):
    d = torch.tensor(distances, dtype=torch.float64)
    old = torch.full_like(d, -2.0)
    return LossInput(
        logp=(old + d).requires_grad_(),
        old_logp=old,
        behaviour_logp=old - mu,
        advantage=torch.tensor(advantages, dtype=torch.float64),
        episode_return=torch.ones_like(d),
        sequence=torch.zeros(d.numel(), dtype=torch.int64) if sequence is None else torch.tensor(sequence),
        sequences=1 if sequence is None else max(sequence) + 1,
    )


def gradient(name, tokens, weights=None, **options):
    loss = lookup(Kind.LOSS, name)(tokens, **options)
    total = loss.values if weights is None else loss.values * weights
    return torch.autograd.grad(total.sum(), tokens.logp)[0]


def episodes(**parts):
    """Two episodes of group 0 and two of group 1, each of two turns of one token."""
    defaults = {
        "returns": torch.tensor([1.0, 0.0, 3.0, 2.0], dtype=torch.float64),
        "group": torch.tensor([0, 0, 1, 1]),
        "turn_reward": torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 3.0, 0.0, 2.0], dtype=torch.float64),
        "turn_episode": torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
        "turn_state": torch.tensor([0, 1, 0, 2, 3, 4, 3, 5]),
        "token_turn": torch.arange(8),
    }
    return EpisodeBatch(**{**defaults, **parts})


def test_token_rewards_add_to_their_turns_and_episodes():
    before = EpisodeBatch(
        returns=torch.tensor([1.0, 2.0]),
        group=torch.tensor([0, 0]),
        turn_reward=torch.tensor([0.0, 1.0, 2.0]),
        turn_episode=torch.tensor([0, 0, 1]),
        turn_state=torch.tensor([0, 1, 0]),
        token_turn=torch.tensor([0, 0, 1, 2]),
    )
    after = before.with_token_reward(torch.tensor([-0.25, -0.5, 0.5, -1.0]))
    assert after.turn_reward.tolist() == [-0.75, 1.5, 1.0]
    assert after.returns.tolist() == [0.75, 1.0]
    assert after.token_rewards().tolist() == [-0.25, -0.5, 1.5, 1.0]
    twice = after.with_token_reward(torch.tensor([0.25, 0.5, -0.5, 1.0]))
    assert (twice.turn_reward.tolist(), twice.returns.tolist()) == ([0.0, 1.0, 2.0], [1.0, 2.0])
    assert twice.token_rewards().tolist() == before.token_rewards().tolist()


def test_symmetric_and_asymmetric_clips_conflict_even_if_equal():
    with pytest.raises(ConfigError, match="symmetric and an asymmetric clip"):
        clip_range(0.2, 0.2, None, default=PPO_CLIP)
    for name in ("ppo", "decoupled_ppo", "clip_cov", "luffy"):
        with pytest.raises(ConfigError, match="symmetric and an asymmetric clip"):
            check_options(lookup(Kind.LOSS, name), {"clip": 0.2, "clip_high": 0.28})


def test_the_behaviour_weight_of_decoupled_ppo_is_always_applied():
    tokens = loss_input([0.1, -0.1], [1.0, -1.0], mu=0.5)
    plain, weighted = gradient("ppo", tokens), gradient("decoupled_ppo", tokens)
    assert (weighted / plain).tolist() == pytest.approx([torch.tensor(0.5).exp().item()] * 2)
    capped = gradient("decoupled_ppo", loss_input([0.1], [1.0], mu=9.0), cap=3.0)
    assert capped.item() == pytest.approx(3 * plain[0].item())


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_sequence_losses_keep_the_credit_of_turns(name):
    """Opposite advantages of two turns in one sequence do not cancel, and change signs token by token."""
    found = gradient(name, loss_input([0.0] * 4, [1.0, 1.0, -1.0, -1.0]))
    assert found.tolist() == pytest.approx([-1.0, -1.0, 1.0, 1.0])


def test_the_cap_of_cispo_is_one_plus_epsilon():
    found = gradient("cispo", loss_input([1.0], [1.0]), clip_high=0.28)
    assert found.item() == pytest.approx(-1.28)


def test_a_ratio_of_a_sequence_is_clamped():
    tokens = loss_input([19.0] * 50, [1.0] * 50)
    assert lookup(Kind.LOSS, "gspo")(tokens).values.isfinite().all()
    assert lookup(Kind.LOSS, "gmpo")(tokens).values.isfinite().all()


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_a_filter_of_tokens_drops_single_tokens_and_one_of_sequences_all(name):
    tokens = dataclasses.replace(loss_input([0.0] * 4, [1.0] * 4, sequence=[0, 0, 1, 1]))
    far = tokens.old_logp - torch.tensor([0.0, 2.0, 0.0, 0.0], dtype=torch.float64)
    tokens = dataclasses.replace(tokens, behaviour_logp=far)
    keep = lookup(Kind.FILTER, name)
    assert keep(tokens, limit=0.4).tolist() == [True, False, True, True]
    assert keep(tokens, limit=0.4, of="sequence").tolist() == [False, False, True, True]


def test_step_groups_are_of_one_task_and_of_one_state_not_of_a_step_number():
    """All episodes take their first turn in a state of their task; the second in one that nobody shares."""
    gigpo, hgpo = lookup(Kind.ADVANTAGE, "gigpo"), lookup(Kind.ADVANTAGE, "hgpo")
    for estimate in (gigpo, hgpo):
        step = estimate(episodes(), normalize=False, gamma=1.0, omega=1e6) / 1e6
        shared = [0.5, -0.5, 0.5, -0.5]
        assert step[::2].tolist() == pytest.approx(shared, abs=1e-5)
        assert step[1::2].tolist() == pytest.approx([0.0] * 4, abs=1e-5)


def test_hgpo_weighs_a_common_past():
    """All four reach state 9, with returns 1, 0, 3 and 2; two and two have a common start. Weights are 2/5 and 3/5."""
    group = torch.zeros(4, dtype=torch.int64)
    batch = episodes(group=group, turn_state=torch.tensor([0, 9, 0, 9, 1, 9, 1, 9]))
    hgpo, options = lookup(Kind.ADVANTAGE, "hgpo"), {"depth": 1, "normalize": False, "gamma": 1.0}
    assert hgpo(batch, **options)[1::2].tolist() == pytest.approx([0.1, -0.9, 0.9, -0.1])
    assert hgpo(batch, alpha=0.0, **options)[1::2].tolist() == pytest.approx([0.0, -1.0, 1.0, 0.0])
    assert hgpo(batch, **options)[::2].tolist() == pytest.approx([0.5, -0.5, 0.5, -0.5]), "no past: depth 0 alone"
    whole = lookup(Kind.ADVANTAGE, "dr_grpo")(batch)
    assert torch.equal(hgpo(batch, omega=2.0, **options), whole + 2 * hgpo(batch, **options))


def test_hgpo_is_not_diluted_by_depths_without_peers():
    """Two reach state 9 from different states: only the state itself compares them."""
    batch = episodes(turn_state=torch.tensor([0, 9, 1, 9, 3, 4, 3, 5]))
    found = lookup(Kind.ADVANTAGE, "hgpo")(batch, normalize=False, gamma=1.0)
    assert found.tolist() == pytest.approx([0.0, 0.5, 0.0, -0.5, 0.5, 0.0, -0.5, 0.0])


def test_hgpo_divides_by_the_deviation_of_all_members():
    """Returns 1 and 0 are one population deviation of 1/2 from their mean."""
    batch = episodes(turn_state=torch.tensor([0, 9, 1, 9, 3, 4, 3, 5]))
    found = lookup(Kind.ADVANTAGE, "hgpo")(batch, gamma=1.0)
    assert found[[1, 3]].tolist() == pytest.approx([1.0, -1.0], abs=1e-5)


def advantage_of(name, batch, **options):
    found = lookup(Kind.ADVANTAGE, name)(batch, **options)
    return found if isinstance(found, Estimate) else Estimate(advantage=found)


@pytest.mark.parametrize("name", ["gae", "gae_turn", "bi_level", "vapo"])
def test_a_reward_without_a_token_is_not_lost(name):
    """The second turn of each episode says nothing; its reward reaches the token before it."""
    values = torch.zeros(4, dtype=torch.float64)
    silent = episodes(token_turn=torch.tensor([0, 2, 4, 6]), values=values)
    target = advantage_of(name, silent).value_target
    assert target.tolist() == pytest.approx([1.0, 0.0, 3.0, 2.0])


def test_values_are_carried_over_observations_undiscounted():
    """gamma counts sampled tokens: what lies between two of them costs nothing."""
    values = torch.tensor([0.5] * 8, dtype=torch.float64)
    found = advantage_of("gae", episodes(values=values), gamma=0.5, gae_lambda=1.0)
    assert found.value_target[:4].tolist() == pytest.approx([0.5, 1.0, 0.0, 0.0])


def test_the_targets_of_a_critic_are_not_whitened():
    values = torch.full((8,), 10.0, dtype=torch.float64)
    found = advantage_of("gae", episodes(values=values), gae_lambda=1.0)
    assert found.value_target[::2].tolist() == pytest.approx([1.0, 0.0, 3.0, 2.0])
    assert found.advantage.mean().item() == pytest.approx(0.0, abs=1e-9)


def test_gae_turn_teaches_the_first_token_of_a_turn_only():
    pairs = episodes(token_turn=torch.arange(8).repeat_interleave(2), values=torch.zeros(16, dtype=torch.float64))
    target = advantage_of("gae_turn", pairs).value_target
    assert target[::2].isfinite().all()
    assert target[1::2].isnan().all()


def test_lambda_of_vapo_grows_with_the_length():
    """With 40 tokens lambda is 1 - 1/2; below 20 tokens it is 0: the temporal difference alone."""
    long = episodes(
        token_turn=torch.tensor([0] * 39 + [1, 2, 3, 4, 5, 6, 7]),
        values=torch.zeros(46, dtype=torch.float64),
    )
    advantage = advantage_of("vapo", long).advantage
    assert (advantage[38] - advantage[40]) / (advantage[39] - advantage[40]) == pytest.approx(0.5)
    assert advantage[42] == advantage[40]  # 2 tokens: nothing of the reward one token later


@pytest.mark.parametrize("name", ["gae", "remax", "prime", "gdpo"])
def test_missing_input_is_an_error(name):
    with pytest.raises(TrainingError, match=r"lacks an input of the algorithm|normalizes every component"):
        lookup(Kind.ADVANTAGE, name)(episodes())


@pytest.mark.parametrize("name", ["luffy", "sppo", "distill"])
def test_missing_loss_input_is_an_error(name):
    with pytest.raises(TrainingError, match="lacks an input of the algorithm"):
        lookup(Kind.LOSS, name)(loss_input([0.0], [1.0]))


def test_gdpo_wants_every_component_in_every_episode():
    nan = torch.tensor([1.0, torch.nan, 0.0, 0.0], dtype=torch.float64)
    with pytest.raises(TrainingError, match="episodes without 'right'"):
        lookup(Kind.ADVANTAGE, "gdpo")(episodes(components={"right": nan}))
    with pytest.raises(TrainingError, match="got the components right, expected one named 'wrong'"):
        lookup(Kind.ADVANTAGE, "gdpo")(episodes(components={"right": nan.nan_to_num()}), weights={"wrong": 1.0})


def test_maxrl_wants_returns_that_are_not_negative():
    with pytest.raises(TrainingError, match="got a return of -1"):
        lookup(Kind.ADVANTAGE, "maxrl")(episodes(returns=torch.tensor([-1.0, 0.0, 1.0, 1.0], dtype=torch.float64)))


CENTRED = [
    name
    for name in names(Kind.ADVANTAGE)
    if ":" not in name and name != "reinforce" and not needed_inputs(lookup(Kind.ADVANTAGE, name)) & {Input.VALUES}
]
"""Estimators that subtract a mean or another member's return; those with a critic subtract its opinion."""
CONSTANTS = [0.1, 0.7, 1 / 3, 1e6 + 0.1, -0.3, 0.1 + 0.2]


def test_everything_but_reinforce_and_critics_is_centred():
    assert set(names(Kind.ADVANTAGE)) - set(CENTRED) == {"reinforce", "gae", "gae_turn", "bi_level", "vapo", "dqo"}


@pytest.mark.parametrize("members", range(2, 18))
@pytest.mark.parametrize("name", CENTRED)
def test_equal_returns_have_no_advantage(name, members):
    """Exactly: what rounding leaves of an inexact mean would be read, and an optimizer would make a step of it."""
    for constant in CONSTANTS:
        returns = torch.full((members,), constant, dtype=torch.float64)
        if constant == 0.1 + 0.2:
            returns[0] = 0.3  # the same sum in another order
        batch = EpisodeBatch(
            returns=returns.abs() if name == "maxrl" else returns,
            group=torch.zeros(members, dtype=torch.int64),
            turn_reward=returns,
            turn_episode=torch.arange(members),
            turn_state=torch.zeros(members, dtype=torch.int64),
            token_turn=torch.arange(members).repeat_interleave(torch.arange(members) % 3 + 1),
            greedy_return=returns[:1],
            components={"all": returns},
            process_reward=torch.zeros(int((torch.arange(members) % 3 + 1).sum()), dtype=torch.float64),
            score_norm=torch.ones(int((torch.arange(members) % 3 + 1).sum()), dtype=torch.float64),
            baseline=torch.full((members,), constant, dtype=torch.float64),
            role_kind=torch.zeros(members, dtype=torch.int64),
        )
        assert not lookup(Kind.ADVANTAGE, name)(batch).any(), constant
        assert not groups_with_advantages(lookup(Kind.ADVANTAGE, name), batch).any()
        assert not groups_with_different_rewards(batch).any()
        assert not rewards_differ(returns.tolist())


def test_a_difference_above_rounding_is_one():
    close = episodes(returns=torch.tensor([0.1, 0.1 + 1e-8, 1e6, 1e6 + 0.1], dtype=torch.float64))
    assert lookup(Kind.ADVANTAGE, "grpo")(close).all()
    assert groups_with_advantages(lookup(Kind.ADVANTAGE, "grpo"), close).tolist() == [True, True]
    assert groups_with_different_rewards(close).tolist() == [True, True]
    assert rewards_differ([0.1, 0.1 + 1e-8])
    assert rewards_differ([1e6, 1e6 + 0.1])
    assert rewards_differ([0.0, 0.5, 1.0]), "one of them is the mean"
    assert not rewards_differ([])
    assert not rewards_differ([-5.0])


def test_rounding_errors_of_cancelling_sums_are_no_difference():
    cancelled = episodes(returns=torch.tensor([0.1 + 0.2 - 0.3, 0.0, 1.0, 0.0], dtype=torch.float64))
    assert lookup(Kind.ADVANTAGE, "grpo")(cancelled)[:4].tolist() == [0.0] * 4
    assert groups_with_advantages(lookup(Kind.ADVANTAGE, "grpo"), cancelled).tolist() == [False, True]
    assert not rewards_differ([0.1 + 0.2 - 0.3, 0.0])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "maxrl", "grpo_passk"])
def test_a_group_of_one_has_no_advantage(name):
    """Never the raw reward."""
    lone = episodes(group=torch.tensor([0, 0, 0, 1]), returns=torch.tensor([0.1, 0.1, 0.1, 5.0], dtype=torch.float64))
    assert not lookup(Kind.ADVANTAGE, name)(lone).any()


def test_topr_weighs_failures_only():
    tokens = loss_input([1.0, -1.0, 1.0, -1.0], [1.0] * 4, sequence=[0, 0, 1, 1])
    tokens = dataclasses.replace(tokens, episode_return=torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64))
    assert gradient("topr", tokens).tolist() == pytest.approx([-1.0, -1.0, -1.0, -torch.tensor(-1.0).exp().item()])


ROUNDED_ZERO = 0.1 + 0.2 - 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "options"), [("topr", {}), ("vapo", {}), ("sft", {"above": 0.0})])
def test_a_return_that_is_0_up_to_rounding_is_no_success(name, options, dtype):
    tokens = loss_input([-1.0, 1.0, 0.5], [-1.0, 1.0, 1.0], sequence=[0, 1, 2])
    assert ROUNDED_ZERO > 0

    def found(first):
        returns = torch.tensor([first, 1.0, -1.0], dtype=dtype)
        return gradient(name, dataclasses.replace(tokens, episode_return=returns), **options).tolist()

    assert found(ROUNDED_ZERO) == found(0.0)
    assert found(1e-6) != found(0.0)


def test_dppo_bounds_probabilities_not_ratios():
    """A rare token may triple; a frequent one may not gain a quarter."""
    rare, frequent = moved(0.005, 0.015), moved(0.65, 0.9)
    for name in ("dppo", "dppo_binary_kl"):
        assert gradient(name, rare).item() == pytest.approx(-3.0)
        assert gradient(name, frequent).item() == 0.0


def moved(before, now):
    old = torch.tensor([before], dtype=torch.float64).log()
    logp = torch.tensor([now], dtype=torch.float64).log().requires_grad_()
    return dataclasses.replace(loss_input([0.0], [1.0]), logp=logp, old_logp=old, behaviour_logp=old)


def test_limits_are_kept_when_they_are_met_exactly():
    equal = loss_input([0.0, 0.0], [1.0, -1.0])
    for name in ("k1", "k2", "k3"):
        assert lookup(Kind.FILTER, name)(equal, limit=0.0).all()
        assert lookup(Kind.FILTER, name)(equal, limit=0.0, of="sequence").all()
    for band in ((1.0, 2.0), (0.0, 1.0)):
        assert lookup(Kind.FILTER, "geometric")(equal, band=band).all()
    for band in ((1.0, 1.0), (2.0, 1.0), (-0.1, 1.0)):
        with pytest.raises(ConfigError, match="keeps sequences inside a band"):
            lookup(Kind.FILTER, "geometric")(equal, band=band)
    for name, options in (
        ("ppo", {"clip": 0.0, "dual_clip": 1.0}),
        ("cispo", {"clip_high": 0.0}),
        ("topr", {}),
        ("gmpo", {"clip_low": 0.0, "clip_high": 0.0}),
        ("dppo", {"delta_low": 0.0, "delta_high": 0.0, "cap": 1.0}),
        ("dppo_binary_kl", {"delta_low": 0.0, "delta_high": 0.0, "cap": 1.0}),
        ("decoupled_ppo", {"cap": 1.0}),
    ):
        found = lookup(Kind.LOSS, name)(equal, **options)
        assert not found.clipped.any(), name
        assert gradient(name, equal, **options).tolist() == [-1.0, 1.0], name
    failed = dataclasses.replace(equal, episode_return=torch.zeros(2))
    assert not lookup(Kind.LOSS, "topr")(failed).clipped.any()


@pytest.mark.parametrize("name", ["dppo", "dppo_binary_kl"])
def test_a_token_without_advantage_is_not_counted_as_dropped(name):
    far = loss_input([1.5, -3.0], [0.0, 0.0])
    assert not lookup(Kind.LOSS, name)(far).clipped.any()


def test_second_moment_is_below_tau():
    """Squares of 1/4 each: their mean is tau, and not below it."""
    tokens = loss_input([0.0, 0.0], [1.0, 1.0], mu=0.5)
    assert not lookup(Kind.LOSS, "m2po").choice.choose(tokens, tau=0.25).any()
    assert lookup(Kind.LOSS, "m2po").choice.choose(tokens, tau=0.26).all()


@pytest.mark.parametrize("outlier", [1.0, 20.0])
def test_as_many_tokens_as_possible_are_kept_below_tau_among_many(outlier):
    """Neighbours among many sorted distances are closer than rounding errors of the largest."""
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(200_000, generator=generator, dtype=torch.float64)
    distance = 0.3 * torch.randn(200_000, generator=generator, dtype=torch.float64)
    distance[7] = outlier
    tokens = loss_input([0.0] * 200_000, [1.0] * 200_000)
    tokens = dataclasses.replace(tokens, old_logp=old, behaviour_logp=old - distance)
    kept = lookup(Kind.LOSS, "m2po").choice.choose(tokens, tau=0.04)
    ordered = distance.abs().sort().values
    most = int((ordered.square().cumsum(0) / torch.arange(1, 200_001) < 0.04).sum())
    assert most - 50 < int(kept.sum()) <= most
    assert distance[kept].abs().max() < distance[~kept].abs().min()


def test_the_ends_of_the_band_of_clip_cov_are_in_it():
    """Both tokens have a covariance of 1."""
    tokens = dataclasses.replace(
        loss_input([0.0, 0.0], [1.0, -1.0]),
        logp=torch.tensor([-1.0, -3.0], dtype=torch.float64),
        old_logp=torch.tensor([-1.0, -3.0], dtype=torch.float64),
    )
    choose = lookup(Kind.LOSS, "clip_cov").choice.choose
    for band in ({"cov_low": 1.0, "cov_high": 2.0}, {"cov_low": 0.0, "cov_high": 1.0}):
        assert choose(tokens, share=1.0, **band).all()
        assert int(choose(tokens, share=1e-9, **band).sum()) == 1
    clipped = dataclasses.replace(tokens, old_logp=tokens.logp - torch.tensor([1.0, -1.0], dtype=torch.float64))
    assert not choose(clipped, share=1.0, cov_low=0.0).any()
    assert choose(clipped, share=1.0, cov_low=0.0, clip=9.0).all()


def test_a_part_of_the_step_that_cancels_is_no_negative_return():
    """Maxrl refuses negative returns, but not what rounding leaves of 0."""
    returns = torch.tensor([0.1 + 0.2 - 0.3 - 1e-16, 0.0, 1.0, 1.0], dtype=torch.float64) - 1e-16
    assert not lookup(Kind.ADVANTAGE, "maxrl")(episodes(returns=returns)).any()


def test_maxrl_takes_a_mean_of_rounding_errors_for_none():
    returns = torch.tensor([-1.0, -1.0, -1.0, 2.9], dtype=torch.float64) * MIN_DIFFERENCE
    assert not lookup(Kind.ADVANTAGE, "maxrl")(episodes(returns=returns, group=torch.zeros(4, dtype=torch.int64))).any()


def test_the_only_token_of_a_group_is_opos_baseline():
    only = episodes(token_turn=torch.tensor([1, 4, 6]))
    assert lookup(Kind.ADVANTAGE, "opo")(only).tolist() == [0.0, 0.5, -0.5]


def test_luffy_clips_no_token_of_an_expert():
    """A ratio of e: the policy's own token is clipped, the expert's is not."""
    tokens = dataclasses.replace(loss_input([1.0, 1.0], [1.0, 1.0]), expert=torch.tensor([True, False]))
    assert lookup(Kind.LOSS, "luffy")(tokens).clipped.tolist() == [False, True]
