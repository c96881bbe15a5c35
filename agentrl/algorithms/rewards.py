"""Shapings: functions that change rewards before advantages are estimated.

A shaping is a function of `EpisodeRewards`; its keyword-only parameters are the config's options. What is given to a
whole episode falls on its last turn.

KL to a reference may be a part of the reward, with a fixed or an adaptive weight; episodes may be drawn anew.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from agentrl.algorithms.correction import KLEstimator, kl_divergence
from agentrl.algorithms.options import Positive
from agentrl.algorithms.segments import segment_sum
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRewards:
    """The rewards of a step's episodes, float64; an episode's turns and its `final` add up to its return."""

    turn_reward: torch.Tensor
    """[turns], ordered by episode, then by time."""
    turn_episode: torch.Tensor
    """Episode of each turn: int64 [turns]."""
    turn_valid: torch.Tensor
    """Bool [turns]: the answer could be parsed and the environment accepted the action."""
    final: torch.Tensor
    """Reward of the whole episode, in addition to that of its turns: [episodes]."""
    group: torch.Tensor
    """Group of each episode: int64 [episodes], from 0."""
    sampled: torch.Tensor
    """Sampled tokens: int64 [episodes]."""
    unfinished: torch.Tensor
    """Bool [episodes]: a budget was spent, or answers were unusable too often, before the environment had ended it."""
    longest: torch.Tensor
    """Tokens of the longest sequence: int64 [episodes]."""
    max_tokens: int
    """Most tokens of a sequence (``agent.max_tokens``)."""
    turn_repaired: torch.Tensor | None = None
    """Bool [turns]: a tool call of the answer was read although it is not in the model's own notation; ``None`` for
    turns without such calls."""

    @property
    def returns(self) -> torch.Tensor:
        """R: [episodes]."""
        return self.final + segment_sum(self.turn_reward, self.turn_episode, self.final.numel())

    def with_turns(self, added: torch.Tensor) -> EpisodeRewards:
        """More reward for turns: [turns]."""
        return dataclasses.replace(self, turn_reward=self.turn_reward + added)

    def with_episodes(self, added: torch.Tensor) -> EpisodeRewards:
        """More reward for whole episodes: [episodes]."""
        return dataclasses.replace(self, final=self.final + added)


def invalid(rewards: EpisodeRewards, *, penalty: float) -> EpisodeRewards:
    """Each turn that was not valid is given `penalty`, zero or negative."""
    _check("invalid", penalty <= 0, "penalty", penalty, "0 or less")
    return rewards.with_turns((~rewards.turn_valid).double() * penalty)


def repaired(rewards: EpisodeRewards, *, penalty: float) -> EpisodeRewards:
    """Each turn with a tool call that had to be repaired is given `penalty`, zero or negative."""
    _check("repaired", penalty <= 0, "penalty", penalty, "0 or less")
    if rewards.turn_repaired is None:
        return rewards
    return rewards.with_turns(rewards.turn_repaired.double() * penalty)


def unfinished(rewards: EpisodeRewards, *, penalty: float) -> EpisodeRewards:
    """An episode that ended before the environment had ended it is given `penalty`, zero or negative.

    For environments that pay less than 0: there, to stall until a budget is spent would pay better than to lose.
    """
    _check("unfinished", penalty <= 0, "penalty", penalty, "0 or less")
    return rewards.with_episodes(rewards.unfinished.double() * penalty)


def format_reward(rewards: EpisodeRewards, *, bonus: float) -> EpisodeRewards:
    """An episode whose turns were all valid, without a repaired tool call, is given `bonus`."""
    unfit = ~rewards.turn_valid
    if rewards.turn_repaired is not None:
        unfit = unfit | rewards.turn_repaired
    wrong = segment_sum(unfit.double(), rewards.turn_episode, rewards.final.numel())
    turns = torch.bincount(rewards.turn_episode, minlength=rewards.final.numel())
    return rewards.with_episodes(((wrong == 0) & (turns > 0)).double() * bonus)


def length(rewards: EpisodeRewards, *, factor: float) -> EpisodeRewards:
    """An episode is given -factor times its sampled tokens, over ``agent.max_tokens``."""
    return rewards.with_episodes(-factor * rewards.sampled.double() / rewards.max_tokens)


def overlong(rewards: EpisodeRewards, *, buffer: int, factor: float = 1.0) -> EpisodeRewards:
    """An episode is given min(-(len - (max - buffer)) / buffer * factor, 0) (DAPO, arXiv 2503.14476, equation 13).

    len is the length of its longest sequence, max is ``agent.max_tokens``.
    """
    _check("overlong", 0 < buffer < rewards.max_tokens, "buffer", buffer, "above 0 and below agent.max_tokens")
    _check("overlong", factor >= 0, "factor", factor, "0 or more")
    excess = rewards.longest.double() - (rewards.max_tokens - buffer)
    return rewards.with_episodes((-excess / buffer * factor).clamp(max=0.0))


def clip(rewards: EpisodeRewards, *, low: float = -1.0, high: float = 1.0) -> EpisodeRewards:
    """The return is kept in [low, high]; what it loses, the last turn loses."""
    _check("clip", low < high, "low and high", (low, high), "low < high")
    returns = rewards.returns
    return rewards.with_episodes(returns.clamp(low, high) - returns)


def win_rate(rewards: EpisodeRewards) -> EpisodeRewards:
    """The return becomes the share of the group's others that it beats; a draw is half a win, and so is a group of one.

    SPPO, arXiv 2405.00675, section 4: the probability of winning against the policy itself, from its own samples.
    """
    returns, group = rewards.returns, rewards.group
    others = (group[:, None] == group) & ~torch.eye(group.numel(), dtype=torch.bool)
    margin = returns[:, None] - returns
    wins = ((margin.sign() + 1) / 2 * others).sum(1)
    count = others.sum(1)
    share = torch.where(count > 0, wins / count.clamp(min=1), 0.5)
    return rewards.with_episodes(share - returns)


def _check(name: str, holds: bool, option: str, got: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"shaping {name}: {option} is out of range", got=got, expected=expected)


LARGEST_ERROR = 0.2


class RewardKL:
    """r_t -= beta kl_t; adaptive with a target: beta *= 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon.

    Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593, section 2.2. kl_t is that of the policy that
    sampled, from the engine's own log-probabilities.

    Args:
        coef: beta, at the start.
        estimator: k1, k2 or k3.
        target: KL per token to steer to; beta stays as it is without.
        horizon: Episodes over which beta may change by a fifth.

    Raises:
        ConfigError: a number that is not positive, or a horizon without a target.
    """

    name = "kl"

    def __init__(
        self,
        *,
        coef: float,
        estimator: Literal["k1", "k2", "k3"] = "k1",
        target: float | None = None,
        horizon: float | None = None,
    ) -> None:
        for name, value in {"coef": coef, "target": target, "horizon": horizon}.items():
            _check(self.name, value is None or value > 0, name, value, "above 0")
        if (target is None) != (horizon is None):
            raise ConfigError("shaping kl: target and horizon belong together", expected="both or none")
        self.coef = coef
        self._estimator, self._target, self._horizon = KLEstimator(estimator), target, horizon

    def penalty(self, behaviour_logp: torch.Tensor, reference_logp: torch.Tensor) -> torch.Tensor:
        """-beta kl_t: float64 [tokens]."""
        return -self.coef * self.divergence(behaviour_logp, reference_logp)

    def divergence(self, behaviour_logp: torch.Tensor, reference_logp: torch.Tensor) -> torch.Tensor:
        """kl_t: float64 [tokens]."""
        return kl_divergence(self._estimator, behaviour_logp.double(), reference_logp.double())

    def adapt(self, divergence: float, episodes: int) -> None:
        """Move beta after a step of `episodes` with a mean `divergence` per token."""
        if self._target is None or self._horizon is None:
            return
        error = min(max(divergence / self._target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.coef *= 1 + error * episodes / self._horizon


class TeacherKL(RewardKL):
    """r_t -= coef KL(mu, teacher) at each token: on-policy distillation as a reward (arXiv 2306.13649).

    Args:
        coef: Weight of the divergence; 1 with ``advantage: reinforce`` is the gradient of the reverse KL.
        estimator: k1, k2 or k3.

    Raises:
        ConfigError: the weight is not positive.
    """

    name = "distill"

    def __init__(self, *, coef: float = 1.0, estimator: Literal["k1", "k2", "k3"] = "k1") -> None:
        super().__init__(coef=coef, estimator=estimator)


def pf_ppo(returns: torch.Tensor, seed: int, *, power: Positive = 2.0) -> torch.Tensor:
    """Episodes drawn with replacement, each with weight abs(R)^p, as many as there are: int64 [episodes] indices.

    PF-PPO, arXiv 2409.06957. Where all weights are 0 every episode is drawn once.
    """
    size = returns.abs().double()
    weight = (size / size.max().clamp(min=torch.finfo(size.dtype).tiny)) ** power  # the largest is 1: none overflows
    if not bool((weight > 0).any()):
        return torch.arange(returns.numel())
    return torch.multinomial(
        weight.cpu(), returns.numel(), replacement=True, generator=torch.Generator().manual_seed(seed)
    )
