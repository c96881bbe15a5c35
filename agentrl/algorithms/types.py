"""Inputs and results of advantage estimators and policy losses: episodes as index tensors, tokens one by one.

An optional part of an input is there, or asking for it is a clear error.
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
    """Episodes, their turns, and the sampled tokens of those turns, over the whole step.

    Only what trains is here: episodes with a reward, and of each token sequence the sampled tokens, so that no mask is
    needed. Numbers are float64, because a standard deviation near 0 is compared with 1e-6.

    Two episodes of one group; the first took two turns of 2 and 1 tokens, the second one turn of 3 tokens:

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
    """R: [episodes], after shaping."""
    group: torch.Tensor
    """Group of each episode: int64 [episodes], from 0."""
    turn_reward: torch.Tensor
    """s_k: [turns], after shaping; an episode's turns add up to its return. Ordered by episode, then by time."""
    turn_episode: torch.Tensor
    """Episode of each turn: int64 [turns]."""
    turn_state: torch.Tensor
    """State in which each turn was taken: int64 [turns], from 0; equal only within a group."""
    token_turn: torch.Tensor
    """Turn of each sampled token: int64 [tokens]. The tokens of a turn are neighbours, in the order of sampling."""
    token_reward: torch.Tensor | None = None
    """The part of the turns' rewards that falls on single tokens (KL in the reward): [tokens]. What is left of a turn's
    reward falls on its last token."""
    values: torch.Tensor | None = None
    """V before each token, by a critic: [tokens]."""
    greedy_return: torch.Tensor | None = None
    """Return of a greedy (temperature 0) rollout of each group's task: [groups]."""
    components: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Named parts of the reward, before shaping: [episodes] each."""
    process_reward: torch.Tensor | None = None
    """Implicit process reward of each token (`agentrl.algorithms.off_policy_losses`): [tokens]."""

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
        """Indices of the tokens by episode, then by time: int64 [tokens]. Branches need not be stored in that order."""
        return torch.argsort(self.token_turn, stable=True)

    def to_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Give every token the value of its episode: [episodes] to [tokens]."""
        return values[self.token_episode]

    def last_tokens(self) -> torch.Tensor:
        """Index of the last token of each turn: int64 [turns]; -1 for a turn without tokens."""
        index = torch.arange(self.token_turn.numel(), device=self.token_turn.device)
        last = index.new_full((self.turn_reward.numel(),), -1)
        return last.scatter_reduce(0, self.token_turn, index, "amax")

    def token_rewards(self) -> torch.Tensor:
        """r_t: [tokens].

        A turn without tokens leaves its reward to the last token before it. What an episode was given before its first
        token is the doing of none.
        """
        own = torch.zeros_like(self.token_turn, dtype=self.turn_reward.dtype)
        if self.token_reward is not None:
            own = own + self.token_reward
        rest = self.turn_reward - segment_sum(own, self.token_turn, self.turn_reward.numel())
        last = self.last_tokens()
        turns = torch.arange(last.numel(), device=last.device)
        speaker = torch.where(last >= 0, turns, -1).cummax(0).values
        heard = (speaker >= 0) & (self.turn_episode[speaker] == self.turn_episode)
        return own.index_add(0, last[speaker[heard]], rest[heard])

    def of_group(self, group: int) -> EpisodeBatch:
        """Return the episodes of one group alone."""
        episode = self.group == group
        turn = episode[self.turn_episode]
        token = turn[self.token_turn]
        turns, tokens = {"turn_reward", "turn_state"}, {"token_reward", "values", "process_reward"}
        masks = dict.fromkeys(turns, turn) | dict.fromkeys(tokens, token) | {"returns": episode}
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
        """The same episodes with `reward` [tokens] on top, which turns and returns include."""
        turns = segment_sum(reward, self.token_turn, self.turn_reward.numel())
        return dataclasses.replace(
            self,
            token_reward=reward if self.token_reward is None else self.token_reward + reward,
            turn_reward=self.turn_reward + turns,
            returns=self.returns + segment_sum(turns, self.turn_episode, self.returns.numel()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Result of an estimator with a critic; one without gives the advantage alone."""

    advantage: torch.Tensor
    """[tokens]"""
    value_target: torch.Tensor | None = None
    """G, which the critic learns: [tokens]; NaN at tokens that it learns nothing from."""


LOG_RATIO_LIMIT = 20.0
"""Bound of a token's log-ratio, as in verl."""

MEAN_LOG_RATIO_LIMIT = 10.0
"""Upper bound of a sequence's mean log-ratio in `agentrl.algorithms.policy_losses.gspo` and ``gmpo``, as in verl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """Sampled tokens of whole sequences (one micro-batch); all tensors are [tokens] where nothing else is said.

    A loss is given the tokens that train. Those that a filter or the correction rejects are not among them, so that no
    ratio, mean or share of a sequence depends on a rejected token.
    """

    logp: torch.Tensor
    """log pi of the current policy; the gradient flows through it."""
    old_logp: torch.Tensor
    """log pi_old of the proximal policy: the trainer's own, at the start of the step."""
    behaviour_logp: torch.Tensor
    """log mu of the behaviour policy: what the engine returned when it sampled."""
    advantage: torch.Tensor
    episode_return: torch.Tensor
    """R of the episode that the token belongs to, after shaping."""
    sequence: torch.Tensor
    """Sequence of each token: int64, from 0 to `sequences` - 1; no sequence is split over two inputs."""
    sequences: int
    reference_logp: torch.Tensor | None = None
    """log pi_ref of a frozen policy."""
    teacher_logp: torch.Tensor | None = None
    """log-probability that a teacher gives the token."""
    teacher_top_logp: torch.Tensor | None = None
    """log-probabilities that a teacher gives the k tokens that it finds most probable in the token's place: [tokens,
    k]."""
    top_logp: torch.Tensor | None = None
    """log pi of these tokens: [tokens, k]; the gradient flows through it."""
    expert: torch.Tensor | None = None
    """Bool: an expert wrote the token; its log mu and log pi_old mean nothing."""
    entropy: torch.Tensor | None = None
    """Entropy of the proximal policy at the token, in nats; filters read it."""
    chosen: torch.Tensor | None = None
    """The loss's own choice among all tokens of the update (`agentrl.algorithms.traits.chooses`): bool, or from 0 to 1
    where tokens that tie share a place. Without it the tokens given are taken for all."""
    draw: int = 0
    """Seed of a loss's random choices: another one in every update, the same on all ranks and in all micro-batches."""

    @property
    def ratio(self) -> torch.Tensor:
        """Return r = exp(log pi - log pi_old), clamped: [tokens]."""
        return log_ratio(self.logp, self.old_logp).exp()

    def select(self, index: torch.Tensor) -> LossInput:
        """Some of the tokens: index int64 [selected], or bool [tokens]."""
        parts: dict[str, Any] = {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}
        chosen = {name: part[index] for name, part in parts.items() if isinstance(part, torch.Tensor)}
        return LossInput(**{**parts, **chosen})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The loss of each token, before correction weights and aggregation."""

    values: torch.Tensor
    """[tokens], to be minimised."""
    clipped: torch.Tensor
    """Bool [tokens]: a clip took the token's gradient away or bounded its weight."""


def log_ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Log of a ratio of probabilities, clamped to [-20, 20] so that its exponential is finite."""
    return (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def unclipped(values: torch.Tensor) -> TokenLoss:
    """A loss without a clip."""
    return TokenLoss(values=values, clipped=torch.zeros_like(values, dtype=torch.bool))


def given(part: torch.Tensor | None, what: Input) -> torch.Tensor:
    """The tensor.

    Raises:
        TrainingError: it was not provided.
    """
    if part is None:
        raise TrainingError(
            "a part of the step is missing that the algorithm needs", got=f"no {what.name.lower()}", expected=what
        )
    return part
