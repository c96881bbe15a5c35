"""Entropy of the policy in passages of its answers, for the shaping ``ares``."""

from __future__ import annotations

import dataclasses
import math

import torch

from agentrl.training.batch import StepBatch
from agentrl.training.forward.runner import ModelRunner
from agentrl.training.rewards import RewardShaping, success_of
from agentrl.training.signals.base import SignalSetup, TokenSignal


class WindowEntropy(TokenSignal):
    """Rewards for uncertain passages, in one forward pass of the policy."""

    name = "window_entropy"

    def __init__(self, policy: ModelRunner, shaping: RewardShaping) -> None:
        self._policy, self._shaping = policy, shaping
        self._metrics: dict[str, float] = {}

    @classmethod
    def build(cls, setup: SignalSetup) -> WindowEntropy | None:
        """Build the signal, if the shaping is configured."""
        return None if setup.shaping.entropy is None else cls(setup.policy, setup.shaping)

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Add the shaping's rewards to the last token of each episode."""
        shaping, episodes = self._shaping.entropy, batch.episodes
        assert shaping is not None
        entropy = self._policy.logprobs(batch.sequences, temperature=batch.temperature, pad_id=batch.pad_id).entropy
        owner, count = episodes.token_episode, episodes.returns.numel()
        found = shaping.count(entropy.cpu(), episodes.token_turn, owner, count)
        right = torch.tensor([success_of(trajectory) > 0.5 for trajectory in batch.trajectories])
        rewards = shaping.rewards(found.counts, right, episodes.group)
        order = episodes.time_order
        places = torch.arange(order.numel())
        last = order[places.new_zeros(count).scatter_reduce(0, owner[order], places, "amax")]
        has_tokens = episodes.episode_tokens > 0
        added = torch.zeros(order.numel(), dtype=torch.float64).index_add(0, last[has_tokens], rewards[has_tokens])
        self._metrics = {"ares/uncertain_tokens": float(found.counts.mean()), "ares/reward": float(rewards.mean())}
        if math.isfinite(found.threshold):
            self._metrics["ares/threshold"] = found.threshold
        return dataclasses.replace(batch, episodes=episodes.with_token_reward(added))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last step."""
        return self._metrics
