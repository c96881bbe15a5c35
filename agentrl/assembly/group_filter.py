"""Dynamic sampling: which groups are worth training on."""

from __future__ import annotations

from agentrl.errors import TrainingError
from agentrl.rollout.group import Group

MOST_BATCHES = 10
"""Batches' worth of groups in a row without a difference after which the run stops."""


class VariedGroups:
    """Keeps groups whose returns differ (DAPO's dynamic sampling); the others teach nothing.

    Args:
        batch: Groups per training step.
    """

    def __init__(self, batch: int) -> None:
        self._most = MOST_BATCHES * batch
        self._dropped = 0

    def __call__(self, group: Group) -> bool:
        """Whether to keep it.

        Raises:
            TrainingError: nothing worth training on for a long time.
        """
        returns = {trajectory.reward for trajectory in group.trainable}
        if len(returns) > 1:
            self._dropped = 0
            return True
        self._dropped += 1
        if self._dropped >= self._most:
            raise TrainingError(
                f"{self._dropped} groups in a row have equal returns in all their episodes",
                got=f"return {next(iter(returns))} in the last one",
                expected="some episodes that do better than others",
                hint="warm-start the policy (agentrl sft), or set algorithm.dynamic_sampling=false",
            )
        return False
