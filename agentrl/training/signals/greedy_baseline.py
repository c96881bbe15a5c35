"""The greedy baseline of ``remax``: the return of a greedy rollout of each group's task."""

from __future__ import annotations

import dataclasses

from agentrl.errors import TrainingError
from agentrl.training.batch import StepBatch
from agentrl.training.rewards import RewardShaping
from agentrl.training.signals.base import SignalSetup, TokenSignal


class GreedyBaseline(TokenSignal):
    """Returns of greedy rollouts, shaped like other returns but without KL in the reward."""

    name = "greedy_baseline"

    def __init__(self, shaping: RewardShaping) -> None:
        self._shaping = shaping

    @classmethod
    def build(cls, setup: SignalSetup) -> GreedyBaseline:
        """Build the signal; it does not change steps without greedy rollouts."""
        return cls(setup.shaping)

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Add the return of each group's greedy rollout, if the step has any.

        Raises:
            TrainingError: only some groups have a greedy rollout with a reward.
        """
        greedy = batch.extras.greedy
        if not greedy:
            return batch
        groups = dict.fromkeys(trajectory.group_id for trajectory in batch.trajectories)
        if missing := [group for group in groups if group not in greedy or greedy[group].reward is None]:
            raise TrainingError(
                f"group {missing[0]} has no greedy rollout with a reward",
                got=f"{len(missing)} of {len(groups)} groups without one",
                expected="a greedy rollout with a reward for every group",
            )
        returns = self._shaping([greedy[group] for group in groups]).returns
        return dataclasses.replace(batch, episodes=dataclasses.replace(batch.episodes, greedy_return=returns))
