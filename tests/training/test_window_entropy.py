"""The reward for uncertain passages (ARES): which tokens count, and that a step gets it."""

import copy
import dataclasses

import pytest
import torch

from agentrl.algorithms.entropy_shaping import EntropyShaping
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import ConfigError
from agentrl.training.trainer import Trainer


def test_tokens_before_passages_of_their_turn_are_counted():
    """Windows of 2; the threshold is the median over episodes of the largest mean: 2 and 5."""
    entropy = torch.tensor([9.0, 1.0, 3.0, 0.0, 9.0, 4.0, 6.0, 2.0, 8.0, 8.0])
    turn = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    found = EntropyShaping(window=2, percentile=1.0).count(entropy, turn, torch.tensor([0] * 4 + [1] * 6), 3)
    assert found.threshold == pytest.approx(3.5)
    assert found.counts.tolist() == [0, 2, 0]
    short = EntropyShaping(window=4).count(entropy[:4], turn[:4], torch.zeros(4, dtype=torch.int64), 1)
    assert short.counts.tolist() == [0]
    assert short.threshold == float("inf")


def test_a_step_adds_the_rewards_to_the_returns(model, trajectories):
    solved = [dataclasses.replace(each, success=bool(each.reward and each.reward > 0.5)) for each in trajectories]
    config = AlgorithmConfig(advantage="grpo", shaping={"ares": {"window": 1, "percentile": 0.5}})
    trainer = Trainer(copy.deepcopy(model), config, TrainerConfig(), seed=0, max_tokens=100)
    signal, seen = trainer.signals["window_entropy"], []
    annotate = signal.annotate
    signal.annotate = lambda batch: seen.append((batch, annotate(batch))) or seen[-1][1]
    report = trainer.step(solved, temperature=1.0)
    ((before, after),) = seen
    added = after.episodes.returns - before.episodes.returns
    assert report.metrics["ares/reward"] == pytest.approx(float(added.mean()))
    assert report.metrics["ares/uncertain_tokens"] > 0
    assert float(added.abs().max()) > 0
    own = after.episodes.turn_reward - before.episodes.turn_reward
    sums = torch.zeros_like(added).index_add(0, after.episodes.turn_episode, own)
    torch.testing.assert_close(sums, added)


@pytest.mark.parametrize(("option", "value"), [("window", 0), ("percentile", 1.5), ("weight", -1)])
def test_options_out_of_range(option, value):
    config = AlgorithmConfig(shaping={"ares": {option: value}})
    with pytest.raises(ConfigError, match=f"option {option} is out of range"):
        Trainer(torch.nn.Linear(1, 1), config, TrainerConfig(), seed=0, max_tokens=100)
