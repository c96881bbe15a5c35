"""Aggregation of token losses: a weight per token, so that the step's loss is their weighted sum.

The weights are computed once, from the tokens of the whole optimizer step. Each micro-batch adds its part of the sum,
so the result does not depend on the division into micro-batches.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from agentrl.errors import ConfigError


class Aggregation(enum.StrEnum):
    """Rule that combines token losses into the loss of a step."""

    TOKEN_MEAN = "token-mean"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    TRAJ_MEAN_TOKEN_MEAN = "traj-mean-token-mean"
    PROMPT_MEAN = "prompt-mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOwners:
    """Sequence, trajectory and group of each token with a loss; int64 [tokens] each, over the whole optimizer step."""

    sequence: torch.Tensor
    trajectory: torch.Tensor
    group: torch.Tensor

    def select(self, index: torch.Tensor) -> TokenOwners:
        """Select the owners of some tokens by an index, int64 [selected]."""
        return TokenOwners(sequence=self.sequence[index], trajectory=self.trajectory[index], group=self.group[index])


def token_weights(aggregation: Aggregation, owners: TokenOwners, *, norm_length: int | None = None) -> torch.Tensor:
    """Compute the weight of each token's loss: float64 [tokens].

    ``token-mean``: 1 / N_tok. ``seq-mean-token-mean``: 1 / (N_seq length of the sequence). ``seq-mean-token-sum``:
    1 / N_seq, and with ``-norm`` 1 / (N_seq norm_length). ``traj-mean-token-mean`` and ``prompt-mean``: a mean over
    trajectories or groups of the mean over their tokens. Lengths and counts are over the given tokens.

    Raises:
        ConfigError: ``seq-mean-token-sum-norm`` is used without `norm_length`.
    """
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            return _constant(owners, owners.sequence.numel())
        case Aggregation.SEQ_MEAN_TOKEN_MEAN:
            return _mean_of_means(owners.sequence)
        case Aggregation.SEQ_MEAN_TOKEN_SUM:
            return _constant(owners, _distinct(owners.sequence))
        case Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
            if norm_length is None:
                raise ConfigError("seq-mean-token-sum-norm needs algorithm.norm_length", expected="a constant length")
            return _constant(owners, _distinct(owners.sequence) * norm_length)
        case Aggregation.TRAJ_MEAN_TOKEN_MEAN:
            return _mean_of_means(owners.trajectory)
        case Aggregation.PROMPT_MEAN:
            return _mean_of_means(owners.group)


def _constant(owners: TokenOwners, denominator: int) -> torch.Tensor:
    return torch.full_like(owners.sequence, 1.0 / max(denominator, 1), dtype=torch.float64)


def _mean_of_means(owner: torch.Tensor) -> torch.Tensor:
    sizes = torch.bincount(owner)
    return 1.0 / (_distinct(owner) * sizes[owner].double())


def _distinct(owner: torch.Tensor) -> int:
    return int((torch.bincount(owner) > 0).sum())
