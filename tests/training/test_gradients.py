"""What is decided over whole updates, where pi_old comes from, shaped rewards in a step, and settings that clash."""

import copy
import itertools

import pytest
import torch
from support.models import tiny_model
from support.trainers import compute_logprobs, restore, state_of

from agentrl.algorithms.aggregation import Aggregation, TokenOwners
from agentrl.algorithms.policy_losses import ppo
from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.config.config import (
    LOSS_AGGREGATIONS,
    REFERENCE_LOSSES,
    AlgorithmConfig,
    TrainerConfig,
)
from agentrl.errors import ConfigError, UnknownNameError
from agentrl.registry import Kind, lookup, names
from agentrl.training.gradients import Objective, token_shares
from agentrl.training.rewards import RewardShaping
from agentrl.training.trainer import Trainer

OFF = {"mode": "off"}


def trainer_for(model, config, *, reference=None, **settings):
    settings = {"learning_rate": 1e-2, "max_grad_norm": 1e9, **settings}
    return Trainer(
        model, config, TrainerConfig(**settings), seed=0, max_tokens=100, signal_models={"reference": reference}
    )


def weights_after(model, trajectories, config, *, steps=0, **settings):
    own = copy.deepcopy(model)
    trainer = trainer_for(own, config, **settings)
    trainer.steps = steps
    report = trainer.step(trajectories, temperature=1.0)
    return report, own.state_dict()


def assert_same(found, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {"filters": {"top_entropy": {}}},
        {"filters": {"top_entropy": {"share": 0.5}, "k3": {"limit": 2.0}}},
        {"filters": {"geometric": {"band": [0.2, 5.0]}}},
        {"loss": "kl_cov", "loss_options": {"share": 0.2}},
        {"loss": "clip_cov", "loss_options": {"share": 0.2, "cov_low": 0.0, "cov_high": 9.0}},
        {"loss": "m2po", "loss_options": {"tau": 2.0}},
        {"loss": "sft", "loss_options": {"above": 0.55}},
        {"loss": "gmpo"},
        {"loss": "sppo", "aggregation": "seq-mean-token-mean"},
        {"shaping": {"pf_ppo": {}}},
    ],
    ids=lambda settings: str(next(iter(settings.values()))),
)
def test_cutting_updates_into_micro_batches_changes_nothing(model, trajectories, settings):
    """Two updates: what looks over all tokens of the second one reads the policy after the first."""
    config = AlgorithmConfig(**settings)
    report, expected = weights_after(model, trajectories, config, epochs=2)
    for budget, order in ((120, reversed(trajectories)), (60, trajectories)):
        if "pf_ppo" in config.shaping:
            order = trajectories  # draws go by position
        other, found = weights_after(model, list(order), config, epochs=2, tokens_per_micro_batch=budget)
        assert_same(found, expected)
        assert other.metrics["train/loss"] == pytest.approx(report.metrics["train/loss"], abs=1e-5)


def test_the_engines_own_probabilities_as_proximal_policy(model, trajectories):
    """PPO on pi / mu is REINFORCE weighted by pi / mu as long as nothing is clipped."""
    wide = {"clip_low": 1.0, "clip_high": 1e9, "dual_clip": None}
    bypass = AlgorithmConfig(loss_options=wide, correction={"proximal": "behaviour"})
    weighted = AlgorithmConfig(loss_options=wide, correction={"cap": 1e9})
    report, found = weights_after(model, trajectories, bypass)
    other, expected = weights_after(model, trajectories, weighted)
    assert_same(found, expected)
    assert report.metrics["mismatch/prob_abs_mean"] == pytest.approx(other.metrics["mismatch/prob_abs_mean"])


def test_between_versions_a_fresh_token_has_mu_as_proximal_policy(model, trajectories):
    config = AlgorithmConfig(correction={"proximal": "loglinear"})
    _, found = weights_after(model, trajectories, config, steps=0)
    _, expected = weights_after(model, trajectories, AlgorithmConfig(correction={"proximal": "behaviour"}))
    assert_same(found, expected)
    _, stale = weights_after(model, trajectories, config, steps=4)
    assert any(not torch.equal(stale[name], found[name]) for name in found)


@pytest.mark.parametrize(("proximal", "passes"), [("trainer", 1), ("behaviour", 0), ("loglinear", 0)])
def test_another_proximal_policy_saves_the_forward_pass(model, trajectories, monkeypatch, proximal, passes):
    trainer = trainer_for(model, AlgorithmConfig(correction={"proximal": proximal}), mini_batches=2)
    calls, score = [], trainer._policy.logprobs
    monkeypatch.setattr(trainer._policy, "logprobs", lambda *given, **how: calls.append(1) or score(*given, **how))
    trainer.step(trajectories, temperature=1.0)
    assert len(calls) == passes


def test_kl_in_the_reward_moves_the_return_and_adapts_over_a_resume(model, trajectories):
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.1)
    shaping = {"kl": {"coef": 0.5, "target": 1e-6, "horizon": 70.0}}
    trainer = trainer_for(model, AlgorithmConfig(advantage="reinforce", shaping=shaping), reference=reference)
    report = trainer.step(trajectories, temperature=1.0)
    scores = trainer_for(copy.deepcopy(reference), AlgorithmConfig())
    penalty = 0.0
    for sequence in itertools.chain.from_iterable(t.sequences for t in trajectories):
        (exact,) = compute_logprobs(scores, [sequence])
        mu = torch.from_numpy(sequence.logprobs[sequence.loss_mask])
        penalty -= 0.5 * float((mu - exact).sum())
    expected = report.metrics["reward/mean"] + penalty / len(trajectories)
    assert report.metrics["reward/shaped_mean"] == pytest.approx(expected, abs=1e-5)
    coef = state_of(trainer)["reward_kl_coef"]
    assert abs(coef / 0.5 - 1) == pytest.approx(0.2 * 7 / 70)
    resumed = trainer_for(copy.deepcopy(model), AlgorithmConfig(shaping=shaping), reference=reference)
    restore(resumed, state_of(trainer))
    assert state_of(resumed)["reward_kl_coef"] == coef


def test_an_episode_that_is_drawn_twice_counts_as_two():
    owners = TokenOwners(
        sequence=torch.tensor([0, 0, 1, 2, 2]),
        trajectory=torch.tensor([0, 0, 0, 1, 1]),
        group=torch.tensor([0, 0, 0, 0, 0]),
    )
    for aggregation in Aggregation:
        norm = 10 if aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM else None
        objective = Objective(AlgorithmConfig(aggregation=aggregation.value, norm_length=norm))
        index = torch.arange(5)
        found = token_shares(objective, owners, index, torch.tensor([2, 0]))
        twice = TokenOwners(
            sequence=torch.tensor([0, 0, 1, 2, 2, 3]),
            trajectory=torch.tensor([0, 0, 0, 1, 1, 1]),
            group=torch.zeros(6, dtype=torch.int64),
        )
        expected = 2 * objective.weights(twice)[:3].float()
        assert found.tolist() == pytest.approx([*expected.tolist(), 0.0, 0.0])
        once = token_shares(objective, owners, index, None)
        assert token_shares(objective, owners, index, torch.tensor([1, 1])).tolist() == once.tolist()


@pytest.mark.parametrize("draws", [[2, 1], [2, 2], [1, 3], [3, 2]])
@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_draws_are_copies_with_sequences_and_trajectories_of_their_own(aggregation, draws):
    """Against the copies written out one by one; the trajectories have two sequences and one."""
    sequence, trajectory, group = [0, 0, 1, 2, 2, 2], [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1]
    rows = [(t, copy) for t in range(6) for copy in range(draws[trajectory[t]])]

    def numbered(names):
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return torch.tensor([numbers[name] for name in names])

    copies = TokenOwners(
        sequence=numbered([(sequence[t], copy) for t, copy in rows]),
        trajectory=numbered([(trajectory[t], copy) for t, copy in rows]),
        group=torch.tensor([group[t] for t, _ in rows]),
    )
    norm = 10 if aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM else None
    objective = Objective(AlgorithmConfig(aggregation=aggregation.value, norm_length=norm))
    expected = [0.0] * 6
    for (t, _), weight in zip(rows, objective.weights(copies).tolist(), strict=True):
        expected[t] += weight
    owners = TokenOwners(
        sequence=torch.tensor(sequence), trajectory=torch.tensor(trajectory), group=torch.tensor(group)
    )
    found = token_shares(objective, owners, torch.arange(6), torch.tensor(draws))
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "luffy"}, r"luffy needs episodes of an expert: got no algorithm\.expert"),
        ({"loss": "distill"}, r"distill needs a teacher's log-probabilities: got no algorithm\.teacher"),
        (
            {"loss": "distill_top_k", "teacher": {"path": "a"}},
            r"most probable tokens: got no algorithm\.teacher\.top_k",
        ),
        ({"loss": "distill", "teacher": {"path": "a", "top_k": 2}}, r"top_k is ignored: the loss distill reads"),
        ({"shaping": {"distill": {}}}, r"shaping distill needs a teacher's log-probabilities"),
        ({"teacher": {"path": "a/b"}}, r"teacher is ignored.*got algorithm\.loss ppo and no shaping distill"),
        ({"expert": {}}, "loss ppo cannot train on the tokens of algorithm.expert, which the policy did not sample"),
        ({"loss": "luffy", "expert": {"members": 8}}, "plays all episodes of a group.*expected at most 7"),
        (
            {"loss": "luffy", "expert": {}, "correction": {"proximal": "behaviour"}},
            r"have no sampling probability mu.*got algorithm\.correction\.proximal behaviour",
        ),
        ({"loss": "luffy", "expert": {}, "shaping": {"kl": {"coef": 0.1}}}, r"expected algorithm\.kl_coef"),
        ({"loss": "dpo"}, r"the loss dpo does not learn from episodes: got pairs of trajectories"),
        ({"loss": "value"}, "a critic's values"),
        ({"loss": "decoupled_ppo"}, r"apply it twice: got algorithm\.correction\.mode token"),
        (
            {"loss": "decoupled_ppo", "correction": {"mode": "off", "proximal": "behaviour"}},
            "decoupled_ppo compares the trainer's pi_old with mu",
        ),
        ({"loss": "m2po", "correction": {"proximal": "loglinear"}}, "m2po compares the trainer's pi_old with mu"),
        (
            {"filters": {"k1": {"limit": 1.0}}, "correction": {"proximal": "behaviour"}},
            "k1 compares the trainer's pi_old",
        ),
        (
            {"loss": "sft", "advantage": "reinforce", "advantage_options": {"gamma": 0.5}},
            "advantage_options are ignored",
        ),
        (
            {"loss": "sft", "loss_options": {"above": 0.5}, "dynamic_sampling": True},
            r"drops groups with equal rewards, but this run also learns from such groups: got algorithm\.loss sft",
        ),
        (
            {"shaping": {"distill": {}}, "teacher": {"path": "a"}, "dynamic_sampling": True},
            r"drops groups with equal rewards.*got algorithm\.teacher, expected algorithm\.dynamic_sampling=false",
        ),
        ({"filters": {"k1": {}}}, "k1 needs the option limit"),
        ({"filters": {"k1": {"limit": 1.0, "off": "token"}}}, r"Did you mean 'of'"),
        ({"filters": {"k1": {"limit": 1.0, "of": "turn"}}}, "option of has the wrong type: got 'turn'"),
        ({"advantage": "turn_discounted", "advantage_options": {"normalize_over": "turns"}}, "wrong type: got 'turns'"),
    ],
)
def test_settings_that_clash_are_found_before_training(settings, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(tiny_model(), AlgorithmConfig(**settings), TrainerConfig(), seed=0, max_tokens=100)


@pytest.mark.parametrize(
    ("shaping", "message"),
    [
        ({"overlong": {"buffer": 100}}, "buffer is out of range: got 100"),
        ({"invalid": {}}, "invalid needs the option penalty"),
        ({"invalid": {"penalti": -1}}, "Did you mean 'penalty'"),
        ({"kl": {"coef": 0.1, "target": 1.0}}, "target and horizon must be set together"),
        ({"pf_ppo": {"seed": 1}}, "pf_ppo does not take this option"),
        ({"unfinished": {"seed": 1}}, "unfinished does not take this option"),
    ],
)
def test_shapings_are_checked_before_training(shaping, message):
    with pytest.raises(ConfigError, match=message):
        RewardShaping(shaping, max_tokens=100)


def test_unknown_filters_and_shapings_name_the_nearest():
    with pytest.raises(UnknownNameError, match="'geometric'"):
        Objective(AlgorithmConfig(filters={"geometrik": {}}))
    with pytest.raises(UnknownNameError, match="'overlong'"):
        RewardShaping({"overlogn": {}}, max_tokens=100)


def test_the_config_knows_which_losses_keep_a_reference():
    found = {name for name in names(Kind.LOSS) if Input.REFERENCE in needed_inputs(lookup(Kind.LOSS, name))}
    assert found == REFERENCE_LOSSES


def test_the_config_knows_which_losses_are_means_over_sequences():
    for name, aggregation in LOSS_AGGREGATIONS.items():
        assert lookup(Kind.LOSS, name)
        assert AlgorithmConfig(loss=name).aggregation == aggregation
        assert AlgorithmConfig(loss=name, aggregation="token-mean").aggregation == "token-mean"
    assert AlgorithmConfig(loss="ppo").aggregation == AlgorithmConfig().aggregation == "token-mean"


DRAWS: list[int] = []


def remembers_draws(tokens):
    DRAWS.append(tokens.draw)
    return ppo(tokens)


def test_random_choices_of_a_loss_differ_between_updates_steps_and_seeds_only(model, trajectories):
    def draws(seed, *, start=0, **settings):
        DRAWS.clear()
        settings = TrainerConfig(epochs=2, **settings)
        config = AlgorithmConfig(loss=f"{__name__}:remembers_draws")
        trainer = Trainer(copy.deepcopy(model), config, settings, seed=seed, max_tokens=100)
        trainer.steps = start
        for _ in range(2 - start):
            trainer.step(trajectories, temperature=1.0)
        return list(dict.fromkeys(DRAWS))

    once = draws(3)
    assert len(once) == 4
    assert draws(3, tokens_per_micro_batch=40) == once
    assert draws(3, start=1) == once[2:], "a resumed run draws what it would have drawn"
    assert not set(once) & set(draws(4))
    assert not set(once) & set(draws(-3))


def first_half(tokens, *, share: float = 0.5):
    return torch.arange(tokens.logp.numel()) < share * tokens.logp.numel()


def doubled(rewards, *, times: float = 2.0):
    return rewards.with_episodes((times - 1) * rewards.returns)


def test_a_users_own_filter_and_shaping_by_import_path(model, trajectories):
    config = AlgorithmConfig(
        filters={f"{__name__}:first_half": {"share": 0.25}}, shaping={f"{__name__}:doubled": {"times": 3.0}}
    )
    report, _ = weights_after(model, trajectories, config)
    assert report.metrics["train/dropped_share"] == pytest.approx(0.75, abs=0.02)
    assert report.metrics["reward/shaped_mean"] == pytest.approx(3 * report.metrics["reward/mean"])


@pytest.mark.parametrize("settings", [{}, {"loss": "m2po"}, {"loss": "kl_cov"}, {"loss": "clip_cov"}])
def test_an_update_without_a_token_left_changes_nothing(model, trajectories, settings):
    before = copy.deepcopy(model.state_dict())
    config = AlgorithmConfig(filters={"k1": {"limit": 0.0}}, **settings)
    report, after = weights_after(model, trajectories, config)
    assert report.metrics["train/dropped_share"] == 1.0
    assert report.metrics["train/loss"] == 0.0
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_the_optimizers_momentum_does_not_move_weights_without_a_token_left(model, trajectories):
    first = trainer_for(model, AlgorithmConfig())
    first.step(trajectories, temperature=1.0)
    second = trainer_for(model, AlgorithmConfig(filters={"k1": {"limit": 0.0}}))
    second._optimizer.load_state_dict(first._optimizer.state_dict())
    before = copy.deepcopy(model.state_dict())
    report = second.step(trajectories, temperature=1.0)
    assert report.metrics["train/dropped_share"] == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
