"""An implicit process reward model against a float64 reference, what it learns, and how it goes on."""

import copy

import pytest
import torch
from support.trainers import restore, state_of
from torch.nn import functional

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.training.trainer import Trainer

BETA = 0.3
PRIME = AlgorithmConfig(advantage="prime", loss="reinforce", correction={"mode": "off"}, group_size=2)


def trainer_for(model, models=None, *, judge=None, algorithm=PRIME, **settings):
    judge = {"beta": BETA, "learning_rate": 1e-2, **(judge or {})}
    config = TrainerConfig(**{"learning_rate": 1e-3, "max_grad_norm": 1e9, "process_reward": judge, **settings})
    return Trainer(model, algorithm, config, seed=0, max_tokens=100, signal_models=models)


def run_step(trainer, trajectories):
    return trainer.step(trajectories, temperature=0.7).metrics


def changed(model, factor):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(factor)
    return other


def log_ratios(trained, start, trajectory):
    """log pi_rm / pi_ref of the sampled tokens of an episode: one list for each sequence."""
    found = []
    for sequence in trajectory.sequences:
        ids, where = torch.from_numpy(sequence.token_ids).long(), torch.from_numpy(sequence.loss_mask).nonzero()[:, 0]
        own, other = (model(ids[None]).logits[0].log_softmax(-1)[where - 1, ids[where]] for model in (trained, start))
        found.append(own - other.detach())
    return found


def spied(trainer):
    """What the estimator and the model's optimizer are given in the next step."""
    seen, estimate, update = {}, trainer._objective.estimate, trainer.signals["process_reward"].optimizer.update

    def estimated(episodes):
        seen["rewards"] = episodes.process_reward
        return estimate(episodes)

    def updated():
        parameters = trainer.signals["process_reward"].model.named_parameters()
        seen["gradients"] = {name: p.grad.double().clone() for name, p in parameters}
        return update()

    trainer._objective.estimate, trainer.signals["process_reward"].optimizer.update = estimated, updated
    return seen


@pytest.mark.parametrize("layout", [{}, {"tokens_per_micro_batch": 20}, {"gradient_checkpointing": True, "lanes": 2}])
def test_loss_and_token_rewards_equal_the_float64_reference(model, trajectories, layout):
    """One episode is in two sequences and one in a fork: its logit is the sum over both."""
    models = {"process_reward": changed(model, 1.1), "process_reward_start": changed(model, 1.2).requires_grad_(False)}
    trained, start = (
        copy.deepcopy(models["process_reward"]).double(),
        copy.deepcopy(models["process_reward_start"]).double(),
    )
    trainer = trainer_for(model, models, judge={"update": "after", "success_above": 0.6}, **layout)
    seen = spied(trainer)
    metrics = run_step(trainer, trajectories)

    ratios = [log_ratios(trained, start, trajectory) for trajectory in trajectories]
    success = torch.tensor([float(t.reward > 0.6) for t in trajectories], dtype=torch.float64)
    assert 0 < success.mean() < 1
    logits = torch.stack([BETA * sum(part.sum() for part in own) for own in ratios])
    loss = functional.binary_cross_entropy_with_logits(logits, success)
    loss.backward()
    rewards = BETA * torch.cat([part for own in ratios for part in own]).detach()
    torch.testing.assert_close(seen["rewards"], rewards, atol=2e-6, rtol=1e-4)
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(seen["gradients"][name], parameter.grad, atol=2e-6, rtol=1e-4, msg=name)
    assert metrics["process_reward/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["process_reward/accuracy"] == pytest.approx(float(((logits > 0) == (success > 0.5)).double().mean()))
    assert metrics["process_reward/token_mean"] == pytest.approx(rewards.mean().item(), rel=1e-4)
    assert metrics["process_reward/successes"] == pytest.approx(success.mean().item())


def test_it_scores_with_what_it_has_just_learnt(model, trajectories):
    rewards = {}
    for order in ("before", "after"):
        trainer = trainer_for(copy.deepcopy(model), judge={"update": order})
        seen = spied(trainer)
        run_step(trainer, trajectories)
        rewards[order] = seen["rewards"]
    assert not rewards["after"].any()
    assert rewards["before"].abs().min() > 0


def test_it_learns_to_tell_the_good_episodes(model, trajectories):
    for number, trajectory in enumerate(trajectories):
        trajectory.reward = trajectory.turns[-1].reward = float(number % 2)
    trainer = trainer_for(model, learning_rate=0.0)
    seen = spied(trainer)
    first = run_step(trainer, trajectories)
    assert first["process_reward/loss"] == pytest.approx(0.6931, abs=1e-4)
    for _ in range(12):
        last = run_step(trainer, trajectories)
    assert last["process_reward/accuracy"] == 1
    assert last["process_reward/loss"] < 0.1
    per_episode = torch.split(seen["rewards"], [t.sampled_tokens for t in trajectories])
    assert [bool(own.sum() > 0) for own in per_episode] == [bool(t.reward) for t in trajectories]


@pytest.mark.parametrize("saved_as", ["state", "folder"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_model_goes_on_bit_for_bit(model, trajectories, tmp_path, dtype, saved_as):
    model = model.to(getattr(torch, dtype))
    start = copy.deepcopy(model).requires_grad_(False)
    undisturbed = trainer_for(model, mini_batches=2)
    run_step(undisturbed, trajectories)
    own = {"process_reward": copy.deepcopy(start).requires_grad_(), "process_reward_start": start}
    if saved_as == "folder":
        undisturbed.checkpoint.save(tmp_path)
        resumed = trainer_for(copy.deepcopy(model), own, mini_batches=2)
        resumed.checkpoint.load(tmp_path)
    else:
        state = copy.deepcopy(state_of(undisturbed))
        resumed = trainer_for(copy.deepcopy(start).requires_grad_(), own, mini_batches=2)
        restore(resumed, state)
    expected, found = run_step(undisturbed, trajectories), run_step(resumed, trajectories)
    assert {k: v for k, v in found.items() if "time" not in k and "per_s" not in k and "seconds" not in k} == {
        k: v for k, v in expected.items() if "time" not in k and "per_s" not in k and "seconds" not in k
    }
    models = (trainer.signals["process_reward"].model for trainer in (undisturbed, resumed))
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_belongs_to_a_run_with_such_a_model(model, trajectories, tmp_path):
    with_one = trainer_for(copy.deepcopy(model))
    without = Trainer(copy.deepcopy(model), AlgorithmConfig(), TrainerConfig(), seed=0, max_tokens=100)
    for trainer, folder in ((with_one, tmp_path / "with"), (without, tmp_path / "without")):
        run_step(trainer, trajectories)
        folder.mkdir()
        trainer.checkpoint.save(folder)
    with pytest.raises(UsageError, match=r"checkpoint contains a process reward: got no trainer\.process_reward"):
        without.checkpoint.load(tmp_path / "with")
    with pytest.raises(UsageError, match="checkpoint does not contain a process reward model"):
        with_one.checkpoint.load(tmp_path / "without")


def test_a_model_and_who_reads_it_belong_together(model):
    for algorithm, settings, message in (
        (PRIME, {}, r"prime needs the rewards of an implicit .*got no trainer\.process_reward"),
        (AlgorithmConfig(), {"process_reward": {}}, r"process_reward is ignored: the estimator grpo reads no"),
    ):
        with pytest.raises(ConfigError, match=message):
            Trainer(model, algorithm, TrainerConfig(**settings), seed=0, max_tokens=100)
    other = copy.deepcopy(model)
    other.config.vocab_size += 1
    with pytest.raises(UsageError, match="vocabulary of the process reward's model differs"):
        trainer_for(model, {"process_reward": other, "process_reward_start": other})
