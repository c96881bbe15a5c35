"""Which of a step's trajectories train, and why the others do not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import TrainingError
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The trajectories that train, and counts of what was left out."""

    trajectories: tuple[Trajectory, ...]
    infrastructure: int
    """Left out: the machinery failed, or the episode has no outcome yet."""
    unscored: int
    """Left out: no reward could be given. Not the same as a reward of 0."""
    lone_groups: int
    """Groups left out: one valid member only, which cannot be compared with anything."""


def select(trajectories: Sequence[Trajectory], *, compare_groups: bool) -> Selection:
    """Keep what has a reward that says something about the policy.

    Args:
        trajectories: All of a step.
        compare_groups: The advantage needs two members in a group.

    Raises:
        TrainingError: a reward is NaN or infinite, or nothing is left.
    """
    ended = [t for t in trajectories if t.outcome is not None and t.outcome.is_trainable]
    scored = [t for t in ended if t.reward is not None]
    for trajectory in scored:
        _check_rewards(trajectory)
    members = Counter(t.group_id for t in scored)
    lone = {group for group, count in members.items() if count < 2} if compare_groups else set()
    kept = tuple(t for t in scored if t.group_id not in lone)
    selection = Selection(
        trajectories=kept,
        infrastructure=len(trajectories) - len(ended),
        unscored=len(ended) - len(scored),
        lone_groups=len(lone),
    )
    if not any(t.sampled_tokens for t in kept):
        raise TrainingError(
            "no trajectory of this step can train",
            got=f"{len(trajectories)} trajectories: {selection.infrastructure} without a valid end, "
            f"{selection.unscored} without a reward, {selection.lone_groups} groups of one, "
            f"{len(kept)} without a sampled token ({_ends(kept)})",
            expected="sampled tokens in groups of two or more" if compare_groups else "sampled tokens and a reward",
            hint="where prompts leave no room for an answer, raise agent.max_tokens" if kept else None,
        )
    return selection


def _ends(trajectories: Sequence[Trajectory]) -> str:
    ends = Counter(str(trajectory.outcome) for trajectory in trajectories)
    return ", ".join(f"{count} {end}" for end, count in ends.most_common()) or "none"


def _check_rewards(trajectory: Trajectory) -> None:
    named = {"reward": trajectory.reward or 0.0}
    named.update({f"reward of turn {turn.index}": turn.reward for turn in trajectory.turns})
    for name, value in named.items():
        if not math.isfinite(value):
            raise TrainingError(
                f"{name} of task {trajectory.task_id} is not finite "
                f"(environment {trajectory.environment}, trajectory {trajectory.id})",
                got=value,
                expected="a finite number",
                hint=f"see agentrl env check {trajectory.environment}",
            )
