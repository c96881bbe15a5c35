"""Pairs of episodes of one task, of which one is preferred."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from agentrl.errors import UsageError
from agentrl.training.scoring.sequences import ScoredSequence, scored_sequence
from agentrl.trajectory import Source, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two episodes of one task."""

    better: Trajectory
    worse: Trajectory


def make_pairs(
    trajectories: Iterable[Trajectory], *, by: Literal["rewards", "demonstrations"], per_task: int
) -> list[Pair]:
    """Pair the episodes of each task and seed; those that the machinery failed, or nobody scored, are left out.

    An episode is in one pair at most.

    Args:
        trajectories: Of any tasks, in any order.
        by: ``rewards``: the best with the worst, the second best with the second worst, while their rewards differ.
            ``demonstrations``: what somebody demonstrated with what a policy sampled, whatever the rewards.
        per_task: Most pairs of a task.

    Raises:
        UsageError: there is no pair.
    """
    tasks: dict[tuple[str, str, int], list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.outcome is not None and trajectory.outcome.is_trainable and answered(trajectory):
            tasks.setdefault((trajectory.environment, trajectory.task_id, trajectory.seed), []).append(trajectory)
    make = _by_reward if by == "rewards" else _by_demonstration
    pairs = [pair for members in tasks.values() for pair in make(members)[:per_task]]
    if not pairs:
        raise UsageError(
            "there is no pair of episodes to learn from",
            got=f"{sum(map(len, tasks.values()))} episodes of {len(tasks)} tasks",
            expected="two episodes of one task whose rewards differ"
            if by == "rewards"
            else "a demonstration and a sampled episode of one task",
            hint="take the trajectories of a run that trains groups"
            if by == "rewards"
            else "give both sources: --from RUN_OF_SFT --from RUN_OF_TRAIN, of the same tasks and seed",
        )
    return pairs


def _by_reward(members: Sequence[Trajectory]) -> list[Pair]:
    ranked = sorted((t for t in members if t.reward is not None), key=lambda t: -_reward(t))
    half = len(ranked) // 2
    both = zip(ranked[:half], reversed(ranked[-half:] if half else []), strict=True)
    return [Pair(better=good, worse=bad) for good, bad in both if _reward(good) > _reward(bad)]


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None
    return trajectory.reward


def _by_demonstration(members: Sequence[Trajectory]) -> list[Pair]:
    shown = [t for t in members if not t.sampled_tokens]
    sampled = [t for t in members if t.sampled_tokens]
    return [Pair(better=good, worse=bad) for good, bad in zip(shown, sampled, strict=False)]


def answered(trajectory: Trajectory) -> list[ScoredSequence]:
    """The sequences of an episode with answers of their own: what was sampled, or demonstrated where nothing was."""
    source = Source.SAMPLED if trajectory.sampled_tokens else Source.FORCED
    found = []
    for sequence in trajectory.sequences:
        wanted = np.equal(sequence.sources, source)
        wanted[: max(sequence.shared, 1)] = False
        if wanted.any():
            found.append(scored_sequence(sequence.token_ids, wanted, sequence.images))
    return found
