"""Reward shapings: functions that change rewards before advantages are estimated.

A shaping is a function of `EpisodeRewards`; its keyword-only parameters are the config's options. The reward of a
whole episode is assigned to its last turn.

Special shapings subtract the KL to a reference, with a fixed or adaptive weight, or resample episodes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from agentrl.algorithms.kl import KLEstimator, kl_divergence
from agentrl.algorithms.options import Positive
from agentrl.algorithms.segments import exceeds, segment_sum
from agentrl.config.schedule import proportional_change
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRewards:
    """Rewards of a step's episodes, float64; the rewards of an episode's turns and `final` add up to its return."""

    turn_reward: torch.Tensor
    """Reward of each turn: [turns], ordered by episode, then by time."""
    turn_episode: torch.Tensor
    """Episode of each turn: int64 [turns]."""
    turn_valid: torch.Tensor
    """Mask of turns whose answer could be parsed and whose action the environment accepted: bool [turns]."""
    final: torch.Tensor
    """Reward of the whole episode, in addition to its turns' rewards: [episodes]."""
    group: torch.Tensor
    """Group of each episode: int64 [episodes], from 0."""
    sampled: torch.Tensor
    """Number of sampled tokens: int64 [episodes]."""
    unfinished: torch.Tensor
    """Mask of episodes that the runtime ended, because a budget was exhausted or too many answers were unusable: bool
    [episodes]."""
    longest: torch.Tensor
    """Number of tokens of the longest sequence: int64 [episodes]."""
    max_tokens: int
    """Maximum number of tokens of a sequence (``agent.max_tokens``)."""
    turn_repaired: torch.Tensor | None = None
    """Mask of turns with a tool call that was parsed although it is not in the model's own notation: bool [turns];
    ``None`` means none."""

    @property
    def returns(self) -> torch.Tensor:
        """Return R of each episode: [episodes]."""
        return self.final + segment_sum(self.turn_reward, self.turn_episode, self.final.numel())

    def with_turns(self, added: torch.Tensor) -> EpisodeRewards:
        """Add rewards to turns: [turns]."""
        return dataclasses.replace(self, turn_reward=self.turn_reward + added)

    def with_episodes(self, added: torch.Tensor) -> EpisodeRewards:
        """Add rewards to whole episodes: [episodes]."""
        return dataclasses.replace(self, final=self.final + added)


def invalid_penalty(rewards: EpisodeRewards, *, penalty: float) -> EpisodeRewards:
    """Add `penalty`, which is at most 0, to each turn that was not valid."""
    _check("invalid", penalty <= 0, "penalty", penalty, "at most 0")
    return rewards.with_turns((~rewards.turn_valid).double() * penalty)


def repair_penalty(rewards: EpisodeRewards, *, penalty: float) -> EpisodeRewards:
    """Add `penalty`, which is at most 0, to each turn with a repaired tool call."""
    _check("repaired", penalty <= 0, "penalty", penalty, "at most 0")
    if rewards.turn_repaired is None:
        return rewards
    return rewards.with_turns(rewards.turn_repaired.double() * penalty)


def unfinished_penalty(rewards: EpisodeRewards, *, penalty: float) -> EpisodeRewards:
    """Add `penalty`, which is at most 0, to each episode that ended before the environment ended it.

    Meant for environments with negative rewards, in which exhausting a budget would otherwise be better than losing.
    """
    _check("unfinished", penalty <= 0, "penalty", penalty, "at most 0")
    return rewards.with_episodes(rewards.unfinished.double() * penalty)


def format_reward(rewards: EpisodeRewards, *, bonus: float) -> EpisodeRewards:
    """Add `bonus` to each episode whose turns were all valid, without a repaired tool call."""
    unfit = ~rewards.turn_valid
    if rewards.turn_repaired is not None:
        unfit = unfit | rewards.turn_repaired
    wrong = segment_sum(unfit.double(), rewards.turn_episode, rewards.final.numel())
    turns = torch.bincount(rewards.turn_episode, minlength=rewards.final.numel())
    return rewards.with_episodes(((wrong == 0) & (turns > 0)).double() * bonus)


def length(rewards: EpisodeRewards, *, factor: float) -> EpisodeRewards:
    """Add -factor times the number of sampled tokens over ``agent.max_tokens`` to each episode."""
    return rewards.with_episodes(-factor * rewards.sampled.double() / rewards.max_tokens)


def cosine(
    rewards: EpisodeRewards,
    *,
    right_short: float = 1.0,
    right_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
) -> EpisodeRewards:
    """Replace the return by long + (short - long) (1 + cos(pi l)) / 2, where l is the length over ``agent.max_tokens``.

    Demystifying Long Chain-of-Thought, arXiv 2502.03373, with Open-R1's values. Correct episodes, whose return is above
    0, get less reward for a longer answer, and incorrect ones more. The length counts sampled tokens, at most the
    maximum.
    """
    share = (rewards.sampled.double() / rewards.max_tokens).clamp(max=1.0)
    returns = rewards.returns
    course = (1 + (share * torch.pi).cos()) / 2
    right = right_long + (right_short - right_long) * course
    wrong = wrong_long + (wrong_short - wrong_long) * course
    return rewards.with_episodes(torch.where(returns > 0, right, wrong) - returns)


def group_length(rewards: EpisodeRewards, *, factor: float = 1.0) -> EpisodeRewards:
    """Add `factor` times 1/2 - (len - min) / (max - min), within the group; at most 0 for returns that are not above 0.

    Kimi k1.5, arXiv 2501.12599, section 2.3.3. len counts sampled tokens; groups whose episodes are equally long are
    unchanged.
    """
    length, count = rewards.sampled.double(), int(rewards.group.max()) + 1 if rewards.group.numel() else 0
    low = torch.full((count,), torch.inf, dtype=torch.float64).scatter_reduce(0, rewards.group, length, "amin")
    high = torch.zeros(count, dtype=torch.float64).scatter_reduce(0, rewards.group, length, "amax")
    span = (high - low)[rewards.group]
    added = torch.where(span > 0, 0.5 - (length - low[rewards.group]) / span.clamp(min=1), 0.0)
    return rewards.with_episodes(factor * torch.where(rewards.returns > 0, added, added.clamp(max=0.0)))


def overlong(rewards: EpisodeRewards, *, buffer: int, factor: float = 1.0) -> EpisodeRewards:
    """Add min(-(len - (max - buffer)) / buffer * factor, 0) to each episode (DAPO, arXiv 2503.14476, equation 13).

    len is the length of the episode's longest sequence, max is ``agent.max_tokens``.
    """
    _check("overlong", 0 < buffer < rewards.max_tokens, "buffer", buffer, "above 0 and below agent.max_tokens")
    _check("overlong", factor >= 0, "factor", factor, "at least 0")
    excess = rewards.longest.double() - (rewards.max_tokens - buffer)
    return rewards.with_episodes((-excess / buffer * factor).clamp(max=0.0))


def clip(rewards: EpisodeRewards, *, low: float = -1.0, high: float = 1.0) -> EpisodeRewards:
    """Clamp the return of each episode to [low, high]; the difference goes to the last turn."""
    _check("clip", low < high, "low and high", (low, high), "low < high")
    returns = rewards.returns
    return rewards.with_episodes(returns.clamp(low, high) - returns)


def win_rate(rewards: EpisodeRewards) -> EpisodeRewards:
    """Replace the return by the share of the group's other members that it beats; a draw, or a group of one, is 1/2.

    Returns that differ by rounding only are a draw.

    This estimates the probability of winning against the policy itself (SPPO, arXiv 2405.00675, section 4).
    """
    returns, group = rewards.returns, rewards.group
    others = (group[:, None] == group) & ~torch.eye(group.numel(), dtype=torch.bool)
    beats = exceeds(returns[:, None], returns)
    wins = ((beats.double() - beats.T.double() + 1) / 2 * others).sum(1)
    count = others.sum(1)
    share = torch.where(count > 0, wins / count.clamp(min=1), 0.5)
    return rewards.with_episodes(share - returns)


def _check(name: str, holds: bool, option: str, got: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"shaping {name}: {option} is out of range", got=got, expected=expected)


class RewardKL:
    """r_t -= beta kl_t; adaptive with a target: beta *= 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon.

    Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593, section 2.2. kl_t is the KL of the sampling
    policy, from the engine's log-probabilities.

    Args:
        coef: Initial beta.
        estimator: k1, k2 or k3.
        target: Target KL per token; without it, beta is constant.
        horizon: Number of episodes in which beta changes by at most a fifth.

    Raises:
        ConfigError: a number is not positive, or only one of target and horizon is set.
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
            raise ConfigError("shaping kl: target and horizon must be set together", expected="both or neither")
        self.coef = coef
        self._estimator, self._target, self._horizon = KLEstimator(estimator), target, horizon

    def penalty(self, behaviour_logp: torch.Tensor, reference_logp: torch.Tensor) -> torch.Tensor:
        """Compute -beta kl_t: float64 [tokens]."""
        return -self.coef * self.divergence(behaviour_logp, reference_logp)

    def divergence(self, behaviour_logp: torch.Tensor, reference_logp: torch.Tensor) -> torch.Tensor:
        """Compute kl_t: float64 [tokens]."""
        return kl_divergence(self._estimator, behaviour_logp.double(), reference_logp.double())

    def adapt(self, divergence: float, episodes: int) -> None:
        """Update beta after a step of `episodes` episodes with a mean `divergence` per token."""
        if self._target is not None and self._horizon is not None:
            share = episodes / self._horizon
            self.coef = proportional_change(self.coef, divergence, target=self._target, share=share)

    @property
    def is_adaptive(self) -> bool:
        """True if beta follows a target."""
        return self._target is not None


class TeacherKL(RewardKL):
    """r_t -= coef KL(mu, teacher) at each token: on-policy distillation as a reward (arXiv 2306.13649).

    Args:
        coef: Weight of the divergence; 1 with ``advantage: reinforce`` gives the gradient of the reverse KL.
        estimator: k1, k2 or k3.

    Raises:
        ConfigError: `coef` is not positive.
    """

    name = "distill"

    def __init__(self, *, coef: float = 1.0, estimator: Literal["k1", "k2", "k3"] = "k1") -> None:
        super().__init__(coef=coef, estimator=estimator)


BEST_WEIGHT, OTHER_WEIGHT = 0.4, 0.1
"""Weights of the method ``max_random`` of `pf_ppo`."""


def pf_ppo(
    returns: torch.Tensor,
    seed: int,
    *,
    power: Positive = 2.0,
    method: Literal["power", "max_min", "max_random"] = "power",
) -> torch.Tensor:
    """Resample as many episodes as there are, with replacement and weights abs(R)^p: int64 [episodes] indices.

    PF-PPO, arXiv 2409.06957. If all weights are 0, every episode is drawn once. With ``method: max_min``, the weight is
    1 for the highest and the lowest returns, and 0 for others; with ``max_random``, 0.4 for the highest and 0.1 for
    others. Returns that differ by rounding only are equal.
    """
    if method == "power":
        size = returns.abs().double()
        weight = (size / size.max().clamp(min=torch.finfo(size.dtype).tiny)) ** power  # at most 1, so no overflow
    elif returns.numel():
        best, worst = ~exceeds(returns.max(), returns), ~exceeds(returns, returns.min())
        kept = torch.where(best, BEST_WEIGHT, OTHER_WEIGHT)
        weight = (best | worst).double() if method == "max_min" else kept.double()
    else:
        weight = returns.double()
    if not bool((weight > 0).any()):
        return torch.arange(returns.numel())
    return torch.multinomial(
        weight.cpu(), returns.numel(), replacement=True, generator=torch.Generator().manual_seed(seed)
    )
