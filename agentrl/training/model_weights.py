"""The policy as weight sync sees it: tensors to hand over, and log-probabilities to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.training.logprobs import score
from agentrl.training.ranks import Ranks
from agentrl.training.ranks.sharding import reshard, whole
from agentrl.training.sequences import scored_sequence


class ModelWeights:
    """The weights of a model that is being trained.

    Args:
        model: Changed in place by the trainer.
        ranks: Hold the model together.
        dtype: Number format in which a model in shards is handed over.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        ranks: Ranks | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        self._model = model
        self._ranks = ranks or Ranks()
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """What rank 0 asks of the other ranks, by name."""
        return {"gather": self._gather, "token_logprobs": self._token_logprobs}

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The tensors by parameter name, not copied; of a model in shards each is gathered when it is read."""
        tensors = {name: tensor.detach() for name, tensor in self._model.state_dict().items()}
        return GatheredWeights(list(tensors), self._led_gather) if self._ranks.are_many else tensors

    def _led_gather(self, name: str) -> torch.Tensor:
        with self._ranks.led("gather", name):
            return self._gather(name)

    @torch.no_grad()
    def _gather(self, name: str) -> torch.Tensor:
        if name in self._parameters:
            return whole(self._parameters[name].detach().to(self._dtype))
        tensor: torch.Tensor = self._model.state_dict()[name]
        return tensor

    def token_logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
        """Log-probability of each answer token after the prompt and the tokens before it, at temperature 1."""
        with self._ranks.led("token_logprobs", prompt_ids, answer_ids):
            return self._token_logprobs(prompt_ids, answer_ids)

    @torch.no_grad()
    def _token_logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
        ids = np.array([*prompt_ids, *answer_ids])
        wanted = np.arange(len(ids)) >= len(prompt_ids)
        scores = score(self._model, [scored_sequence(ids, wanted)], temperature=1.0, pad_id=0)
        reshard(self._model)
        return [float(value) for value in scores.logp]


class GatheredWeights(Mapping[str, torch.Tensor]):
    """Tensors that are brought together from all ranks one at a time: whoever reads them keeps what he needs.

    Args:
        names: Of all tensors.
        gather: Gives one.
    """

    def __init__(self, names: Sequence[str], gather: Callable[[str], torch.Tensor]) -> None:
        self._names = dict.fromkeys(names)
        self._gather = gather

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._gather(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
