"""What a model itself says of tokens: the reference of the conformance kit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel


def model_reference(model: PreTrainedModel) -> Callable[[Sequence[int], float], list[float]]:
    """Log-probabilities by a full forward pass without any cache, on the weights that the model has when it is called.

    The function takes ids and a temperature, and gives one value for each id but the first.
    """

    @torch.no_grad()
    def logprobs(ids: Sequence[int], temperature: float) -> list[float]:
        logits = model(torch.tensor([list(ids)])).logits[0] / temperature
        chosen = torch.tensor(ids)[1:, None]
        values: list[float] = torch.log_softmax(logits, -1)[:-1].gather(1, chosen)[:, 0].tolist()
        return values

    return logprobs
