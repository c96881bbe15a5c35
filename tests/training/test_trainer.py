"""The whole training step against a float64 reference, and settings that must not change it."""

import copy
import itertools
import math
import random
from functools import partial

import pytest
import torch
from support.trainers import compute_logprobs, restore, state_of

from agentrl.algorithms.traits import needed_inputs, other_input, weighs_behaviour
from agentrl.config.config import AlgorithmConfig, Config, TrainerConfig
from agentrl.errors import ConfigError, Outcome, TrainingError, UnknownNameError, UsageError
from agentrl.registry import Kind, lookup, names
from agentrl.training.algorithm_functions import PROVIDED
from agentrl.training.trainer import Trainer
from agentrl.trajectory import Source, TokenSequence, Turn

AGGREGATIONS = [
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "traj-mean-token-mean",
    "prompt-mean",
]
LOSSES = [
    name
    for name in names(Kind.LOSS)
    if other_input(lookup(Kind.LOSS, name)) is None and needed_inputs(lookup(Kind.LOSS, name)) <= PROVIDED
]


def algorithm(**settings):
    if settings.get("aggregation") == "seq-mean-token-sum-norm":
        settings["norm_length"] = 50
    return AlgorithmConfig(**settings)


def trainer_for(model, config=None, *, reference=None, **settings):
    """Plain steps: the gradient is what a test reads, so nothing is clipped."""
    settings = {"learning_rate": 1e-3, "max_grad_norm": 1e9, **settings}
    return Trainer(
        model,
        config or algorithm(),
        TrainerConfig(**settings),
        seed=0,
        max_tokens=100,
        signal_models={"reference": reference},
    )


def test_a_changed_default_dtype_is_refused(model, trajectories):
    trainer = trainer_for(model)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(UsageError, match=r"default dtype of PyTorch was changed: got torch.float64"):
            run_step(trainer, trajectories)
    finally:
        torch.set_default_dtype(torch.float32)


def test_groups_of_one_are_refused_where_members_are_compared(model):
    with pytest.raises(ConfigError, match=r"got algorithm\.group_size 1, expected at least 2"):
        trainer_for(model, algorithm(group_size=1))
    assert trainer_for(model, algorithm(group_size=1, advantage="reinforce")).min_members == 1


def run_step(trainer, trajectories, temperature=1.0):
    return trainer.step(trajectories, temperature=temperature)


def gradient_of_step(model, trajectories, config, *, temperature=1.0, **settings):
    """The gradient of one update, read just before it would be applied."""
    trainer = trainer_for(copy.deepcopy(model), config, **settings)
    seen = {}
    update = trainer._optimizer.update

    def record():
        seen.update({name: p.grad.clone() for name, p in trainer.model.named_parameters()})
        return update()

    trainer._optimizer.update = record
    return run_step(trainer, trajectories, temperature), seen


def assert_same_gradient(found, expected, *, atol=1e-6):
    for name, gradient in expected.items():
        close = partial(torch.testing.assert_close, msg=lambda difference, name=name: f"{name}: {difference}")
        close(found[name].double(), gradient.double(), atol=atol, rtol=1e-5)


def reference_gradient(model, trajectories, *, kl_coef=0.0, entropy_coef=0.0, temperature=1.0):
    """GRPO with PPO at ratio 1, token TIS, token-mean: loops and full logits, in float64."""
    model = copy.deepcopy(model).double()
    frozen = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in frozen.parameters():
            parameter.mul_(1.1)
    losses = []
    for trajectory in trajectories:
        rewards = torch.tensor(
            [t.reward for t in trajectories if t.group_id == trajectory.group_id], dtype=torch.float64
        )
        advantage = (trajectory.reward - rewards.mean()) / (rewards.std() + 1e-6)
        for sequence in trajectory.sequences:
            ids = torch.from_numpy(sequence.token_ids).long()
            distribution = (model(ids[None]).logits[0] / temperature).log_softmax(-1)
            other = (frozen(ids[None]).logits[0] / temperature).log_softmax(-1)
            for t in sequence.loss_mask.nonzero()[0]:
                logp = distribution[t - 1, ids[t]]
                weight = (logp.detach() - float(sequence.logprobs[t])).exp().clamp(max=2.0)
                x = other[t - 1, ids[t]].detach() - logp
                entropy = -(distribution[t - 1].exp() * distribution[t - 1]).sum()
                policy = -weight * advantage * (logp - logp.detach()).exp()
                kl = (x.exp() - x - 1).detach() + x.square() / 2 - x.square().detach() / 2
                losses.append(policy + kl_coef * kl - entropy_coef * entropy)
    loss = torch.stack(losses).mean()
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def scaled(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    return other


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("kl_coef", "entropy_coef"), [(0.0, 0.0), (0.3, 0.0), (0.2, 0.1)])
def test_step_equals_the_float64_reference(model, trajectories, kl_coef, entropy_coef, temperature):
    loss, expected = reference_gradient(
        model, trajectories, kl_coef=kl_coef, entropy_coef=entropy_coef, temperature=temperature
    )
    report, seen = gradient_of_step(
        model,
        trajectories,
        algorithm(kl_coef=kl_coef, entropy_coef=entropy_coef),
        reference=scaled(model),
        temperature=temperature,
    )
    assert report.metrics["train/loss"] == pytest.approx(loss, abs=1e-6)
    assert_same_gradient(seen, expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_and_order_change_nothing(model, trajectories, aggregation):
    config = algorithm(aggregation=aggregation, kl_coef=0.1, entropy_coef=0.05)
    report, expected = gradient_of_step(model, trajectories, config, reference=scaled(model))
    for budget, order in ((10_000, reversed(trajectories)), (120, trajectories), (1, trajectories)):
        other, found = gradient_of_step(
            model, list(order), config, reference=scaled(model), tokens_per_micro_batch=budget
        )
        assert_same_gradient(found, expected)
        assert other.metrics["train/loss"] == pytest.approx(report.metrics["train/loss"], abs=1e-6)
        for name in ("mismatch/prob_abs_mean", "train/entropy", "train/kl_reference", "mismatch/clip_share"):
            assert other.metrics[name] == pytest.approx(report.metrics[name], abs=1e-6), name


MODES = ("token", "sequence", "icepop", "off")
HOLDING_THE_WEIGHT = [name for name in LOSSES if weighs_behaviour.of(lookup(Kind.LOSS, name))]


@pytest.mark.parametrize(
    ("loss", "mode"),
    [
        *(("ppo", mode) for mode in MODES),
        *((name, "off") for name in HOLDING_THE_WEIGHT),
        *zip(sorted({*LOSSES} - {"ppo", *HOLDING_THE_WEIGHT}), itertools.cycle(MODES), strict=False),
    ],
)
def test_every_loss_and_correction_is_invariant(model, trajectories, loss, mode):
    config = algorithm(loss=loss, correction={"mode": mode}, aggregation="seq-mean-token-mean")
    _, expected = gradient_of_step(model, trajectories, config)
    _, found = gradient_of_step(model, trajectories, config, tokens_per_micro_batch=60)
    assert_same_gradient(found, expected)


def test_gradient_checkpointing_changes_nothing(model, trajectories):
    _, expected = gradient_of_step(model, trajectories, algorithm())
    _, found = gradient_of_step(model, trajectories, algorithm(), gradient_checkpointing=True)
    assert_same_gradient(found, expected)


@pytest.mark.parametrize("lanes", [2, 3])
def test_lanes_change_nothing_but_rounding_and_repeat_bit_by_bit(model, trajectories, lanes):
    report, expected = gradient_of_step(model, trajectories, algorithm(), tokens_per_micro_batch=40)
    runs = [
        gradient_of_step(model, trajectories, algorithm(), tokens_per_micro_batch=40, lanes=lanes) for _ in range(2)
    ]
    for other, found in runs:
        assert_same_gradient(found, expected)
        assert other.metrics["train/entropy"] == pytest.approx(report.metrics["train/entropy"], abs=1e-6)
        assert other.metrics["mismatch/prob_abs_mean"] == pytest.approx(report.metrics["mismatch/prob_abs_mean"])
    first, second = (found for _, found in runs)
    assert all(torch.equal(gradient, second[name]) for name, gradient in first.items())


def test_sequences_without_advantage_change_nothing(model, trajectories):
    """Without KL they are not even read; the gradient is that of a step that reads them."""
    for trajectory, reward in zip(trajectories, (0.0, 0.2, 1.0, 0.5, 0.5), strict=False):
        trajectory.reward = trajectory.turns[-1].reward = reward
    report, found = gradient_of_step(model, trajectories, algorithm())
    _, expected = reference_gradient(model, trajectories)
    assert_same_gradient(found, expected)
    assert report.metrics["groups/zero_variance"] == 1
    assert report.metrics["train/tokens"] == sum(t.sampled_tokens for t in trajectories)
    assert report.metrics["train/idle_sequences"] == sum(len(t.sequences) for t in trajectories[3:5])


def last_turns(episodes):
    """1 at the last turn of each episode, 0 before, and 0 everywhere in the first episode."""
    last = episodes.turn_episode != episodes.turn_episode.roll(-1)
    return (last & (episodes.turn_episode > 0)).double()[episodes.token_turn]


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_sequence_with_an_advantage_at_some_turns_is_read(model, trajectories, mini_batches):
    """A sequence is idle only where all of its tokens have advantage 0."""
    config = algorithm(advantage=f"{__name__}:last_turns", correction={"mode": "off"})
    report, found = gradient_of_step(model, trajectories, config, mini_batches=mini_batches)
    read = {id(trajectory.turns[-1]) for trajectory in trajectories[1:]}
    idle = [s for t in trajectories for s in t.sequences if not {id(turn) for turn in s.turns} & read]
    assert report.metrics["train/idle_sequences"] == len(idle) > len(trajectories[0].sequences)
    everything = algorithm(advantage=f"{__name__}:last_turns", correction={"mode": "off"}, entropy_coef=1e-12)
    all_read, expected = gradient_of_step(model, trajectories, everything, mini_batches=mini_batches)
    assert all_read.metrics["train/idle_sequences"] == 0
    assert_same_gradient(found, expected)
    assert float(found["model.norm.weight"].abs().max()) > 1e-3


def test_the_ratio_of_the_second_update_is_that_to_the_start_of_the_step(model, trajectories):
    """REINFORCE weighted by pi / pi_old, which is PPO without a clip: by hand, at the second of two updates."""
    wide = {"clip_low": 1.0, "clip_high": 1e9, "dual_clip": None}
    config = algorithm(advantage="reinforce", loss_options=wide, correction={"mode": "off"})
    for trajectory in trajectories:
        trajectory.turns[-1].reward += 0.5  # so that every sequence is read
        trajectory.reward += 0.5
    trainer, policies = trainer_for(copy.deepcopy(model), config, epochs=2, learning_rate=2e-2), []
    update, gradients = trainer._optimizer.update, []

    def record():
        policies.append(copy.deepcopy(trainer.model).double())
        gradients.append({name: p.grad.clone() for name, p in trainer.model.named_parameters()})
        policies[-1].zero_grad()
        return update()

    trainer._optimizer.update = record
    report = run_step(trainer, trajectories)
    terms, ratios = [], []
    for trajectory in trajectories:
        for sequence in trajectory.sequences:
            ids = torch.from_numpy(sequence.token_ids).long()
            old, now = (policy(ids[None]).logits[0].log_softmax(-1) for policy in policies)
            for t in sequence.loss_mask.nonzero()[0]:
                turn = next(turn for turn in sequence.turns if turn.start <= t < turn.end)
                advantage = sum(later.reward for later in trajectory.turns if later.index >= turn.index)
                ratio = (now[t - 1, ids[t]] - old[t - 1, ids[t]].detach()).exp()
                terms.append(-advantage * ratio)
                ratios.append(float(ratio.detach()))
    torch.stack(terms).mean().backward()
    assert max(ratios) > 1.1
    assert min(ratios) < 0.9
    expected = {name: p.grad for name, p in policies[1].named_parameters()}
    assert_same_gradient(gradients[1], expected, atol=5e-6)  # ratios of several magnify what float32 rounds
    k3 = [ratio - 1 - math.log(ratio) for ratio in ratios]
    assert report.metrics["train/kl_old"] == pytest.approx(sum(k3) / len(k3) / 2, rel=1e-3)


def test_a_step_without_any_advantage_is_still_measured(model, trajectories):
    """The mean of three returns of 0.7 is not 0.7, which must not move a weight."""
    for trajectory in trajectories:
        trajectory.reward = trajectory.turns[-1].reward = 0.7
    trainer = trainer_for(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = run_step(trainer, trajectories)
    assert report.metrics["train/idle_sequences"] == 0
    assert report.metrics["groups/zero_variance"] == report.metrics["groups/trained"] == 3
    assert report.metrics["train/advantage_abs_mean"] == 0
    assert report.metrics["mismatch/prob_abs_mean"] > 0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_an_update_whose_sequences_are_all_idle_reads_nothing(model, trajectories):
    """One group per update, and the members of one of them have the same reward."""
    for trajectory in trajectories[3:5]:
        trajectory.reward = trajectory.turns[-1].reward = 0.5
    groups = len({trajectory.group_id for trajectory in trajectories})
    report = run_step(trainer_for(model, mini_batches=groups), trajectories)
    assert report.metrics["train/updates"] == groups
    assert report.metrics["train/updates_skipped"] == 0


def test_failed_and_unscored_members_change_nothing(model, trajectories, make_trajectory):
    _, expected = gradient_of_step(model, trajectories, algorithm())
    rng = random.Random(8)
    failed = make_trajectory(rng, "a", 7, reward=1.0, outcome=Outcome.ENVIRONMENT_ERROR)
    unscored, lone = make_trajectory(rng, "b", 7), make_trajectory(rng, "z", 0, reward=1.0)
    unscored.reward = None
    report, found = gradient_of_step(model, [failed, *trajectories, unscored, lone], algorithm())
    assert_same_gradient(found, expected)
    assert report.metrics["trajectories/infrastructure"] == 1
    assert report.metrics["trajectories/unscored"] == 1
    assert report.metrics["groups/skipped"] == 1
    assert report.metrics["trajectories/trained"] == len(trajectories)


@pytest.mark.parametrize(
    "dropping",
    [
        {"correction": {"mode": "icepop"}},
        {"correction": {"mode": "off"}, "filters": {"k1": {"limit": 1.0}}},
        {"correction": {"mode": "off"}, "filters": {"k3": {"limit": 1.0}, "k2": {"limit": 1.0}}},
        {"correction": {"mode": "off"}, "loss": "m2po"},
    ],
    ids=["icepop", "k1", "k2 and k3", "m2po"],
)
def test_dropped_tokens_are_not_counted(model, trajectories, dropping):
    """Dropped tokens: the same gradient as if they were observations, with the group's rewards as they are."""
    trainer = trainer_for(copy.deepcopy(model))
    kept_sequences = 0
    for trajectory in trajectories:
        for sequence in trajectory.sequences:
            (exact,) = compute_logprobs(trainer, [sequence])
            own = sequence.loss_mask[sequence.shared :].nonzero()[0]
            for k, t in enumerate(own):
                sequence._logprobs[int(t)] = float(exact[k]) - (2.0 if k % 2 else 0.0)
            kept_sequences += 1
    report, found = gradient_of_step(model, trajectories, algorithm(**dropping))
    for trajectory in trajectories:
        for sequence in trajectory.sequences:
            _forget_every_second(sequence)
    _, expected = gradient_of_step(model, trajectories, algorithm(correction={"mode": "off"}))
    assert_same_gradient(found, expected)
    assert report.metrics["train/dropped_share"] > 0.2
    assert kept_sequences > 7


def _forget_every_second(sequence: TokenSequence):
    own = sequence.loss_mask[sequence.shared :].nonzero()[0]
    for t in own[1::2]:
        sequence._sources[int(t)] = 2


def test_first_mini_batch_takes_pi_old_from_its_own_forward(model, trajectories):
    """Whether pi_old is computed before the step or on the way, the new weights are the same."""
    once, twice = copy.deepcopy(model), copy.deepcopy(model)
    run_step(trainer_for(once, mini_batches=2, epochs=2, learning_rate=1e-2), trajectories)
    forced = trainer_for(twice, mini_batches=2, epochs=2, learning_rate=1e-2)
    forced._objective.drops_tokens = True
    run_step(forced, trajectories)
    for name, tensor in once.state_dict().items():
        torch.testing.assert_close(tensor, twice.state_dict()[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("rows", [2, 3, 100])
def test_mini_batch_rows_make_an_update_for_each_part_of_the_rows(model, trajectories, rows):
    count = sum(1 for t in trajectories for s in t.sequences if s.loss_mask[s.shared :].any())
    report = run_step(trainer_for(model, mini_batch_rows=rows, epochs=2, learning_rate=1e-3), trajectories)
    assert report.metrics["train/updates"] == 2 * -(-count // rows)


def test_all_rows_in_one_update_have_the_gradient_of_one_mini_batch(model, trajectories):
    by_rows = copy.deepcopy(model)
    run_step(trainer_for(model, learning_rate=1e-2), trajectories)
    run_step(trainer_for(by_rows, mini_batch_rows=100, learning_rate=1e-2), trajectories)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(by_rows.state_dict()[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def test_a_configured_trainer_trains_as_one_that_was_built_with_the_settings(model, trajectories):
    changed = {"entropy_coef": 0.1, "loss_options": {"clip_high": 0.01}, "shaping": {"length": {"factor": 1.0}}}
    settings = {"learning_rate": 5e-3, "max_grad_norm": 0.5, "epochs": 2}
    built, configured = copy.deepcopy(model), copy.deepcopy(model)
    run_step(trainer_for(built, algorithm(**changed), **settings), trajectories)
    trainer = trainer_for(configured, algorithm(shaping={"length": {"factor": 0.1}}), epochs=2)
    agent = {"max_tokens": 100, "max_answer_tokens": 50}
    trainer.configure(
        Config(
            environment={"name": "a"}, agent=agent, algorithm=algorithm(**changed), trainer=TrainerConfig(**settings)
        )
    )
    run_step(trainer, trajectories)
    for name, tensor in built.state_dict().items():
        assert torch.equal(configured.state_dict()[name], tensor), name


def test_a_configured_trainer_keeps_an_adapted_kl_coefficient(model):
    shaping = {"kl": {"coef": 0.1, "target": 1.0, "horizon": 10}}
    trainer = trainer_for(model, algorithm(shaping=shaping))
    trainer._shaping.kl.coef = 0.05
    trainer.configure(
        Config(
            environment={"name": "a"}, algorithm=algorithm(shaping=shaping, entropy_coef=0.1), trainer=TrainerConfig()
        )
    )
    assert trainer._shaping.kl.coef == 0.05
    assert trainer.signals["reference"]._shaping is trainer._shaping


def test_single_update_needs_no_extra_forward(model, trajectories, monkeypatch):
    calls = []
    monkeypatch.setattr("agentrl.training.forward.runner.ModelRunner.forward", lambda *_, **__: calls.append(1))
    run_step(trainer_for(model), trajectories)
    assert calls == []


def test_measurements_of_an_exact_engine(model, trajectories):
    trainer = trainer_for(model)
    for trajectory in trajectories:
        for sequence in trajectory.sequences:
            (exact,) = compute_logprobs(trainer, [sequence])
            for t, value in zip(sequence.loss_mask[sequence.shared :].nonzero()[0], exact, strict=True):
                sequence._logprobs[int(t)] = float(value)
    report = run_step(trainer, trajectories)
    assert report.metrics["mismatch/prob_abs_max"] < 1e-6
    assert report.metrics["mismatch/effective_sample_size"] == pytest.approx(1.0)
    assert report.metrics["train/kl_old"] == pytest.approx(0.0, abs=1e-9)
    assert report.warnings == ()


def test_a_different_engine_is_an_alarm(model, trajectories):
    report = run_step(trainer_for(model), trajectories)
    assert report.metrics["mismatch/prob_abs_mean"] > 0.01
    assert "trainer and engine disagree" in report.warnings[0]


def test_episodes_without_room_for_a_second_turn_are_an_alarm(model, trajectories):
    for trajectory in trajectories:
        trajectory.outcome = Outcome.TRUNCATED_TOKENS
        for sequence in trajectory.sequences:
            sequence.turns[0].end = sequence.turns[-1].end
            del sequence.turns[1:]
        del trajectory.sequences[1:]
    assert any(
        f"{len(trajectories)} of {len(trajectories)} episodes ran out of tokens in their first turn" in warning
        for warning in run_step(trainer_for(model), trajectories).warnings
    )
    for trajectory in trajectories[: len(trajectories) // 5 + 1]:
        trajectory.outcome = Outcome.FINISHED
    assert not any("ran out" in warning for warning in run_step(trainer_for(model), trajectories).warnings)


def test_non_finite_gradients_skip_the_update(model, trajectories):
    trainer = trainer_for(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    handle = model.model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
    report = run_step(trainer, trajectories)
    handle.remove()
    assert report.metrics["train/updates_skipped"] == 1
    assert "train/grad_norm" not in report.metrics
    assert any("model.norm.weight" in warning for warning in report.warnings)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert run_step(trainer, trajectories).metrics["train/updates"] == 1


def test_weights_change_in_place(model, trajectories):
    """An engine in this process reads the same tensors."""
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    trainer = trainer_for(model)
    run_step(trainer, trajectories)
    restore(trainer, copy.deepcopy(state_of(trainer)))
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name][0]
        assert not torch.equal(parameter, before[name][1]), name


def test_bfloat16(model, trajectories):
    """Short weights, float32 numbers: close to the float32 step, and updated through a float32 copy."""
    exact = run_step(trainer_for(copy.deepcopy(model)), trajectories).metrics
    found = run_step(trainer_for(model.to(torch.bfloat16)), trajectories).metrics
    assert model.dtype == torch.bfloat16
    for name in ("train/loss", "train/entropy", "mismatch/prob_abs_mean"):
        assert found[name] == pytest.approx(exact[name], abs=0.05), name
    assert found["train/grad_norm"] == pytest.approx(exact["train/grad_norm"], rel=0.1)


def test_nan_reward_is_an_error(model, trajectories):
    trajectories[2].reward = math.nan
    with pytest.raises(TrainingError, match="task task-a is not finite"):
        run_step(trainer_for(model), trajectories)


def test_unusable_advantages_are_an_error(model, trajectories):
    with pytest.raises(TrainingError, match=r"estimator .*:nan_advantages returned unusable numbers"):
        run_step(trainer_for(model, algorithm(advantage=f"{__name__}:nan_advantages")), trajectories)


def nan_advantages(episodes):
    return torch.full_like(episodes.token_turn, math.nan, dtype=torch.float64)


def test_wrong_names_and_options_are_found_before_training(model):
    with pytest.raises(UnknownNameError, match="'grpo'"):
        trainer_for(model, algorithm(advantage="grpoo"))
    with pytest.raises(ConfigError, match="clip_high"):
        trainer_for(model, algorithm(loss_options={"clip_hi": 0.3}))
    with pytest.raises(ConfigError, match="symmetric"):
        trainer_for(model, algorithm(loss_options={"clip": 0.2, "clip_low": 0.1}))


def test_reference_stays_where_it_was(model, trajectories):
    trainer = trainer_for(model, algorithm(kl_coef=0.1), learning_rate=1e-2)
    first = run_step(trainer, trajectories).metrics["train/kl_reference"]
    second = run_step(trainer, trajectories).metrics["train/kl_reference"]
    assert first == pytest.approx(0.0, abs=1e-6)
    assert second > 1e-4


def test_resume_is_exact(model, trajectories, tmp_path):
    config, settings = (
        algorithm(kl_coef=0.01),
        {
            "epochs": 2,
            "mini_batches": 3,
            "learning_rate": 1e-2,
            "warmup_steps": 3,
            "schedule": "cosine",
            "steps": 4,
        },
    )
    base, other = copy.deepcopy(model), copy.deepcopy(model)
    undisturbed = trainer_for(model, config, reference=base, **settings)
    for _ in range(2):
        run_step(undisturbed, trajectories)
    torch.save(state_of(undisturbed), tmp_path / "state.pt")
    resumed = trainer_for(other, config, reference=base, **settings)
    restore(resumed, torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(2):
        expected, found = run_step(undisturbed, trajectories), run_step(resumed, trajectories)
        assert _without_time(found.metrics) == _without_time(expected.metrics)
    assert resumed.steps == 4
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def _without_time(metrics):
    return {name: value for name, value in metrics.items() if name not in ("train/seconds", "train/tokens_per_s")}


@pytest.mark.parametrize(("budget", "checkpointing"), [(10_000, False), (10_000, True), (45, False)])
def test_shared_prefixes_change_no_gradient(model, make_trajectory, monkeypatch, budget, checkpointing):
    """The members of a group have sampled the same until some of them stopped; one of them has a branch."""
    monkeypatch.setattr("agentrl.training.forward.layout.MIN_SHARED_TOKENS", 2)
    trajectories = [
        make_trajectory(random.Random(group), group, member, turns=member + 1, reward=float(member))
        for group in ("a", "b")
        for member in range(3)
    ]
    branch = trajectories[2].sequences[0].fork(trajectories[2].turns[0].end)
    branch.extend([3, 4], Source.OBSERVATION)
    branch.extend_sampled([5, 6], logprobs=[-1.0, -2.0], versions=[0, 0])
    branch.turns.append(Turn(index=3, start=len(branch) - 2, end=len(branch)))
    trajectories[2].sequences.append(branch)
    config = algorithm(entropy_coef=0.1)
    alone, expected = gradient_of_step(model, trajectories, config, tokens_per_micro_batch=1)
    report, found = gradient_of_step(
        model,
        trajectories,
        config,
        tokens_per_micro_batch=budget,
        share_prefixes=True,
        gradient_checkpointing=checkpointing,
    )
    assert_same_gradient(found, expected)
    assert report.metrics["train/loss"] == pytest.approx(alone.metrics["train/loss"], abs=1e-6)
    assert report.metrics["train/tokens_saved"] > 0.2
    assert alone.metrics["train/tokens_saved"] == 0
