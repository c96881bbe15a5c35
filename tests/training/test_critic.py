"""PPO with a critic against a float64 reference, and what must not change it."""

import copy
import dataclasses

import pytest
import torch
from support.trainers import restore, state_of

from agentrl.algorithms.types import Estimate
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import ConfigError, TrainingError, UsageError
from agentrl.training.forward.runner import SumsByName
from agentrl.training.signals.critic import ValueTargets
from agentrl.training.trainer import Trainer

KINDS = ("own", "shared")
GAMMA, LAMBDA, COEF = 0.97, 0.9, 0.5
GAE = {"advantage": "gae", "advantage_options": {"gamma": GAMMA, "gae_lambda": LAMBDA}, "group_size": 1}


def trainer_for(model, kind, algorithm=None, *, critic=None, own=None, **settings):
    """Plain steps: the gradient is what a test reads, so nothing is clipped. The head is not 0."""
    critic = {"kind": kind, "learning_rate": 1e-2, **(critic or {})}
    config = TrainerConfig(**{"learning_rate": 1e-3, "max_grad_norm": 1e9, "critic": critic, **settings})
    algorithm, models = AlgorithmConfig(**{**GAE, **(algorithm or {})}), {"critic": own}
    trainer = Trainer(model, algorithm, config, seed=0, max_tokens=100, signal_models=models)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in trainer.signals["critic"].head.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return trainer


def run_step(trainer, trajectories):
    return trainer.step(trajectories, temperature=1.0)


def gradients_of_step(model, trajectories, kind, **settings):
    """The gradients of one update, read just before they would be applied."""
    trainer, seen = trainer_for(copy.deepcopy(model), kind, **settings), {}
    critic = trainer.signals["critic"]
    parts = {"policy": (trainer._optimizer, trainer.model), "head": (critic.head_optimizer, critic.head)}
    if kind == "own":
        parts["trunk"] = (critic.trunk_optimizer, critic.trunk)
    for name, (optimizer, module) in parts.items():
        record(optimizer, module, f"{name}/", seen)
    return run_step(trainer, trajectories), seen


def record(optimizer, module, prefix, seen):
    update = optimizer.update

    def updated():
        seen.update({prefix + name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
        return update()

    optimizer.update = updated


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].double(), gradient.double(), atol=2e-6, rtol=2e-5, msg=name)


def tokens_of(model, head, trajectory):
    """(turn, V, log pi, log mu, reward) of each sampled token, in the order of time."""
    found, order = [], {id(turn): k for k, turn in enumerate(trajectory.turns)}
    rewards = [turn.reward for turn in trajectory.turns]
    rewards[-1] += trajectory.reward - sum(rewards)
    for sequence in trajectory.sequences:
        ids = torch.from_numpy(sequence.token_ids).long()
        hidden = model.base_model(ids[None]).last_hidden_state[0]
        logp = model.lm_head(hidden).log_softmax(-1)
        values = hidden @ head["head/weight"] + head["head/bias"]
        for turn in sequence.turns:
            for t in range(turn.start, turn.end):
                reward = rewards[order[id(turn)]] if t == turn.end - 1 else 0.0
                own = (order[id(turn)], values[t - 1], logp[t - 1, ids[t]], float(sequence.logprobs[t]), reward)
                found.append(own)
    return sorted(found, key=lambda token: token[0])


def reference(model, trainer, trajectories):
    """GAE, PPO at ratio 1 with token TIS, and 1/2 (v - G)^2: loops in float64. Gradients of both losses."""
    model = copy.deepcopy(model).double()
    head = {
        f"head/{name}": p.detach().double().requires_grad_()
        for name, p in trainer.signals["critic"].head.named_parameters()
    }
    tokens, sums = [], []
    for trajectory in trajectories:
        own, later, following, backwards = tokens_of(model, head, trajectory), 0.0, 0.0, []
        for _, value, _, _, reward in reversed(own):
            later = reward + GAMMA * following - value.item() + GAMMA * LAMBDA * later
            following = value.item()
            backwards.append(later)
        tokens += own
        sums += reversed(backwards)
    advantage = torch.tensor(sums, dtype=torch.float64)
    whitened = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    policy = [
        -(logp.detach() - mu).exp().clamp(max=2.0) * a * (logp - logp.detach()).exp()
        for (_, _, logp, mu, _), a in zip(tokens, whitened, strict=True)
    ]
    values = [(token[1] - token[1].item() - a).square() / 2 for token, a in zip(tokens, advantage, strict=True)]
    losses = torch.stack(policy).mean(), torch.stack(values).mean()
    return losses, [gradients_of(loss, {**dict(model.named_parameters()), **head}) for loss in losses]


def gradients_of(loss, parameters):
    found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
    return dict(zip(parameters, found, strict=True))


def test_gradients_equal_the_float64_reference(model, trajectories):
    (policy, value), (by_policy, by_value) = reference(model, trainer_for(copy.deepcopy(model), "own"), trajectories)
    head = {name: gradient for name, gradient in by_value.items() if name.startswith("head/")}
    trunk = {name: gradient for name, gradient in by_value.items() if name not in head}

    report, found = gradients_of_step(model, trajectories, "own")
    expected = {f"policy/{name}": by_policy[name] for name in trunk}
    assert_same(found, {**expected, **head, **{f"trunk/{name}": gradient for name, gradient in trunk.items()}})
    assert report.metrics["train/loss"] == pytest.approx(policy.item(), abs=1e-6)
    assert report.metrics["critic/loss"] == pytest.approx(value.item(), abs=1e-6)

    report, found = gradients_of_step(model, trajectories, "shared", critic={"coef": COEF})
    both = {f"policy/{name}": by_policy[name] + COEF * gradient for name, gradient in trunk.items()}
    assert_same(found, {**both, **{name: COEF * gradient for name, gradient in head.items()}})
    assert report.metrics["train/loss"] == pytest.approx((policy + COEF * value).item(), abs=1e-6)
    assert report.metrics["critic/loss"] == pytest.approx(value.item(), abs=1e-6)


LAYOUTS = {
    "padded": {},
    "micro-batches": {"tokens_per_micro_batch": 40},
    "shared prefixes": {"share_prefixes": True, "tokens_per_micro_batch": 120},
    "lanes": {"tokens_per_micro_batch": 40, "lanes": 2},
    "recomputed": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_no_gradient(model, trajectories, monkeypatch, kind, layout):
    alone, expected = gradients_of_step(model, trajectories, kind, tokens_per_micro_batch=1)
    monkeypatch.setattr("agentrl.training.forward.layout.MIN_SHARED_TOKENS", 2)
    if layout == "padded":
        monkeypatch.setattr("agentrl.training.forward.layout._packs_well", lambda _: False)
    report, found = gradients_of_step(model, list(reversed(trajectories)), kind, **LAYOUTS[layout])
    assert_same(found, expected)
    for name, value in alone.metrics.items():
        if name.startswith("critic/"):
            assert report.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_the_clipped_loss_of_a_part_by_hand():
    """Of three tokens one has no target; the value of another has moved too far to be rewarded."""
    targets = ValueTargets(
        old_values=torch.tensor([0.0, 0.0, 1.0]), targets=torch.tensor([2.0, torch.nan, 2.0]), clip=0.5
    )
    weights = targets.weights(torch.tensor([0, 1, 2]))
    assert weights.tolist() == [0.5, 0.0, 0.5]
    values = torch.tensor([1.0, 9.0, 1.25], requires_grad=True)
    tally = SumsByName()
    loss = targets.loss(values, torch.tensor([0, 1, 2]), weights, tally)
    loss.backward()
    assert loss.item() == pytest.approx(((0.5 - 2.0) ** 2 + (1.25 - 2.0) ** 2) / 4)
    assert values.grad.tolist() == pytest.approx([0.0, 0.0, (1.25 - 2.0) / 2])
    assert tally.means() == {"critic/loss": pytest.approx(loss.item()), "critic/clip_share": 0.5}
    assert targets.weights(torch.tensor([1])).tolist() == [0.0, 0.0, 0.0]


def test_measurements_by_hand():
    targets = ValueTargets(
        old_values=torch.tensor([0.0, 5.0, 2.0]), targets=torch.tensor([1.0, torch.nan, 5.0]), clip=None
    )
    assert targets.measurements() == {
        "critic/value_mean": 1.0,
        "critic/target_mean": 3.0,
        "critic/explained_variance": pytest.approx(1 - 1.0 / 4.0),
    }
    equal = dataclasses.replace(targets, targets=torch.tensor([1.0, torch.nan, 1.0]))
    assert "critic/explained_variance" not in equal.measurements()


@pytest.mark.parametrize("kind", KINDS)
def test_pretraining_leaves_the_policy_bit_for_bit(model, trajectories, kind):
    before = {name: p.clone() for name, p in model.state_dict().items()}
    trainer = trainer_for(model, kind, critic={"pretrain_steps": 2}, mini_batches=2, epochs=2)
    losses = []
    for _ in range(2):
        assert trainer.pretraining
        report = run_step(trainer, trajectories)
        losses.append(report.metrics["critic/loss"])
        assert report.metrics["train/updates"] == 0
        assert report.metrics["mismatch/prob_abs_mean"] > 0
    assert losses[1] < losses[0]
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not trainer.pretraining
    assert run_step(trainer, trajectories).metrics["train/updates"] == 4
    assert not all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_is_too_far_off_stops_the_step(model, trajectories, kind):
    once, limited = copy.deepcopy(model), copy.deepcopy(model)
    run_step(trainer_for(once, kind, learning_rate=1e-2), trajectories)
    trainer = trainer_for(limited, kind, learning_rate=1e-2, epochs=3, max_kl=1e-9)
    report = run_step(trainer, trajectories)
    assert report.metrics["train/updates"] == 1
    assert report.metrics["train/updates_left_out"] == 2
    assert report.metrics["train/kl_stop"] > 1e-9
    for name, tensor in once.state_dict().items():
        assert torch.equal(tensor, limited.state_dict()[name]), name
    taken = trainer.signals["critic"].head_optimizer.updates
    assert taken == (3 if kind == "own" else 1)
    assert all(p.grad is None for p in (*limited.parameters(), *trainer.signals["critic"].head.parameters()))


def test_a_limit_that_is_not_reached_changes_nothing(model, trajectories):
    free, limited = copy.deepcopy(model), copy.deepcopy(model)
    run_step(trainer_for(free, "own", epochs=2), trajectories)
    report = run_step(trainer_for(limited, "own", epochs=2, max_kl=10.0), trajectories)
    assert report.metrics["train/updates_left_out"] == 0
    assert "train/kl_stop" not in report.metrics
    assert all(torch.equal(p, limited.state_dict()[name]) for name, p in free.state_dict().items())


@pytest.mark.parametrize("saved_as", ["state", "folder"])
@pytest.mark.parametrize(("kind", "dtype"), [("own", "float32"), ("own", "bfloat16"), ("shared", "float32")])
def test_a_resumed_critic_goes_on_bit_for_bit(model, trajectories, tmp_path, kind, dtype, saved_as):
    model = model.to(getattr(torch, dtype))
    start = copy.deepcopy(model)
    settings = {"mini_batches": 2, "critic": {"pretrain_steps": 1}}
    undisturbed = trainer_for(model, kind, **settings)
    for _ in range(2):
        run_step(undisturbed, trajectories)
    if saved_as == "folder":
        undisturbed.checkpoint.save(tmp_path)
        resumed = trainer_for(copy.deepcopy(model), kind, own=start if kind == "own" else None, **settings)
        resumed.checkpoint.load(tmp_path)
    else:
        torch.save(state_of(undisturbed), tmp_path / "state.pt")
        resumed = trainer_for(start, kind, **settings)
        restore(resumed, torch.load(tmp_path / "state.pt", weights_only=True))
    expected, found = run_step(undisturbed, trajectories), run_step(resumed, trajectories)
    times = ("train/seconds", "train/tokens_per_s")
    assert all(found.metrics[name] == value for name, value in expected.metrics.items() if name not in times)
    for name, tensor in undisturbed.signals["critic"].named_state().items():
        assert torch.equal(tensor, resumed.signals["critic"].named_state()[name]), name


def test_a_checkpoint_of_another_critic_is_refused(model, trajectories, tmp_path):
    trainer = trainer_for(copy.deepcopy(model), "own")
    trainer.checkpoint.save(tmp_path)
    with pytest.raises(
        UsageError, match=r"another kind of critic: got a state of head, trunk, expected a state of head"
    ):
        trainer_for(copy.deepcopy(model), "shared").checkpoint.load(tmp_path)
    config = AlgorithmConfig()
    without = Trainer(copy.deepcopy(model), config, TrainerConfig(), seed=0, max_tokens=100)
    with pytest.raises(UsageError, match=r"the checkpoint contains a critic: got no trainer\.critic"):
        without.checkpoint.load(tmp_path)
    without.checkpoint.save(tmp_path)
    with pytest.raises(UsageError, match="another kind of critic: got a state of none"):
        trainer.checkpoint.load(tmp_path)


@pytest.mark.parametrize("estimator", ["gae_turn", "bi_level", "vapo"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_estimators_teach_the_critic(model, trajectories, kind, estimator):
    trainer = trainer_for(model, kind, {"advantage": estimator, "advantage_options": {}, "loss": "vapo"})
    losses = [run_step(trainer, trajectories).metrics["critic/loss"] for _ in range(6)]
    assert losses[-1] < losses[0]


def test_one_trajectory_alone_can_train(model, trajectories):
    trainer = trainer_for(model, "own")
    assert trainer.min_members == 1
    report = run_step(trainer, trajectories[:1])
    assert report.metrics["train/grad_norm"] > 0
    assert report.metrics["groups/skipped"] == 0


def test_an_output_head_that_is_no_embedding_stays_as_it_is(model, trajectories):
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    trainer = trainer_for(model, "own")
    run_step(trainer, trajectories)
    assert not trainer.signals["critic"].trunk.lm_head.weight.requires_grad
    assert trainer.model.lm_head.weight.requires_grad
    assert not any("lm_head" in name for name in trainer.signals["critic"].named_state())


def test_an_estimator_without_targets_is_an_error(model, trajectories, monkeypatch):
    trainer = trainer_for(model, "own")
    monkeypatch.setattr(
        trainer._objective, "_estimate", lambda episodes: Estimate(advantage=torch.ones_like(episodes.values))
    )
    with pytest.raises(TrainingError, match="returned no value targets for the critic: got advantages only"):
        run_step(trainer, trajectories)


@pytest.mark.parametrize(
    ("algorithm", "critic", "message"),
    [
        (
            {"advantage": "gae"},
            None,
            r"estimator gae needs a critic: got no trainer\.critic, expected trainer\.critic=",
        ),
        (
            {},
            {},
            r"trainer\.critic is ignored: the advantage estimator grpo reads no values.*bi_level or dqo or gae or",
        ),
    ],
)
def test_a_critic_and_who_reads_it_belong_together(model, algorithm, critic, message):
    config = TrainerConfig(critic=critic)
    with pytest.raises(ConfigError, match=message):
        Trainer(model, AlgorithmConfig(**algorithm), config, seed=0, max_tokens=100)


def test_a_critic_of_another_vocabulary_is_refused(model):
    other = copy.deepcopy(model)
    other.config.vocab_size += 1
    with pytest.raises(
        UsageError, match="vocabulary of the critic's model differs from the policy's: got 41 token ids"
    ):
        trainer_for(model, "own", own=other)
