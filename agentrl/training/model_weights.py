"""The policy as weight sync sees it: tensors to hand over, and log-probabilities to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.training.logprobs import score
from agentrl.training.sequences import scored_sequence


class ModelWeights:
    """The weights of a model that is being trained.

    Args:
        model: Changed in place by the trainer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The tensors by parameter name, not copied."""
        return {name: tensor.detach() for name, tensor in self._model.state_dict().items()}

    @torch.no_grad()
    def token_logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
        """Log-probability of each answer token after the prompt and the tokens before it, at temperature 1."""
        ids = np.array([*prompt_ids, *answer_ids])
        wanted = np.arange(len(ids)) >= len(prompt_ids)
        scores = score(self._model, [scored_sequence(ids, wanted)], temperature=1.0, pad_id=0)
        return [float(value) for value in scores.logp]
