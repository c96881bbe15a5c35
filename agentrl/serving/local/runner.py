"""Model of the local engine: computes the logits after each chunk's last token."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.errors import EngineError, UsageError
from agentrl.message.image import ImageReader
from agentrl.models.moe import ChosenExperts, routers
from agentrl.models.products import float32_linear, has_float32_head
from agentrl.models.vision import forward_with_images
from agentrl.serving.local.decoder import PackedDecoder, can_pack
from agentrl.serving.local.forward import ATTENTION, ForwardStep


class LocalModelRunner:
    """Runner of a decoder-only model with rotary positions, which may be in training.

    The runner's module shares the trainer's parameters and buffers, but has its own settings: evaluation mode, and
    attention over a `ForwardStep`.

    Args:
        model: Model to run.
        reader: Image processor of a model that accepts images.
        routed_experts: Report the routed experts of a mixture-of-experts model.
        copies: Number of packed copies of models of this size that must fit into memory.

    Raises:
        UsageError: the model's attention cannot be replaced, or the model has no experts to report.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        reader: ImageReader | None = None,
        *,
        routed_experts: bool = False,
        copies: int = 1,
    ) -> None:
        _check(model, routed_experts=routed_experts)
        self._reader = reader
        shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        self._source = model
        self._module = copy.deepcopy(model, memo=shared).eval()
        self._module.config.get_text_config()._attn_implementation = ATTENTION
        self._chosen = ChosenExperts(routers(self._module)) if routed_experts else None
        if has_float32_head(model.config):
            head: Any = self._module.get_output_embeddings()
            head.forward = lambda hidden: _float32_logits(head, hidden)
        self._packs = can_pack(model, copies=copies)
        self._packed: PackedDecoder | None = None

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return cast("torch.device", self._source.device)

    def prepare(self) -> None:
        """Pack the weights if they have changed; call before a step's forward passes."""
        if self._packs and self._packed is None:
            self._packed = PackedDecoder(self._source)

    def weights_changed(self) -> None:
        """Discard the packed weights, so that `prepare` packs the current ones."""
        self._packed = None

    @torch.inference_mode()
    def logits(self, step: ForwardStep) -> Tensor:
        """Return the logits after each chunk's last token, [chunks, vocabulary].

        Stores the keys and values in the chunks' rows, and the tokens' routed experts in the step.
        """
        if self._packed is not None:
            return self._packed.logits(step)
        if step.views:
            hidden = forward_with_images(
                self._module, step.input_ids, step.views, step.positions, self._reader, step=step
            )
            found = self._module.get_output_embeddings()(hidden[0, step.last_tokens])
        else:
            found = self._module(
                input_ids=step.input_ids,
                position_ids=step.positions,
                use_cache=False,
                logits_to_keep=step.last_tokens,
                step=step,
            ).logits[0]
        if self._chosen is not None:
            step.routed_experts = self._chosen.take()
        return cast("Tensor", found)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Any]) -> None:
        """Copy weights into the parameters, all or none; raises `EngineError` if a trained one is missing."""
        parameters: dict[str, Tensor] = dict(self._source.named_parameters())
        known = {**self._source.state_dict(keep_vars=True), **parameters}
        if unknown := sorted(set(weights) - set(known)):
            raise EngineError("weights that the model does not have", got=", ".join(unknown[:3]))
        trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        if missing := sorted(trained - set(weights)):
            raise EngineError("weights are missing", got=f"no {', '.join(missing[:3])}")
        for name, tensor in weights.items():
            if tensor.shape != known[name].shape:
                raise EngineError(
                    f"weight {name} has the wrong shape", got=tuple(tensor.shape), expected=tuple(known[name].shape)
                )
        for name, tensor in weights.items():
            known[name].copy_(tensor)


def _float32_logits(head: Any, hidden: Tensor) -> Tensor:
    logits = float32_linear(hidden.reshape(-1, hidden.shape[-1]), head.weight, head.bias)
    return logits.reshape(*hidden.shape[:-1], -1)


def _check(model: PreTrainedModel, *, routed_experts: bool) -> None:
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise UsageError(f"the local engine does not support {name}", got="attention that cannot be replaced")
    if routed_experts and not routers(model):
        raise UsageError(
            "the local engine cannot report routed experts",
            got=name,
            expected="a mixture-of-experts model",
            hint="set trainer.moe.router_replay=false",
        )
