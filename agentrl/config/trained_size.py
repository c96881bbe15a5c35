"""How much of a model is trained: all of it, or adapters and what is trained beside them."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config.lora import LoraConfig
from agentrl.config.model_size import ModelSize

_FULL = 4
"""Bytes of a float32, which adapters are in any format of the model."""
_MOMENTS = 8
"""Bytes of AdamW's two moments of a weight."""
QUANTIZED_BYTES = 0.52
"""Of a weight in 4 bits, with its share of the scales (https://arxiv.org/abs/2305.14314, section 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSize:
    """Numbers of weights."""

    adapters: int = 0
    own: int
    """The model's own that are trained: all of them without adapters."""

    @property
    def parameters(self) -> int:
        """All that is trained."""
        return self.adapters + self.own

    def gradient_bytes(self, width: int) -> int:
        """Of the gradients of a model whose own weights take `width` bytes each."""
        return _FULL * self.adapters + width * self.own

    def optimizer_bytes(self, width: int) -> int:
        """Of AdamW's moments, and of the float32 copies of weights in a short format."""
        return _MOMENTS * self.parameters + (_FULL * self.own if width < _FULL else 0)

    def adapter_bytes(self) -> int:
        """Of the adapters' weights."""
        return _FULL * self.adapters


def trained_size(lora: LoraConfig | None, size: ModelSize, *, parameters: int | None = None) -> TrainedSize:
    """What is trained of a Llama-like decoder.

    Args:
        lora: Adapters, if there are any.
        size: Of the model.
        parameters: That are trained without adapters; all of the model's when left out.
    """
    if lora is None:
        return TrainedSize(own=size.parameters if parameters is None else parameters)
    ends = {end.rpartition(".")[2] for end in lora.whole}
    embeddings = len(ends & {"embed_tokens", "lm_head"})
    if size.tied:
        embeddings = min(1, embeddings)
    return TrainedSize(adapters=size.adapter_parameters(lora), own=embeddings * size.vocab_size * size.hidden_size)


def weight_bytes(lora: LoraConfig | None, size: ModelSize, width: int) -> int:
    """Of a model's weights, adapters included."""
    adapters = trained_size(lora, size).adapter_bytes()
    if lora is None or lora.quantize is None:
        return size.parameters * width + adapters
    in_layers = size.trunk_parameters - size.vocab_size * size.hidden_size
    return round(in_layers * QUANTIZED_BYTES) + (size.parameters - in_layers) * width + adapters
