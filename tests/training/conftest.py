"""A tiny model and trajectories to train it on."""

import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.errors import Outcome
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

sys.path.append(str(Path(__file__).parent))  # for ranks_here
sys.path.append(str(Path(__file__).parents[1] / "algorithms"))  # for loss_loops

VOCABULARY = 40


@pytest.fixture
def model():
    """Two layers, float32, on the CPU; the same weights in every test."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Qwen3ForCausalLM(config).eval()


@pytest.fixture
def make_trajectory():
    return build_trajectory


@pytest.fixture
def trajectories():
    return build_trajectories()


@pytest.fixture(scope="module")
def module_trajectories():
    return build_trajectories()


def build_trajectories():
    """Three groups of 3, 2 and 2: unequal lengths, observations in between, one trajectory in two sequences, a fork."""
    rng = random.Random(3)
    sizes = {"a": 3, "b": 2, "c": 2}
    found = [
        build_trajectory(rng, group, member, turns=rng.randint(1, 4), reward=rng.choice([0.0, 0.5, 1.0]) + 0.1 * member)
        for group, size in sizes.items()
        for member in range(size)
    ]
    add_sequence(rng, found[0], turns=2)
    add_fork(rng, found[3])
    return found


def build_trajectory(rng, group, member, *, turns=2, reward=0.0, outcome=Outcome.FINISHED):
    trajectory = Trajectory(
        id=f"{group}-{member}", task_id=f"task-{group}", environment="maze", seed=0, group_id=group, outcome=outcome
    )
    add_sequence(rng, trajectory, turns=turns)
    trajectory.turns[-1].reward = trajectory.reward = reward
    trajectory.reward_components = {"right": reward, "short": rng.random()}
    return trajectory


def add_sequence(rng, trajectory, *, turns):
    sequence = TokenSequence()
    sequence.extend(ids(rng, 1, 9), Source.PROMPT)
    trajectory.sequences.append(sequence)
    for _ in range(turns):
        add_turn(rng, trajectory, sequence)


def add_turn(rng, trajectory, sequence):
    answer = ids(rng, 1, 6)
    start, index = len(sequence), len(trajectory.turns)
    sequence.extend_sampled(answer, logprobs=[rng.uniform(-6, -1) for _ in answer], versions=[0] * len(answer))
    sequence.turns.append(Turn(index=index, start=start, end=len(sequence)))
    sequence.extend(ids(rng, 1, 7), Source.OBSERVATION)


def add_fork(rng, trajectory):
    """Rewrite history after the first turn: the child shares the prompt and the first answer."""
    parent = trajectory.sequences[0]
    child = parent.fork(parent.turns[0].end)
    child.extend(ids(rng, 2, 4), Source.OBSERVATION)
    trajectory.sequences.append(child)
    add_turn(rng, trajectory, child)


def ids(rng, low, high):
    return [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(low, high))]
