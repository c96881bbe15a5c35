"""Rewards of turns as estimators see them: from the environment and the scorer, after ``algorithm.shaping``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agentrl.algorithms.entropy_shaping import EntropyShaping
from agentrl.algorithms.rewards import EpisodeRewards, RewardKL, TeacherKL, pf_ppo
from agentrl.algorithms.segments import segment_sum
from agentrl.errors import Outcome, TrainingError
from agentrl.registry import Kind, lookup
from agentrl.training.algorithm_functions import bind, describe_value
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedRewards:
    """Rewards after shaping; the turn rewards of an episode add up to its return."""

    returns: torch.Tensor
    """Return of each episode: float64 [episodes]."""
    turn_reward: torch.Tensor
    """Reward of each turn: float64 [turns], ordered by episode, then by time."""
    turn_episode: torch.Tensor
    """Episode of each turn: int64 [turns]."""


class RewardShaping:
    """Shapings of a config, in the order in which they are applied, with their options checked.

    Raises:
        ConfigError: a shaping does not take an option, or its value is out of range.
        UnknownNameError: a shaping is not registered.
    """

    def __init__(self, shaping: Mapping[str, Mapping[str, Any]], *, max_tokens: int) -> None:
        self.kl: RewardKL | None = None
        """KL to the reference, subtracted from the reward; ``None`` without this shaping."""
        self.configure(shaping, max_tokens=max_tokens)

    def configure(self, shaping: Mapping[str, Mapping[str, Any]], *, max_tokens: int) -> None:
        """Use other options from now on; an adaptive KL coefficient keeps its value."""
        before, self.kl = self.kl, None
        self.distill: TeacherKL | None = None
        """KL to the teacher, subtracted from the reward; ``None`` without this shaping."""
        self.entropy: EntropyShaping | None = None
        """Reward for uncertain passages; ``None`` without this shaping."""
        self._resample: Callable[[torch.Tensor, int], torch.Tensor] | None = None
        self._max_tokens = max_tokens
        self._steps: dict[str, Callable[[EpisodeRewards], EpisodeRewards]] = {}
        for name, options in shaping.items():
            target = lookup(Kind.SHAPING, name)
            bound = bind("shaping", name, target, dict(options))
            if target is RewardKL:
                self.kl = bound()
            elif target is TeacherKL:
                self.distill = bound()
            elif target is EntropyShaping:
                self.entropy = bound()
            elif target is pf_ppo:
                self._resample = bound
            else:
                self._steps[name] = bound
        if self.kl is not None and before is not None and self.kl.is_adaptive:
            self.kl.coef = before.coef
        self([])  # checks the options before the first episode is played

    def __call__(self, trajectories: Sequence[Trajectory]) -> ShapedRewards:
        """Shape the rewards of trajectories, each of which must have a reward.

        The last turn gets the difference between the scorer's reward and the sum of the environment's turn rewards, and
        the rewards that shapings add to whole episodes.

        Raises:
            TrainingError: a shaping did not return finite rewards of the same turns.
        """
        rewards = raw = _raw_rewards(trajectories, self._max_tokens)
        for name, step in self._steps.items():
            rewards = _check_shaped(name, step(rewards), rewards)
        turns = torch.bincount(rewards.turn_episode, minlength=len(trajectories))
        last, has_turns = turns.cumsum(0) - 1, turns > 0
        verdict = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
        return ShapedRewards(
            # The scorer's rewards themselves: sums with large rewards of turns would add rounding errors.
            returns=verdict + (rewards.returns - raw.returns),
            turn_reward=rewards.turn_reward.index_add(0, last[has_turns], rewards.final[has_turns]),
            turn_episode=rewards.turn_episode,
        )

    def sample_counts(self, returns: torch.Tensor, *, seed: int) -> torch.Tensor | None:
        """Draw how often each trajectory counts, if a shaping resamples by return: int64 [trajectories]."""
        if self._resample is None:
            return None
        return torch.bincount(self._resample(returns, seed), minlength=returns.numel())


def success_of(trajectory: Trajectory) -> float:
    """Return 1 for a solved episode and 0 for others; its reward if success is not reported."""
    return float(trajectory.reward or 0.0) if trajectory.success is None else float(trajectory.success)


def _raw_rewards(trajectories: Sequence[Trajectory], max_tokens: int) -> EpisodeRewards:
    turns = [trajectory.turns for trajectory in trajectories]
    owner = torch.tensor([e for e, own in enumerate(turns) for _ in own], dtype=torch.int64)
    reward = torch.tensor([turn.reward for own in turns for turn in own], dtype=torch.float64)
    verdict = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
    groups = {group: i for i, group in enumerate(dict.fromkeys(t.group_id for t in trajectories))}
    lengths = [max((len(s) for s in t.sequences), default=0) for t in trajectories]
    return EpisodeRewards(
        turn_reward=reward,
        turn_episode=owner,
        turn_valid=torch.tensor([turn.valid for own in turns for turn in own], dtype=torch.bool),
        turn_repaired=torch.tensor([turn.repaired_calls > 0 for own in turns for turn in own], dtype=torch.bool),
        final=verdict - segment_sum(reward, owner, len(turns)),
        group=torch.tensor([groups[t.group_id] for t in trajectories], dtype=torch.int64),
        sampled=torch.tensor([t.sampled_tokens for t in trajectories], dtype=torch.int64),
        unfinished=torch.tensor([_is_unfinished(t.outcome) for t in trajectories], dtype=torch.bool),
        longest=torch.tensor(lengths, dtype=torch.int64),
        max_tokens=max_tokens,
    )


def _is_unfinished(outcome: Outcome | None) -> bool:
    return outcome is not None and (outcome.is_truncated or outcome is Outcome.POLICY_ERROR)


def _check_shaped(name: str, given: Any, before: EpisodeRewards) -> EpisodeRewards:
    if not isinstance(given, EpisodeRewards):
        raise TrainingError(
            f"the shaping {name} did not return rewards",
            got=type(given).__name__,
            expected="EpisodeRewards, from rewards.with_turns or rewards.with_episodes",
        )
    for part in ("turn_reward", "final"):
        found, shape = getattr(given, part), getattr(before, part).shape
        if found.shape != shape or not bool(found.isfinite().all()):
            raise TrainingError(
                f"the shaping {name} returned unusable rewards",
                got=f"{part}: {describe_value(found)}",
                expected=f"finite numbers of shape {tuple(shape)}",
            )
    return given
