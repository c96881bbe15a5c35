"""The trainer's side of weight sync: tensors to send, and log-probabilities to compare.

The policy is saved as a folder: a whole model, or only its adapters if these are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.models.lora import (
    adapted_layers,
    adapter_folder,
    base_names,
    factors,
    frozen_weight,
    has_adapters,
    is_adapter,
    product,
    trained_names,
)
from agentrl.render.images import ImageProcessor
from agentrl.training.checkpoint import save_adapter_folder, save_base_folder, save_model_folder, whole_on_cpu
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.fsdp import whole
from agentrl.training.forward.runner import ModelRunner, RunnerSettings
from agentrl.training.forward.sequences import scored_sequence


class ModelWeights:
    """Weights of a model in training; adapters are merged into the base weights, under the base's names.

    The tensors of a sharded model have the data type `dtype`.
    """

    def __init__(
        self, model: PreTrainedModel, *, ranks: Ranks | None = None, dtype: Literal["float32", "bfloat16"] = "float32"
    ) -> None:
        self.model = model
        self.ranks = ranks or Ranks()
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._adapted = {f"{name}.base_layer.weight": layer for name, layer in adapted_layers(model).items()}
        self._names = base_names(model) if self._adapted else {}

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """Return the calls that rank 0 makes on the other ranks, by name."""
        return {"gather": self._gather, "token_logprobs": self._token_logprobs}

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors by parameter name, not copied.

        Sharded tensors are gathered, and adapters merged, when a tensor is read.
        """
        if self._adapted:
            return GatheredWeights(list(self._names), self._gather_from_ranks)
        tensors = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        return GatheredWeights(list(tensors), self._gather_from_ranks) if self.ranks.is_distributed else tensors

    def trained_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the trained tensors, by the model's own parameter names."""
        return GatheredWeights(trained_names(self.model), self._gather_from_ranks)

    def _gather_from_ranks(self, name: str) -> torch.Tensor:
        with self.ranks.broadcast_call("gather", name):
            return self._gather(name)

    @torch.no_grad()
    def _gather(self, name: str) -> torch.Tensor:
        own = self._names.get(name, name)
        if own in self._adapted:
            return self._merge(self._adapted[own])
        if own in self._parameters:
            tensor = self._parameters[own].detach()
            return whole(tensor.to(self._dtype) if self.ranks.is_distributed and not is_adapter(own) else tensor)
        found: torch.Tensor = self.model.state_dict()[own]
        return found

    def _merge(self, layer: Any) -> torch.Tensor:
        frozen = frozen_weight(layer).detach()
        up, down = (whole(tensor.detach()) for tensor in factors(layer))
        merged = whole(frozen).float() + product(layer, up=up, down=down)
        return merged.to(self._dtype if self.ranks.is_distributed else frozen.dtype)

    def token_logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
        """Compute the log-probability of each answer token after the prompt, at temperature 1."""
        with self.ranks.broadcast_call("token_logprobs", prompt_ids, answer_ids):
            return self._token_logprobs(prompt_ids, answer_ids)

    def _token_logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
        ids = np.array([*prompt_ids, *answer_ids])
        wanted = np.arange(len(ids)) >= len(prompt_ids)
        scores = ModelRunner(self.model, RunnerSettings()).logprobs([scored_sequence(ids, wanted)], temperature=1.0)
        return [float(value) for value in scores.logp]

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None = None) -> None:
        """Write the current model with its tokenizer and image processor; ranks that share it take part."""
        if has_adapters(self.model):
            save_adapter_folder(self.model, tokenizer, folder, images, trained=self.trained_tensors())
        else:
            weights = self.weights() if self.ranks.is_distributed else None
            save_model_folder(self.model, tokenizer, folder, images, weights=weights)

    def copy(self, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None = None) -> Callable[[Path], None]:
        """Copy the current model to the CPU; return a function that writes the copy as `save` does."""
        model = self.model
        if has_adapters(model):
            trained = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.trained_tensors().items()}
            return lambda folder: save_adapter_folder(model, tokenizer, folder, images, trained=trained)
        weights = whole_on_cpu(model, self.weights())
        return lambda folder: save_model_folder(model, tokenizer, folder, images, weights=weights)


class TrainedWeights:
    """A `WeightSource` with only a model's trained adapter tensors, for an engine that has the base model."""

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the trained tensors; see `ModelWeights.trained_tensors`."""
        return self._weights.trained_tensors()

    def token_logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
        """Score an answer; see `ModelWeights.token_logprobs`."""
        return self._weights.token_logprobs(prompt_ids, answer_ids)


class AdaptersWeights:
    """A `WeightSource` of several adapters of one base; tensors are named ``ADAPTER/PARAMETER``."""

    def __init__(self, sources: Mapping[str, ModelWeights], base: PreTrainedModel) -> None:
        self.sources, self.base = sources, base

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors of all adapters, not copied."""
        return {
            f"{name}/{key}": tensor
            for name, source in self.sources.items()
            for key, tensor in source.trained_tensors().items()
        }

    def token_logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
        """Score an answer with the base model."""
        return ModelWeights(self.base).token_logprobs(prompt_ids, answer_ids)

    @property
    def by_adapter(self) -> dict[str, TrainedWeights]:
        """Weight source of each adapter: its tensors, and log-probabilities computed with it."""
        return {name: TrainedWeights(source) for name, source in self.sources.items()}

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None = None) -> None:
        """Write each adapter into its own folder next to the base's config and tokenizer."""
        save_base_folder(self.base, tokenizer, folder, images)
        for name, own in self.sources.items():
            own.save(adapter_folder(folder, name), tokenizer, images)

    def copy(self, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None = None) -> Callable[[Path], None]:
        """Copy the adapters to the CPU; return a function that writes the copies as `save` does."""
        writers = {name: own.copy(tokenizer, images) for name, own in self.sources.items()}

        def write(folder: Path) -> None:
            save_base_folder(self.base, tokenizer, folder, images)
            for name, write_one in writers.items():
                write_one(adapter_folder(folder, name))

        return write


class GatheredWeights(Mapping[str, torch.Tensor]):
    """Mapping whose tensors are gathered from all ranks when they are read, and not kept."""

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
