"""Entropy of token distributions."""

from __future__ import annotations

import torch


def entropy(log_probabilities: torch.Tensor) -> torch.Tensor:
    """-sum p log p in nats: log-probabilities [..., vocabulary] to [...]; an impossible token adds 0."""
    information: torch.Tensor = torch.special.entr(log_probabilities.exp())
    return information.sum(-1)
