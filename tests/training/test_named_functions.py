"""A user's own estimators, losses, filters and shapings that are wrong: errors name them, and nothing is broadcast."""

import dataclasses
import math

import pytest
import torch

from agentrl.algorithms.types import TokenLoss, plain_loss
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import ConfigError, TrainingError
from agentrl.registry import Kind, lookup
from agentrl.training.algorithm_functions import check_loss, check_mini_batch_rows
from agentrl.training.trainer import Trainer

HERE = __name__


def takes_nothing():
    return None


def takes_three(token_level_rewards, response_mask, index):
    return token_level_rewards


def raises(_):
    raise KeyError("oops")


def a_list(given):
    return [0.0]


def mean(tokens):
    return plain_loss((-tokens.advantage * tokens.logp).mean())


def bare_tensor(tokens):
    return -tokens.advantage * tokens.logp


def detached(tokens):
    return plain_loss(-tokens.advantage * tokens.logp.detach())


def scalar_clip(tokens):
    return TokenLoss(values=-tokens.logp, clipped=torch.tensor(False))


def no_bools(tokens):
    return torch.ones_like(tokens.logp)


def per_episode(episodes):
    return episodes.returns


def nan_rewards(rewards):
    return dataclasses.replace(rewards, final=rewards.final * math.nan)


NUMBER = 3


def step(model, trajectories, **settings):
    trainer = Trainer(model, AlgorithmConfig(**settings), TrainerConfig(), seed=0, max_tokens=100)
    return trainer.step(trajectories, temperature=1.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "mean"}, "returned values of the wrong shape: got float32 of shape (), 0 not finite, expected shape"),
        (
            {"loss": "bare_tensor"},
            "did not return a TokenLoss: got Tensor, expected agentrl.algorithms.types.plain_loss",
        ),
        ({"loss": "scalar_clip"}, "returned clipped of the wrong shape"),
        ({"loss": "detached"}, "has no gradient: got values that do not depend on logp"),
        ({"loss": "raises"}, "failed: got KeyError: 'oops'. It was raised in"),
        ({"advantage": "raises"}, ': raise KeyError("oops")'),
        ({"advantage": "a_list"}, "returned unusable numbers: got list, expected"),
        ({"advantage": "per_episode"}, "returned unusable numbers: got float64 of shape"),
        ({"filters": {"no_bools": {}}}, "did not return a mask of the tokens to train: got float32"),
        ({"filters": {"raises": {}}}, f"the filter {HERE}:raises failed"),
        ({"shaping": {"nan_rewards": {}}}, "returned unusable rewards: got final: float64 of shape"),
        ({"shaping": {"a_list": {}}}, "did not return rewards: got list"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_under_its_name(model, trajectories, settings, words):
    named = {
        part: f"{HERE}:{name}" if isinstance(name, str) else {f"{HERE}:{own}": {} for own in name}
        for part, name in settings.items()
    }
    with pytest.raises(TrainingError) as caught:
        step(model, trajectories, **named)
    assert HERE in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("part", ["advantage", "loss"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("takes_nothing", "got takes_nothing()"),
        (
            "takes_three",
            "got takes_three(token_level_rewards, response_mask, index), expected a function of one argument",
        ),
        ("NUMBER", "is not a function: got int"),
    ],
)
def test_objects_that_cannot_be_called_are_rejected_before_the_run(model, part, name, words):
    with pytest.raises(ConfigError) as caught:
        Trainer(model, AlgorithmConfig(**{part: f"{HERE}:{name}"}), TrainerConfig(), seed=0, max_tokens=100)
    assert words in str(caught.value)


@pytest.mark.parametrize("loss", ["pacs", "gvpo", "flowrl"])
def test_a_loss_that_compares_episodes_refuses_groups_of_one_and_updates_by_rows(loss):
    with pytest.raises(ConfigError, match=f"the loss {loss} compares the members of a group"):
        check_loss(AlgorithmConfig(loss=loss, group_size=1), lookup(Kind.LOSS, loss))
    with pytest.raises(ConfigError, match="which rows may train in different updates"):
        check_mini_batch_rows(AlgorithmConfig(loss=loss), TrainerConfig(mini_batch_rows=8))
    check_mini_batch_rows(AlgorithmConfig(loss=loss), TrainerConfig(mini_batches=2))
