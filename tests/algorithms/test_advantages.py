"""Each estimator against numbers from a reference that loops over episodes, turns and tokens in plain Python."""

import statistics

import pytest
import torch

from agentrl.algorithms.segments import segment_mean, segment_std, whiten
from agentrl.algorithms.traits import compares_group
from agentrl.algorithms.types import EpisodeBatch
from agentrl.registry import Kind, lookup

# Per episode: its group, and its turns as (reward, sampled tokens). Groups of 3 and 2, unequal lengths, a turn whose
# reward is not at the end, and an episode whose first turn has no token left.
EPISODES = [
    ("a", [(0.0, 2), (1.0, 3)]),
    ("b", [(0.25, 1)]),
    ("a", [(0.5, 4)]),
    ("a", [(0.0, 0), (-0.5, 2), (0.0, 1)]),
    ("b", [(0.0, 3), (0.75, 2)]),
]
RETURNS = [sum(reward for reward, _ in turns) for _, turns in EPISODES]


# The state in which each of those turns was taken: 0 by three episodes, 2 twice by the same one, 3 by two, others once.
STATES = [0, 1, 3, 0, 0, 2, 2, 4, 3]


def batch(episodes=EPISODES):
    names = sorted({group for group, _ in episodes})
    turns = [(e, reward, tokens) for e, (_, own) in enumerate(episodes) for reward, tokens in own]
    return EpisodeBatch(
        returns=torch.tensor([sum(r for r, _ in own) for _, own in episodes], dtype=torch.float64),
        group=torch.tensor([names.index(group) for group, _ in episodes]),
        turn_reward=torch.tensor([reward for _, reward, _ in turns], dtype=torch.float64),
        turn_episode=torch.tensor([e for e, _, _ in turns]),
        turn_state=torch.tensor(STATES if episodes is EPISODES else list(range(len(turns)))),
        token_turn=torch.tensor([k for k, (_, _, tokens) in enumerate(turns) for _ in range(tokens)]),
    )


def test_no_state_of_the_example_is_shared_by_groups():
    example = batch()
    owners = {(s, int(example.group[e])) for s, e in zip(STATES, example.turn_episode.tolist(), strict=True)}
    assert len(owners) == len(set(STATES))


def siblings(e):
    return [RETURNS[i] for i, (group, _) in enumerate(EPISODES) if group == EPISODES[e][0]]


def per_token(values):
    return [values[e] for e, (_, turns) in enumerate(EPISODES) for _, tokens in turns for _ in range(tokens)]


def returns_to_go(gamma, *, over_tokens):
    """G_t token by token: rewards on the last token of a turn, a step of gamma per token or per turn."""
    found = []
    for _, turns in EPISODES:
        tokens, running = [], 0.0
        for reward, count in reversed(turns):
            running = reward + (running if over_tokens else gamma * running)
            for j in range(count):
                running = running * gamma if over_tokens and j > 0 else running
                tokens.append(running)
            running = running * gamma if over_tokens and count else running
        found += reversed(tokens)
    return found


def against_state(gamma):
    """Per token: the discounted return from its turn on, standardized among the turns taken in the same state."""
    returns, tokens = [], []
    for _, turns in EPISODES:
        running, own = 0.0, []
        for reward, count in reversed(turns):
            running = reward + gamma * running
            own.append((running, count))
        returns += [value for value, _ in reversed(own)]
        tokens += [count for _, count in reversed(own)]
    found = []
    for state, value, count in zip(STATES, returns, tokens, strict=True):
        peers = [r for s, r in zip(STATES, returns, strict=True) if s == state]
        std = statistics.stdev(peers) if len(peers) > 1 else 0.0
        found += [(value - statistics.fmean(peers)) / (std + 1e-6)] * count
    return found


def whitened(values):
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return [(value - mean) / (std + 1e-6) for value in values]


CENTRED = [RETURNS[e] - statistics.fmean(siblings(e)) for e in range(len(EPISODES))]
EXPECTED = {
    "grpo": per_token([CENTRED[e] / (statistics.stdev(siblings(e)) + 1e-6) for e in range(len(EPISODES))]),
    "dr_grpo": per_token(CENTRED),
    "rloo": per_token(
        [RETURNS[e] - (sum(siblings(e)) - RETURNS[e]) / (len(siblings(e)) - 1) for e in range(len(EPISODES))]
    ),
    "gigpo": [
        whole + step
        for whole, step in zip(
            per_token([CENTRED[e] / (statistics.stdev(siblings(e)) + 1e-6) for e in range(len(EPISODES))]),
            against_state(0.95),
            strict=True,
        )
    ],
    "reinforce": returns_to_go(1.0, over_tokens=False),
    "reinforce++": whitened(returns_to_go(1.0, over_tokens=True)),
    "reinforce++_baseline": whitened(per_token(CENTRED)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_estimator_equals_the_reference(name):
    advantages = lookup(Kind.ADVANTAGE, name)(batch())
    assert advantages.tolist() == pytest.approx(EXPECTED[name], abs=1e-12)


def test_grpo_by_hand():
    # returns of group a: 1, 0.5, -0.5; mean 1/3; unbiased std sqrt((4/9 + 1/36 + 25/36) / 2) = 0.763763
    advantages = lookup(Kind.ADVANTAGE, "grpo")(batch())
    assert advantages[0].item() == pytest.approx((2 / 3) / 0.7637636158, abs=1e-6)
    assert len(set(advantages[:5].tolist())) == 1


def test_gigpo_by_hand():
    # two episodes of a group begin in state 0 and gain 1 there, one after one more turn; state 1 is met once
    episodes = EpisodeBatch(
        returns=torch.tensor([1.0, 1.0], dtype=torch.float64),
        group=torch.tensor([0, 0]),
        turn_reward=torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64),
        turn_episode=torch.tensor([0, 0, 1]),
        turn_state=torch.tensor([0, 1, 0]),
        token_turn=torch.tensor([0, 0, 1, 2]),
    )
    gigpo = lookup(Kind.ADVANTAGE, "gigpo")
    assert gigpo(episodes, gamma=0.5, normalize=False).tolist() == [-0.25, -0.25, 0.0, 0.25]
    assert gigpo(episodes, gamma=0.5, omega=2.0).tolist() == pytest.approx([-(2**0.5)] * 2 + [0.0, 2**0.5], abs=1e-5)
    assert gigpo(episodes, gamma=1.0).abs().max() == 0.0  # who arrives sooner is no better without a discount


def test_reinforce_discounts_turns():
    advantages = lookup(Kind.ADVANTAGE, "reinforce")(batch(), gamma=0.5)
    assert advantages.tolist() == pytest.approx(returns_to_go(0.5, over_tokens=False), abs=1e-12)
    assert advantages[:5].tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]


def test_reinforce_plus_plus_discounts_tokens():
    advantages = lookup(Kind.ADVANTAGE, "reinforce++")(batch(), gamma=0.5)
    raw = returns_to_go(0.5, over_tokens=True)
    assert raw[:5] == [0.0625, 0.125, 0.25, 0.5, 1.0]
    assert advantages.tolist() == pytest.approx(whitened(raw), abs=1e-12)


def test_equal_returns_give_no_advantage():
    # eight times 0.1 in floating point: mean - 0.1 must not be blown up by the division by 1e-6
    episodes = batch([("a", [(0.1, 2)]) for _ in range(7)])
    assert lookup(Kind.ADVANTAGE, "grpo")(episodes).abs().max().item() < 1e-9


@pytest.mark.parametrize("name", EXPECTED)
def test_only_group_baselines_need_a_group(name):
    assert compares_group.of(lookup(Kind.ADVANTAGE, name)) == (name not in {"reinforce", "reinforce++"})


def test_segments_by_hand():
    values, segment = torch.tensor([1.0, 2.0, 6.0, 5.0]), torch.tensor([0, 0, 0, 2])
    assert segment_mean(values, segment, 3).tolist() == [3.0, 0.0, 5.0]
    assert segment_std(values, segment, 3).tolist() == pytest.approx([7**0.5, 0.0, 0.0])


def test_whitening_one_value_gives_zero():
    assert whiten(torch.tensor([3.0])).tolist() == [0.0]
