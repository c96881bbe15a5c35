"""Detection of runs that learn nothing because all returns of each group are equal, so that no episode is preferred."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from agentrl.errors import Outcome
from agentrl.trajectory import Trajectory

FIRST, FACTOR = 3, 3
"""Consecutive steps before a message: 3, then 9, 27, 81, …"""
NONE = 1e-8
"""Mean absolute advantage below which advantages count as 0."""
MANY = 0.5
"""Minimum share of unusable answers for which they are named as the cause."""


def share_that_differs(metrics: Mapping[str, float]) -> float | None:
    """Return the share of a step's groups in which some episodes did better than others; ``None`` without groups."""
    trained, equal = metrics.get("groups/trained"), metrics.get("groups/zero_variance")
    return None if not trained or equal is None else 1 - equal / trained


def learns_nothing(metrics: Mapping[str, float]) -> bool:
    """Return True if a step's rewards do not prefer any action to another.

    This holds if no group has a difference in returns, and the advantages are 0 or come only from a critic's error.
    """
    if share_that_differs(metrics) != 0:
        return False
    has_critic = any(name.startswith("critic/") for name in metrics)
    rewards_are_equal = math.isclose(metrics.get("reward/min", 0.0), metrics.get("reward/max", 1.0), abs_tol=NONE)
    return (metrics.get("train/advantage_abs_mean") or 0.0) < NONE or (has_critic and rewards_are_equal)


def steps_without_learning(lines: Iterable[Mapping[str, float]]) -> int:
    """Count the training steps in ``metrics.jsonl`` without learning."""
    return sum(learns_nothing(line) for line in lines)


class LearningWatch:
    """Detector of consecutive steps that learn nothing."""

    def __init__(self) -> None:
        self._steps = 0
        self._next = FIRST
        self.cause = ""
        """Explanation for the newest step that learned nothing."""

    def add_step(
        self, metrics: Mapping[str, float], trajectories: Sequence[Trajectory], *, cause: str | None = None
    ) -> str | None:
        """Add a step; return a message for the user if one is due.

        Args:
            metrics: Metrics of the step.
            trajectories: Trajectories of the step.
            cause: Known reason why the rewards of the whole run teach nothing; without one, the step is examined.
        """
        if not learns_nothing(metrics):
            self._steps, self._next = 0, FIRST
            return None
        self.cause = explain_cause(trajectories) if cause is None else f"{cause[:1].upper()}{cause[1:]}"
        self._steps += 1
        if self._steps < self._next:
            return None
        self._next *= FACTOR
        return (
            f"nothing is being learned: in the last {self._steps} steps all episodes of a task had the same return, so "
            f"no episode was better than another. {self.cause}. Look at the episodes with: agentrl view"
        )


def explain_cause(trajectories: Sequence[Trajectory]) -> str:
    """Explain why a step learned nothing, and suggest remedies."""
    ended = [t for t in trajectories if t.outcome is not None and t.outcome.is_trainable]
    solved = [trajectory.success for trajectory in ended]
    if ended and all(solved):
        return (
            f"All {len(ended)} episodes of the newest step succeeded: the tasks are too easy for this agent. "
            "Try harder tasks (environment.options, another environment.split), or stop the run"
        )
    if ended and all(success is False for success in solved):
        what = f"All {len(ended)} episodes of the newest step failed"
    else:
        rewards = ", ".join(f"{reward:g}" for reward in sorted({t.reward for t in ended if t.reward is not None})[:3])
        what = f"The returns of the newest step are {rewards or 'unknown'}"
    result = f"{what} ({_outcomes(ended)}{_remark(ended)})"
    unusable = _unusable_share(ended)
    if unusable >= MANY:
        return (
            f"{result}, and {unusable:.0%} of the answers could not be used as actions. Try a warm start (agentrl sft) "
            "or a model that follows the format, and check agent.loop and agent.max_answer_tokens"
        )
    return (
        f"{result}. Try a warm start (agentrl sft), easier tasks (environment.options), a stronger model, "
        "or more episodes per task (algorithm.group_size)"
    )


def _outcomes(ended: Sequence[Trajectory]) -> str:
    counts = Counter(str(trajectory.outcome) for trajectory in ended)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()) or "no episode ended"


def _remark(ended: Sequence[Trajectory]) -> str:
    remarks = Counter(trajectory.error for trajectory in ended if trajectory.error)
    return f"; most often: {remarks.most_common(1)[0][0]}" if remarks else ""


def _unusable_share(ended: Sequence[Trajectory]) -> float:
    """Return the share of turns without a usable action; at least the share of episodes that ended as policy_error."""
    turns = sum(len(trajectory.turns) for trajectory in ended)
    unusable = sum(
        trajectory.metrics.get("invalid_answers", 0.0) + trajectory.metrics.get("invalid_actions", 0.0)
        for trajectory in ended
    )
    by_outcome = sum(trajectory.outcome is Outcome.POLICY_ERROR for trajectory in ended) / max(1, len(ended))
    return max(by_outcome, min(1.0, unusable / turns) if turns else 0.0)
