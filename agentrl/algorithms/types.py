"""Inputs and results of advantage estimators and policy losses: episodes as index tensors, and single tokens.

A function reads an optional part of its input with `require`, which raises a clear error if the part is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from agentrl.algorithms.segments import segment_sum
from agentrl.algorithms.traits import Input
from agentrl.errors import TrainingError


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeBatch:
    """Episodes of a step, with their turns and sampled tokens.

    It contains only episodes with a reward and the sampled tokens of each sequence, so that no mask is needed. Numbers
    are float64, because standard deviations near 0 are compared with 1e-6.

    Two episodes of one group; the first has two turns of 2 and 1 tokens, the second one turn of 3 tokens:

    >>> episodes = EpisodeBatch(
    ...     returns=torch.tensor([1.0, 0.0]), group=torch.tensor([0, 0]),
    ...     turn_reward=torch.tensor([0.0, 1.0, 0.0]), turn_episode=torch.tensor([0, 0, 1]),
    ...     turn_state=torch.tensor([0, 1, 0]),
    ...     token_turn=torch.tensor([0, 0, 1, 2, 2, 2]))
    >>> episodes.to_tokens(episodes.returns).tolist()
    [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    >>> episodes.token_rewards().tolist()
    [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    """

    returns: torch.Tensor
    """Return R of each episode, after shaping: [episodes]."""
    group: torch.Tensor
    """Group of each episode: int64 [episodes], from 0."""
    turn_reward: torch.Tensor
    """Reward s_k of each turn, after shaping: [turns], ordered by episode, then by time.

    The rewards of an episode's turns add up to its return.
    """
    turn_episode: torch.Tensor
    """Episode of each turn: int64 [turns]."""
    turn_state: torch.Tensor
    """State in which each turn was taken: int64 [turns], from 0; different groups have different states."""
    token_turn: torch.Tensor
    """Turn of each sampled token: int64 [tokens]. The tokens of a turn are consecutive, in the order of sampling."""
    token_reward: torch.Tensor | None = None
    """Part of the turns' rewards that belongs to single tokens (KL in the reward): [tokens]. The rest of a turn's
    reward belongs to its last token."""
    values: torch.Tensor | None = None
    """Value V before each token, from a critic: [tokens]."""
    greedy_return: torch.Tensor | None = None
    """Return of a greedy (temperature 0) rollout of each group's task: [groups]."""
    baseline: torch.Tensor | None = None
    """Running baseline of each episode's role or task, from before the episode: [episodes]."""
    components: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Components of the reward by name, before shaping: [episodes] each."""
    process_reward: torch.Tensor | None = None
    """Implicit process reward of each token (`agentrl.algorithms.off_policy_losses`): [tokens]."""
    score_norm: torch.Tensor | None = None
    """Squared norm of the gradient of log pi by the logits, 1 - 2 pi + sum pi^2, at each token: [tokens]."""
    role_kind: torch.Tensor | None = None
    """Number of each episode's role and type of task in its environment: int64 [episodes], from 0."""
    tree: torch.Tensor | None = None
    """Number of each episode's tree: int64 [episodes]; episodes that share turns have the same one. ``None`` if no
    episode branches from another one."""
    branch_turn: torch.Tensor | None = None
    """Number of initial turns that each episode shares with its parent, -1 if it does not branch: int64 [episodes]."""

    @property
    def token_episode(self) -> torch.Tensor:
        """Episode of each token: int64 [tokens]."""
        return self.turn_episode[self.token_turn]

    @property
    def turn_tokens(self) -> torch.Tensor:
        """Number of sampled tokens of each turn: int64 [turns]."""
        return segment_sum(torch.ones_like(self.token_turn), self.token_turn, self.turn_reward.numel())

    @property
    def episode_tokens(self) -> torch.Tensor:
        """Number of sampled tokens of each episode: int64 [episodes]."""
        return segment_sum(self.turn_tokens, self.turn_episode, self.returns.numel())

    @property
    def groups(self) -> int:
        """Number of groups."""
        return int(self.group.max()) + 1

    @property
    def time_order(self) -> torch.Tensor:
        """Indices of the tokens by episode, then by time: int64 [tokens]; branches may be stored in another order."""
        return torch.argsort(self.token_turn, stable=True)

    def to_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Assign each token the value of its episode: [tokens] from [episodes]."""
        return values[self.token_episode]

    def last_tokens(self) -> torch.Tensor:
        """Find the index of the last token of each turn: int64 [turns]; -1 for a turn without tokens."""
        index = torch.arange(self.token_turn.numel(), device=self.token_turn.device)
        last = index.new_full((self.turn_reward.numel(),), -1)
        return last.scatter_reduce(0, self.token_turn, index, "amax")

    def token_rewards(self) -> torch.Tensor:
        """Compute the reward r_t of each token: [tokens].

        The reward of a turn without tokens belongs to the last token before it. Rewards before an episode's first token
        are dropped.
        """
        own = torch.zeros_like(self.token_turn, dtype=self.turn_reward.dtype)
        if self.token_reward is not None:
            own = own + self.token_reward
        rest = self.turn_reward - segment_sum(own, self.token_turn, self.turn_reward.numel())
        last = self.last_tokens()
        turns = torch.arange(last.numel(), device=last.device)
        # latest turn with tokens
        previous = torch.where(last >= 0, turns, -1).cummax(0).values
        same_episode = (previous >= 0) & (self.turn_episode[previous] == self.turn_episode)
        return own.index_add(0, last[previous[same_episode]], rest[same_episode])

    def select_group(self, group: int) -> EpisodeBatch:
        """Select the episodes of one group."""
        episode = self.group == group
        turn = episode[self.turn_episode]
        token = turn[self.token_turn]
        turns, tokens = {"turn_reward", "turn_state"}, {"token_reward", "values", "process_reward", "score_norm"}
        episodes = {"returns", "tree", "branch_turn", "baseline", "role_kind"}
        masks = dict.fromkeys(turns, turn) | dict.fromkeys(tokens, token) | dict.fromkeys(episodes, episode)
        parts = {name: part[mask] for name, mask in masks.items() if (part := getattr(self, name)) is not None}
        return dataclasses.replace(
            self,
            **parts,
            group=torch.zeros_like(self.group[episode]),
            turn_episode=(episode.cumsum(0) - 1)[self.turn_episode[turn]],
            token_turn=(turn.cumsum(0) - 1)[self.token_turn[token]],
            greedy_return=None if self.greedy_return is None else self.greedy_return[group : group + 1],
            components={name: values[episode] for name, values in self.components.items()},
        )

    def with_token_reward(self, reward: torch.Tensor) -> EpisodeBatch:
        """Add `reward`, [tokens], to the rewards of tokens, turns and episodes."""
        turns = segment_sum(reward, self.token_turn, self.turn_reward.numel())
        return dataclasses.replace(
            self,
            token_reward=reward if self.token_reward is None else self.token_reward + reward,
            turn_reward=self.turn_reward + turns,
            returns=self.returns + segment_sum(turns, self.turn_episode, self.returns.numel()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Result of an estimator with a critic; other estimators return only the advantage."""

    advantage: torch.Tensor
    """Advantage of each token: [tokens]."""
    value_target: torch.Tensor | None = None
    """Target G of the critic: [tokens]; NaN at tokens on which it does not train."""


LOG_RATIO_LIMIT = 20.0
"""Bound on a token's log-ratio, as in verl."""

MEAN_LOG_RATIO_LIMIT = 10.0
"""Upper bound on a sequence's mean log-ratio in `agentrl.algorithms.policy_losses.gspo` and ``gmpo``, as in verl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """Sampled tokens of whole sequences (one micro-batch); tensors are [tokens] unless stated otherwise.

    A loss receives only the trained tokens. Tokens that a filter or the correction rejects are excluded, so that no
    ratio, mean or share of a sequence depends on them.
    """

    logp: torch.Tensor
    """log pi of the current policy, with gradient."""
    old_logp: torch.Tensor
    """log pi_old of the proximal policy: the trainer's, at the start of the step."""
    behaviour_logp: torch.Tensor
    """log mu of the behaviour policy, as the engine returned it with the sampled token."""
    advantage: torch.Tensor
    episode_return: torch.Tensor
    """Return R of the token's episode, after shaping."""
    sequence: torch.Tensor
    """Sequence of each token: int64, from 0 to `sequences` - 1; no sequence is split over two inputs."""
    sequences: int
    turn: torch.Tensor | None = None
    """Turn of each token: int64; turns of different episodes have different numbers."""
    episode: torch.Tensor | None = None
    """Episode of each token: int64; its sequences may be in different inputs, except for a choice of the loss."""
    group: torch.Tensor | None = None
    """Group of each token's episode: int64."""
    reference_logp: torch.Tensor | None = None
    """log pi_ref of a frozen policy."""
    teacher_logp: torch.Tensor | None = None
    """Log-probability of the token under a teacher."""
    teacher_top_logp: torch.Tensor | None = None
    """Log-probabilities, under a teacher, of its k most probable tokens at the position: [tokens, k]."""
    top_logp: torch.Tensor | None = None
    """log pi of the teacher's k most probable tokens, with gradient: [tokens, k]."""
    expert: torch.Tensor | None = None
    """Mask of tokens that an expert wrote, whose log mu and log pi_old have no meaning: bool."""
    entropy: torch.Tensor | None = None
    """Entropy of the proximal policy at the token, in nats, for filters."""
    chosen: torch.Tensor | None = None
    """Selection among all tokens of the update (`agentrl.algorithms.traits.chooses`): bool, from 0 to 1 where tied
    tokens share a place, or numbers that depend on whole groups. If it is ``None``, the loss selects among the given
    tokens."""
    draw: int = 0
    """Seed of a loss's random choices: different in every update, equal on all ranks and in all micro-batches."""

    @property
    def ratio(self) -> torch.Tensor:
        """Ratio r = exp(log pi - log pi_old), with the log-ratio clamped: [tokens]."""
        return log_ratio(self.logp, self.old_logp).exp()

    def select(self, index: torch.Tensor) -> LossInput:
        """Select tokens by an index, int64 [selected], or a mask, bool [tokens]."""
        parts: dict[str, Any] = {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}
        chosen = {name: part[index] for name, part in parts.items() if isinstance(part, torch.Tensor)}
        return LossInput(**{**parts, **chosen})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Loss of each token, before correction weights and aggregation."""

    values: torch.Tensor
    """Values to be minimized: [tokens]."""
    clipped: torch.Tensor
    """Mask of tokens whose gradient a clip removed or whose weight it bounded: bool [tokens]."""


def log_ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Compute the log of a ratio of probabilities, clamped to [-20, 20] so that its exponential is finite."""
    return (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def plain_loss(values: torch.Tensor) -> TokenLoss:
    """Make a `TokenLoss` without a clip."""
    return TokenLoss(values=values, clipped=torch.zeros_like(values, dtype=torch.bool))


def require(part: torch.Tensor | None, what: Input) -> torch.Tensor:
    """Return an optional part of an input.

    Raises:
        TrainingError: the part is missing.
    """
    if part is None:
        raise TrainingError("the step lacks an input of the algorithm", got=f"no {what.name.lower()}", expected=what)
    return part
