"""Signals of rollouts that are not the policy's samples: greedy rollouts, and the episodes of ``algorithm.expert``.

These rollouts come with the step (`agentrl.training.batch.StepExtras`); `step_batch` lays out the forced tokens of an
expert's episodes.
"""

from __future__ import annotations

import dataclasses

import torch

from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import ConfigError, TrainingError
from agentrl.registry import Kind, lookup
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


class ExpertSignal(TokenSignal):
    """Mask of the tokens that an expert wrote, for a loss that treats them differently."""

    name = "expert"

    @classmethod
    def check(cls, algorithm: AlgorithmConfig, config: TrainerConfig, *, has_adapters: bool) -> None:
        """Check that there is an expert if, and only if, the loss can train on its tokens."""
        expert = algorithm.expert
        if expert is None:
            if reads_expert(algorithm):
                raise ConfigError(
                    f"the loss {algorithm.loss} needs {Input.EXPERT}",
                    got="no algorithm.expert",
                    expected="algorithm.expert={members: 1}",
                )
            return
        if not reads_expert(algorithm):
            raise ConfigError(
                f"the loss {algorithm.loss} cannot train on the tokens of algorithm.expert, which the policy did not "
                "sample",
                expected="algorithm.loss=luffy, or no algorithm.expert",
            )
        if expert.members >= algorithm.group_size:
            raise ConfigError(
                "algorithm.expert plays all episodes of a group",
                got=f"algorithm.expert.members {expert.members} of algorithm.group_size {algorithm.group_size}",
                expected=f"at most {algorithm.group_size - 1}",
            )
        if algorithm.correction.proximal != "trainer":
            raise ConfigError(
                "an expert's tokens have no sampling probability mu",
                got=f"algorithm.correction.proximal {algorithm.correction.proximal}",
                expected="algorithm.correction.proximal=trainer",
            )
        if "kl" in algorithm.shaping:
            raise ConfigError(
                "the shaping kl needs sampled tokens, and an expert's tokens were not sampled",
                got="algorithm.expert and the shaping kl",
                expected="algorithm.kl_coef, which adds the KL to the loss",
            )

    @classmethod
    def build(cls, setup: SignalSetup) -> ExpertSignal | None:
        """Build the signal, if the loss reads it."""
        return cls() if reads_expert(setup.algorithm) else None

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Fill `batch.expert` with False if the step has no expert's episode."""
        if batch.expert is not None:
            return batch
        return dataclasses.replace(batch, expert=torch.zeros(batch.tokens, dtype=torch.bool))


def needs_greedy_rollouts(algorithm: AlgorithmConfig) -> bool:
    """Return True if the advantage estimator compares episodes with a greedy rollout of their task."""
    return Input.GREEDY_RETURN in needed_inputs(lookup(Kind.ADVANTAGE, algorithm.advantage))


def reads_expert(algorithm: AlgorithmConfig) -> bool:
    """Return True if the loss treats an expert's tokens differently from the policy's."""
    return Input.EXPERT in needed_inputs(lookup(Kind.LOSS, algorithm.loss))
