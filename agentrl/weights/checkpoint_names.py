"""Tensors as a model's checkpoints have them: servers load those, and a model may hold them otherwise.

Transformers keeps the experts of a layer in two tensors, and takes them apart when it saves a model:

    the model                                the checkpoint
    mlp.experts.gate_up_proj  [E, 2F, H] ─►  mlp.experts.0.gate_proj.weight [F, H], mlp.experts.0.up_proj.weight, …
    mlp.experts.down_proj     [E, H, F]  ─►  mlp.experts.0.down_proj.weight [H, F], …
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.errors import UsageError
from agentrl.weights.sync import WeightSource

try:
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:

    def revert_weight_conversion(model: PreTrainedModel, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Nothing: transformers 4 holds tensors as its checkpoints have them."""
        return state_dict


class CheckpointNames:
    """What transformers makes of each tensor of a model when it saves it.

    Args:
        model: Its tensors may be in shards, and may have adapters.

    Raises:
        UsageError: a tensor of the checkpoint is made of several of the model's.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        own = {
            name.replace(".base_layer.", "."): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in model.state_dict().items()
        }
        found = {name: tuple(self.convert(name, tensor)) for name, tensor in own.items()}
        together = revert_weight_conversion(model, own)
        if {part for parts in found.values() for part in parts} != set(together):
            raise UsageError(
                "the model cannot be served",
                got=f"{type(model).__name__}, whose checkpoints join tensors of the model",
                expected="a model of which each tensor is saved by itself",
                hint="set engine=local",
            )
        self.parts: dict[str, tuple[str, ...]] = {name: parts for name, parts in found.items() if parts != (name,)}
        """Names in the checkpoint, of the tensors that are saved under others."""

    def convert(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """What is saved of a tensor."""
        saved: dict[str, Tensor] = revert_weight_conversion(self._model, {name: tensor})
        return saved

    def apply(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of a checkpoint, of which each is made when it is read; in the order of `weights`."""
        return CheckpointWeights(weights, self) if self.parts else weights


class CheckpointWeights(Mapping[str, Tensor]):
    """The model's tensors as its checkpoint has them. Read in order, each of the model's is read once.

    Args:
        weights: By the model's names.
        names: Of the checkpoint.
    """

    def __init__(self, weights: Mapping[str, Tensor], names: CheckpointNames) -> None:
        self._weights, self._names = weights, names
        self._sources = {part: name for name in weights for part in names.parts.get(name, (name,))}
        self._latest = ""
        self._converted: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        source = self._sources[name]
        if source not in self._names.parts:
            return self._weights[source]
        if source != self._latest:
            self._converted.clear()  # before the next is gathered
            self._latest, self._converted = source, self._names.convert(source, self._weights[source])
        return self._converted[name]

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


class CheckpointSource:
    """A `WeightSource` for servers.

    Args:
        source: Of a trainer.
        model: The trainer's.
    """

    def __init__(self, source: WeightSource, model: PreTrainedModel) -> None:
        self._source, self._names = source, CheckpointNames(model)

    def weights(self) -> Mapping[str, Tensor]:
        """See `WeightSource`; by the names of a checkpoint."""
        return self._names.apply(self._source.weights())

    def token_logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
        """See `WeightSource`."""
        return self._source.token_logprobs(prompt_ids, answer_ids)
