"""A critic's output: one number from a hidden state."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel


class ValueHead(nn.Module):
    """A linear map in float32 that begins as 0, so that a new critic expects nothing and changes nothing.

    Args:
        width: Of the hidden states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """V of hidden states [n, width], in any format: float32 [n]."""
        return hidden.float() @ self.weight + self.bias


def head_for(model: PreTrainedModel) -> ValueHead:
    """A new head on a model's last hidden states, where the model computes."""
    return ValueHead(cast("int", model.config.get_text_config().hidden_size)).to(model.device)
