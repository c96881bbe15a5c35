"""Advantages from a critic's values: generalized advantage estimation over tokens, over turns, and over both.

Observation tokens are excluded, so that discounts apply only to sampled tokens. The reward of a turn without sampled
tokens is assigned to the previous turn; see `EpisodeBatch.token_rewards`. The value after an episode's end is 0.

`value` is the critic's loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algorithms.options import Discount, Positive
from agentrl.algorithms.segments import backward_sums, segment_sum, whiten
from agentrl.algorithms.traits import Input, needs, takes
from agentrl.algorithms.types import EpisodeBatch, Estimate, TokenLoss, require


@needs(Input.VALUES)
def gae(episodes: EpisodeBatch, *, gamma: Discount = 1.0, gae_lambda: Discount = 0.95) -> Estimate:
    """A = whitened L_t = delta_t + gamma lambda L_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t (arXiv 1506.02438).

    The critic's target is L + V, before whitening.
    """
    values = require(episodes.values, Input.VALUES)
    sums = _token_sums(episodes, values, gamma, torch.full_like(values, gae_lambda))
    return Estimate(advantage=whiten(sums), value_target=sums + values)


@needs(Input.VALUES)
def gae_turn(episodes: EpisodeBatch, *, gamma_turn: Discount = 1.0, lambda_turn: Discount = 0.95) -> Estimate:
    """`gae` over turns, with the value at a turn's first token and its reward s_k (VAGEN, arXiv 2510.16907).

    Every token of a turn gets the turn's advantage; whitening is over tokens. The critic trains only on the first
    tokens of turns.
    """
    values = require(episodes.values, Input.VALUES)
    turns = _SampledTurns(episodes)
    before = values[turns.first]
    sums = turns.sums(turns.rewards, before, gamma_turn, lambda_turn)
    target = torch.full_like(values, torch.nan)
    target[turns.first] = sums + before
    return Estimate(advantage=whiten(sums[turns.of_token]), value_target=target)


@needs(Input.VALUES)
def bi_level(
    episodes: EpisodeBatch,
    *,
    gamma: Discount = 1.0,
    gae_lambda: Discount = 0.95,
    gamma_turn: Discount = 1.0,
    lambda_turn: Discount = 0.95,
) -> Estimate:
    """`gae` over turns for L at each turn's last token, then `gae` over tokens back to its first (arXiv 2510.16907).

    This is the bi-level GAE of VAGEN. A turn's value is the value at its last token, so that with discounts of 1 the
    advantage of a token is the return from there on minus its value. Advantages are whitened over tokens; the critic's
    target is L + V.
    """
    values = require(episodes.values, Input.VALUES)
    turns, rewards = _SampledTurns(episodes), episodes.token_rewards()
    last = rewards[turns.last]
    between = last + turns.following(turns.rewards - last)
    ends = turns.sums(between, values[turns.last], gamma_turn, lambda_turn)
    order = episodes.time_order
    owner = turns.of_token[order]
    delta = rewards[order] + gamma * _following(values[order], owner) - values[order]
    is_last = torch.zeros_like(rewards, dtype=torch.bool).index_fill(0, turns.last, True)[order]
    delta[is_last] = ends[owner[is_last]]
    sums = torch.empty_like(values)
    sums[order] = backward_sums(delta, torch.full_like(delta, gamma * gae_lambda), owner)
    return Estimate(advantage=whiten(sums), value_target=sums + values)


@needs(Input.VALUES)
def vapo(episodes: EpisodeBatch, *, gamma: Discount = 1.0, alpha: Positive = 0.05) -> Estimate:
    """`gae` with lambda = 1 - 1 / (alpha len) for the policy and lambda = 1 for the critic (VAPO, arXiv 2504.05118).

    len is the number of the episode's sampled tokens; if it is below 1 / alpha, lambda is 0.
    """
    values = require(episodes.values, Input.VALUES)
    length = episodes.to_tokens(episodes.episode_tokens).to(values.dtype)
    adaptive = (1 - 1 / (alpha * length)).clamp(min=0.0)
    sums = _token_sums(episodes, values, gamma, adaptive)
    target = _token_sums(episodes, values, gamma, torch.ones_like(values)) + values
    return Estimate(advantage=whiten(sums), value_target=target)


@needs(Input.VALUES)
def dqo(episodes: EpisodeBatch, *, gamma: Discount = 1.0, gae_lambda: Discount = 1.0) -> Estimate:
    """A = L_t as in `gae`, not whitened: the Q function of the loss `dqo` minus V (DQO, arXiv 2410.09302).

    Meant for the shaping ``kl`` with the estimator k1 and the loss's beta, so that V is a soft value. The critic's
    target is L + V, the lambda return.
    """
    values = require(episodes.values, Input.VALUES)
    sums = _token_sums(episodes, values, gamma, torch.full_like(values, gae_lambda))
    return Estimate(advantage=sums, value_target=sums + values)


def _token_sums(episodes: EpisodeBatch, values: torch.Tensor, gamma: float, gae_lambda: torch.Tensor) -> torch.Tensor:
    """Compute L_t: [tokens]; gae_lambda is [tokens]."""
    order = episodes.time_order
    owner, ordered = episodes.token_episode[order], values[order]
    delta = episodes.token_rewards()[order] + gamma * _following(ordered, owner) - ordered
    sums = torch.empty_like(values)
    sums[order] = backward_sums(delta, gamma * gae_lambda[order], owner)
    return sums


def _following(values: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
    """Shift values by one within segments, so that each entry has the next value, and the last one 0: [n]."""
    following = values.roll(-1)
    ends = segment != segment.roll(-1)
    ends[-1] = True
    return torch.where(ends, 0.0, following)


class _SampledTurns:
    """Turns with sampled tokens, numbered from 0 in temporal order; other turns are excluded."""

    def __init__(self, episodes: EpisodeBatch) -> None:
        lengths, last = episodes.turn_tokens, episodes.last_tokens()
        sampled = lengths > 0
        self.last = last[sampled]
        """Index of the last token: int64 [sampled turns]."""
        self.first = (last - lengths + 1)[sampled]
        self.episode = episodes.turn_episode[sampled]
        self.of_token = (sampled.cumsum(0) - 1)[episodes.token_turn]
        """Turn of each token: int64 [tokens]."""
        self.rewards = segment_sum(episodes.token_rewards(), self.of_token, self.last.numel())
        """Reward of each turn: [sampled turns]."""

    def following(self, values: torch.Tensor) -> torch.Tensor:
        """Return the next turn's value for each turn, 0 for an episode's last: [sampled turns]."""
        return _following(values, self.episode)

    def sums(self, rewards: torch.Tensor, values: torch.Tensor, gamma: float, gae_lambda: float) -> torch.Tensor:
        """Compute L_k = delta_k + gamma lambda L_{k+1}: [sampled turns]."""
        delta = rewards + gamma * self.following(values) - values
        return backward_sums(delta, torch.full_like(delta, gamma * gae_lambda), self.episode)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInput:
    """Tokens on which a critic trains; all tensors are [tokens]."""

    values: torch.Tensor
    """Values v of the current critic, with gradient."""
    old_values: torch.Tensor
    """Values V at the start of the step."""
    targets: torch.Tensor
    """Targets G."""


@takes("a critic's values (ValueInput)")
def value(tokens: ValueInput, *, clip: float | None = 0.5) -> TokenLoss:
    """1/2 max((v - G)^2, (clip(v, V - eps, V + eps) - G)^2), eps = 0.5: [tokens] (arXiv 1707.06347's baselines).

    ``clip`` is eps; ``None`` disables the clip.
    """
    plain = (tokens.values - tokens.targets).square()
    if clip is None:
        return TokenLoss(values=plain / 2, clipped=torch.zeros_like(plain, dtype=torch.bool))
    bounded = tokens.values.clamp(tokens.old_values - clip, tokens.old_values + clip)
    clipped = (bounded - tokens.targets).square()
    return TokenLoss(values=torch.maximum(plain, clipped) / 2, clipped=clipped > plain)
