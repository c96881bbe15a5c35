"""Trajectories with random tokens for training."""

from __future__ import annotations

import random

from agentrl.errors import Outcome
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

GROUP_SIZE = 8


def multi_turn(groups: int, vocabulary: int, seed: int) -> list[Trajectory]:
    """Make groups of 2 to 12 turns: prompts of 60 to 200 tokens, answers of 10 to 40, observations of 20 to 80."""
    generator = random.Random(seed)
    return [
        _trajectory(generator, group, member, prompt, generator.randint(2, 12), (20, 80), vocabulary)
        for group in range(groups)
        for prompt in [_ids(generator, vocabulary, 60, 200)]
        for member in range(GROUP_SIZE)
    ]


def long_prompts(groups: int, vocabulary: int, seed: int) -> list[Trajectory]:
    """Make groups of 1 to 4 turns: prompts of 1,000 tokens, answers of 10 to 40, observations of 10 to 20."""
    generator = random.Random(seed)
    return [
        _trajectory(generator, group, member, prompt, generator.randint(1, 4), (10, 20), vocabulary)
        for group in range(groups)
        for prompt in [_ids(generator, vocabulary, 1000, 1000)]
        for member in range(GROUP_SIZE)
    ]


def _trajectory(
    generator: random.Random,
    group: int,
    member: int,
    prompt: list[int],
    turns: int,
    observation: tuple[int, int],
    vocabulary: int,
) -> Trajectory:
    sequence = TokenSequence()
    sequence.extend(prompt, Source.PROMPT)
    for turn in range(turns):
        if turn:
            sequence.extend(_ids(generator, vocabulary, *observation), Source.OBSERVATION)
        answer, start = _ids(generator, vocabulary, 10, 40), len(sequence)
        sequence.extend_sampled(answer, logprobs=[-1.0] * len(answer), versions=[0] * len(answer))
        sequence.turns.append(Turn(index=turn, start=start, end=len(sequence)))
    trajectory = Trajectory(
        id=f"{group}-{member}", task_id=str(group), environment="random", seed=0, group_id=str(group)
    )
    trajectory.outcome = Outcome.FINISHED
    trajectory.sequences.append(sequence)
    trajectory.reward = float(member % 2) + 0.1 * member
    sequence.turns[-1].reward = trajectory.reward
    return trajectory


def _ids(generator: random.Random, vocabulary: int, low: int, high: int) -> list[int]:
    return generator.choices(range(vocabulary), k=generator.randint(low, high))
