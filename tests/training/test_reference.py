"""A reference that is refreshed from the policy: self-play in rounds."""

import copy

import pytest
import torch
from support.trainers import restore, state_of

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.training.signals.reference import ReferenceModel
from agentrl.training.trainer import Trainer

SPPO = {"advantage": "reinforce", "loss": "sppo", "correction": {"mode": "off"}, "group_size": 3}


def trainer_for(model, *, every=2, reference=None, **algorithm):
    config = AlgorithmConfig(**{**SPPO, "reference": {"refresh_every": every}, **algorithm})
    return Trainer(
        model, config, TrainerConfig(learning_rate=1e-3), seed=0, max_tokens=100, signal_models={"reference": reference}
    )


def run_step(trainer, trajectories):
    metrics = trainer.step(trajectories, temperature=1.0).metrics
    return {name: metrics[name] for name in ("train/loss", "train/reference_round", "train/grad_norm")}


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_each_round_plays_against_the_final_policy_of_the_previous_one(model, trajectories):
    """At the start of a round log pi / pi_ref is 0, so that the loss is the mean over sequences of (R - 1/2)^2."""
    trainer = trainer_for(model)
    sequences = sum(len(t.sequences) for t in trajectories)
    expected = sum(len(t.sequences) * (t.reward - 0.5) ** 2 for t in trajectories) / sequences
    seen = []
    for number in range(5):
        before = weights(model)
        seen.append(run_step(trainer, trajectories))
        if number % 2 == 0:
            assert seen[-1]["train/loss"] == pytest.approx(expected, rel=1e-4)
            opponent = before
        assert all(map(torch.equal, trainer.signals["reference"].runner.model.parameters(), opponent))
    assert [line["train/reference_round"] for line in seen] == [1, 1, 2, 2, 3]
    assert seen[1]["train/loss"] != pytest.approx(expected, rel=1e-4)


def test_the_share_of_the_groups_others_that_an_episode_beats(model, trajectories):
    by_group = {}
    for trajectory in trajectories:
        by_group.setdefault(trajectory.group_id, []).append(trajectory.reward)
    total = 0.0
    for trajectory in trajectories:
        rewards = by_group[trajectory.group_id]
        wins = sum((trajectory.reward > r) + 0.5 * (trajectory.reward == r) for r in rewards) - 0.5
        total += len(trajectory.sequences) * (wins / (len(rewards) - 1) - 0.5) ** 2
    expected = total / sum(len(t.sequences) for t in trajectories)
    found = run_step(trainer_for(model, shaping={"win_rate": {}}), trajectories)
    assert found["train/loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("saved_as", ["state", "folder"])
def test_a_resumed_round_goes_on_bit_for_bit(model, trajectories, tmp_path, saved_as):
    start = copy.deepcopy(model).requires_grad_(False)
    undisturbed = trainer_for(model)
    for _ in range(3):  # the fourth is in the second round, and the fifth begins the third
        run_step(undisturbed, trajectories)
    policy = copy.deepcopy(model)
    if saved_as == "folder":
        undisturbed.checkpoint.save(tmp_path)
        resumed = trainer_for(policy, reference=copy.deepcopy(start))
        resumed.checkpoint.load(tmp_path)
    else:
        state = copy.deepcopy(state_of(undisturbed))
        resumed = trainer_for(policy, reference=copy.deepcopy(start))
        restore(resumed, state)
    assert [run_step(resumed, trajectories) for _ in range(2)] == [
        run_step(undisturbed, trajectories) for _ in range(2)
    ]
    assert all(map(torch.equal, weights(policy), weights(model)))
    with pytest.raises(UsageError, match=r"got no algorithm\.reference\.refresh_every"):
        restore(trainer_for(copy.deepcopy(model), every=0), copy.deepcopy(state_of(undisturbed)))


def test_rounds_without_anything_to_renew_are_refused(model):
    with pytest.raises(ConfigError, match=r"refresh_every is ignored.*got algorithm\.loss ppo"):
        trainer_for(model, loss="ppo")
    config = AlgorithmConfig(**SPPO, reference={"refresh_every": 2})
    with pytest.raises(ConfigError, match="reference of adapters is the model without them"):
        ReferenceModel.check(config, TrainerConfig(), has_adapters=True)
