"""Losses that couple the episodes of a group: each compares log-probabilities of whole episodes within their group.

The loss of an episode depends on tokens in other micro-batches. The token selector of such a loss therefore computes,
from all tokens of the update, each episode's loss and its derivative by log pi; the loss is then linear in log pi. If a
step has several mini-batches, each should hold whole groups (`agentrl.training.batch.mini_batches`). All are meant for
aggregation seq-mean-token-sum, the mean over episodes.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from agentrl.algorithms.options import Positive
from agentrl.algorithms.segments import exceeds, segment_mean, segment_sizes, segment_sum
from agentrl.algorithms.traits import Input, chooses, couples_episodes, ignores_advantage, needs
from agentrl.algorithms.types import LOG_RATIO_LIMIT, LossInput, TokenLoss, plain_loss, require

FLOW_WEIGHT_CAP = 10.0
"""Maximum importance weight of an episode in `flowrl`, as in its authors' code."""


class _Episodes:
    """Sums of log-probabilities of the episodes in an input, without gradient; all tensors are [episodes]."""

    def __init__(self, tokens: LossInput) -> None:
        self.of_token = torch.unique(require(tokens.episode, Input.EPISODE), return_inverse=True)[1]
        self.count = _count(self.of_token)
        self.lengths = segment_sizes(self.of_token, self.count)
        group = torch.zeros_like(self.lengths).index_copy(0, self.of_token, require(tokens.group, Input.GROUP))
        self.group = torch.unique(group, return_inverse=True)[1]
        self.groups = _count(self.group)
        self.members = segment_sizes(self.group, self.groups)[self.group]
        self.logp = tokens.logp.detach()
        self.moved = self.sum(self.logp - tokens.old_logp)
        """log pi / pi_old of the whole episode."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values over the tokens of each episode."""
        return segment_sum(values, self.of_token, self.count)

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """Return the common value of each episode's tokens."""
        return values.new_zeros(self.count).index_copy(0, self.of_token, values)

    def group_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Compute the mean over each episode's group."""
        return segment_mean(values, self.group, self.groups)[self.group]

    def group_extreme(self, values: torch.Tensor, reduce: str) -> torch.Tensor:
        """Return the first episode of each group with its largest (``amax``) or smallest (``amin``) value: [groups]."""
        extreme = values.new_zeros(self.groups).scatter_reduce(0, self.group, values, reduce, include_self=False)
        place = torch.arange(self.count, device=values.device)
        place = torch.where(values == extreme[self.group], place, self.count)
        return place.new_full((self.groups,), self.count).scatter_reduce(0, self.group, place, "amin")

    def of_tokens(self, loss: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        """Divide each episode's loss among its tokens, and add its slope as a second column: [tokens, 2]."""
        return torch.stack([loss / self.lengths, slope], dim=-1)[self.of_token]


def _count(numbers: torch.Tensor) -> int:
    """Return the number of indices, which start at 0; 0 if every token was rejected."""
    return int(numbers.max()) + 1 if numbers.numel() else 0


def _linear(tokens: LossInput, chosen: torch.Tensor) -> TokenLoss:
    """Compute the loss that has a value and a derivative by log pi: chosen is [tokens, 2]."""
    loss, slope = chosen.to(tokens.logp.dtype).unbind(-1)
    return plain_loss(loss + slope * (tokens.logp - tokens.logp.detach()))


def pacs_slopes(tokens: LossInput, *, beta: Positive = 1.0) -> torch.Tensor:
    """Compute the loss of `pacs` for each token, and its derivative by log pi: [tokens, 2]."""
    episodes = _Episodes(tokens)
    others = (episodes.members / (episodes.members - 1).clamp(min=1)).to(tokens.logp.dtype)
    score = beta * episodes.moved
    logit = others * (score - episodes.group_mean(score))
    label = episodes.first(tokens.episode_return).to(logit.dtype)
    error = logit.sigmoid() - label
    loss = functional.binary_cross_entropy_with_logits(logit, label, reduction="none")
    return episodes.of_tokens(loss, beta * others * (error - episodes.group_mean(error)))


@chooses(pacs_slopes, drops=False)
@couples_episodes
@ignores_advantage
def pacs(tokens: LossInput, *, beta: Positive = 1.0) -> TokenLoss:
    """Binary cross-entropy of R with the logit x - mean x of the other members, x = beta log pi / pi_old (PACS).

    PACS, arXiv 2509.02522, with RLOO: x is the sum over the episode's tokens, and R is a reward from 0 to 1. In the
    first update of a step all logits are 0.
    """
    return _linear(tokens, pacs_slopes(tokens, beta=beta) if tokens.chosen is None else tokens.chosen)


def gvpo_slopes(tokens: LossInput, *, beta: Positive = 0.1) -> torch.Tensor:
    """Compute the loss of `gvpo` for each token, and its derivative by log pi: [tokens, 2]."""
    episodes = _Episodes(tokens)
    implicit, reward = beta * episodes.moved, episodes.first(tokens.episode_return).to(tokens.logp.dtype)
    error = implicit - episodes.group_mean(implicit) - (reward - episodes.group_mean(reward))
    others = (episodes.members / (episodes.members - 1).clamp(min=1)).to(error.dtype)
    return episodes.of_tokens(others * error.square() / 2, beta * others * error)


@chooses(gvpo_slopes, drops=False)
@couples_episodes
@ignores_advantage
def gvpo(tokens: LossInput, *, beta: Positive = 0.1) -> TokenLoss:
    """N / (n - 1) / 2 (x - mean_g x - (R - mean_g R))^2, x = beta log pi / pi_old of n episodes (arXiv 2504.19599).

    GVPO; the derivative treats the group's mean as a constant, which is exact because the errors add up to 0. The
    optimal policy is pi_old exp(R / beta) up to a constant, for any sampling policy.
    """
    return _linear(tokens, gvpo_slopes(tokens, beta=beta) if tokens.chosen is None else tokens.chosen)


def flowrl_slopes(tokens: LossInput, *, beta: Positive = 15.0) -> torch.Tensor:
    """Compute the loss of `flowrl` for each token, and its derivative by log pi: [tokens, 2]."""
    episodes = _Episodes(tokens)
    reference = require(tokens.reference_logp, Input.REFERENCE)
    score = episodes.sum(episodes.logp - reference - beta * tokens.advantage) / episodes.lengths
    error = score - episodes.group_mean(score)
    weight = episodes.moved.clamp(max=LOG_RATIO_LIMIT).exp().clamp(max=FLOW_WEIGHT_CAP)
    return episodes.of_tokens(weight * error.square(), 2 * weight * error / episodes.lengths)


@chooses(flowrl_slopes, drops=False)
@couples_episodes
@needs(Input.REFERENCE)
def flowrl(tokens: LossInput, *, beta: Positive = 15.0) -> TokenLoss:
    """W (log Z + mean_t log pi / pi_ref - beta mean_t A)^2, w = min(prod r, 10) (FlowRL, arXiv 2509.15207).

    The authors predict log Z from the prompt with a network. Here, log Z is the value at which the group's errors add
    up to 0 (VarGrad, arXiv 2010.10436), so that no other model is trained. Meant for the advantages of `grpo`.
    """
    return _linear(tokens, flowrl_slopes(tokens, beta=beta) if tokens.chosen is None else tokens.chosen)


def _pair_slopes(
    episodes: _Episodes, tokens: LossInput, better: torch.Tensor, worse: torch.Tensor, beta: float
) -> torch.Tensor:
    """Compute the DPO loss of one pair of each group for its tokens, and its derivative by log pi: [tokens, 2].

    `better` and `worse` are masks of the pair, bool [episodes]; a group without both has no loss. Both are multiplied
    by the group's size, so that the mean over episodes is the mean over groups.
    """
    gain = episodes.sum(episodes.logp - require(tokens.reference_logp, Input.REFERENCE))
    sign = better.to(gain.dtype) - worse.to(gain.dtype)
    whole = segment_sum(sign.abs(), episodes.group, episodes.groups)[episodes.group] == 2
    sign = torch.where(whole, sign, 0.0)
    margin = beta * segment_sum(sign * gain, episodes.group, episodes.groups)[episodes.group]
    share = sign.abs() * episodes.members
    loss = -functional.logsigmoid(margin) * share / 2
    return episodes.of_tokens(loss, -beta * (-margin).sigmoid() * sign * episodes.members)


def online_dpo_slopes(tokens: LossInput, *, beta: Positive = 0.1) -> torch.Tensor:
    """Compute the loss of `online_dpo` for each token, and its derivative by log pi: [tokens, 2]."""
    episodes = _Episodes(tokens)
    returns = episodes.first(tokens.episode_return)
    best, worst = (episodes.group_extreme(returns, reduce) for reduce in ("amax", "amin"))
    differ = exceeds(returns[best], returns[worst])[episodes.group]
    place = torch.arange(episodes.count, device=returns.device)
    return _pair_slopes(
        episodes, tokens, differ & (place == best[episodes.group]), differ & (place == worst[episodes.group]), beta
    )


@chooses(online_dpo_slopes, drops=False)
@couples_episodes
@ignores_advantage
@needs(Input.REFERENCE)
def online_dpo(tokens: LossInput, *, beta: Positive = 0.1) -> TokenLoss:
    """`dpo` of the best and the worst episode of each group, sampled in the same step (arXiv 2402.04792; SPIN of verl).

    With ``reference.refresh_every``, the policy of the last round is the reference. Groups with equal returns have no
    loss; ties are resolved in favour of the first episode.
    """
    return _linear(tokens, online_dpo_slopes(tokens, beta=beta) if tokens.chosen is None else tokens.chosen)


def online_spin_slopes(tokens: LossInput, *, beta: Positive = 0.1) -> torch.Tensor:
    """Compute the loss of `online_spin` for each token, and its derivative by log pi: [tokens, 2]."""
    episodes = _Episodes(tokens)
    expert = episodes.sum(require(tokens.expert, Input.EXPERT).double()) > 0
    place = torch.arange(episodes.count, device=expert.device)

    def first(mask: torch.Tensor) -> torch.Tensor:
        return mask & (place == episodes.group_extreme(mask.long(), "amax")[episodes.group])

    return _pair_slopes(episodes, tokens, first(expert), first(~expert), beta)


@chooses(online_spin_slopes, drops=False)
@couples_episodes
@ignores_advantage
@needs(Input.REFERENCE, Input.EXPERT)
def online_spin(tokens: LossInput, *, beta: Positive = 0.1) -> TokenLoss:
    """`spin` with the group's demonstration and the policy's own episode of the same step (arXiv 2401.01335).

    The demonstration comes from ``algorithm.expert``; with ``reference.refresh_every``, each round's reference is the
    policy of the round before. A group without both has no loss.
    """
    return _linear(tokens, online_spin_slopes(tokens, beta=beta) if tokens.chosen is None else tokens.chosen)
