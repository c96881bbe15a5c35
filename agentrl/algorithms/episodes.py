"""What an advantage estimator is given and gives back: the episodes of one step as index tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from agentrl.algorithms.segments import segment_sum


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
    """Implicit process reward of each token (`agentrl.algorithms.prime`): [tokens]."""

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
    """What an estimator with a critic gives back; one without gives the advantage alone."""

    advantage: torch.Tensor
    """[tokens]"""
    value_target: torch.Tensor | None = None
    """G, which the critic learns: [tokens]; NaN at tokens that it learns nothing from."""
