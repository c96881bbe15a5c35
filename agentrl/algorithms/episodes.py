"""What an advantage estimator is given: the episodes of one step as index tensors."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def token_episode(self) -> torch.Tensor:
        """Episode of each token: int64 [tokens]."""
        return self.turn_episode[self.token_turn]

    @property
    def turn_tokens(self) -> torch.Tensor:
        """Number of sampled tokens of each turn: [turns]."""
        return segment_sum(torch.ones_like(self.token_turn), self.token_turn, self.turn_reward.numel())

    @property
    def groups(self) -> int:
        """Number of groups."""
        return int(self.group.max()) + 1

    def to_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Give every token the value of its episode: [episodes] to [tokens]."""
        return values[self.token_episode]
