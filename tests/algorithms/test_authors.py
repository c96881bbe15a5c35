"""Values that the authors' code gives for random inputs.

`authors.json` holds inputs, and the values that the code at ``source`` (repository@commit, path) computed from them.
"""

import json
from pathlib import Path

import pytest
import torch

from agentrl.algorithms.types import EpisodeBatch
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


@cases("graphgpo")
@pytest.mark.parametrize(("mode", "normalize"), [("mean_std_norm", True), ("mean_norm", False)])
def test_graphgpo(case, mode, normalize):
    """The part of single turns; that of whole episodes is ours, with each episode counted once, not once per turn."""
    graphgpo, whole = lookup(Kind.ADVANTAGE, "graphgpo"), "grpo" if normalize else "dr_grpo"
    episodes = episodes_of(case)
    found = graphgpo(episodes, normalize=normalize) - lookup(Kind.ADVANTAGE, whole)(episodes)
    assert_equal(found, case["advantages"][mode], 1e-5)
