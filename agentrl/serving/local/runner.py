"""The model as the engine sees it: logits for the last token of each piece of a step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from agentrl.errors import EngineError, UsageError
from agentrl.image import ImageReader
from agentrl.routers import ChosenExperts, routers
from agentrl.serving.local.step import Step, step_attention
from agentrl.vision_model import read

ATTENTION = "agentrl_step"
AttentionInterface.register(ATTENTION, step_attention)


class ModelRunner:
    """Runs a model that may be training elsewhere.

    The runner's module has the trainer's parameters and buffers themselves, but its own settings: it evaluates, with
    attention over a `Step`, while the trainer's module stays as it is.

    Args:
        model: A decoder-only model with rotary positions.
        reader: Prepares images, for a model that sees them.
        routes: Tell which experts tokens went to.

    Raises:
        UsageError: the model's attention cannot be replaced, or it has no experts.
    """

    def __init__(self, model: PreTrainedModel, reader: ImageReader | None = None, *, routes: bool = False) -> None:
        _check(model)
        self._reader = reader
        shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        self._source = model
        self._module = copy.deepcopy(model, memo=shared).eval()
        self._module.config.get_text_config()._attn_implementation = ATTENTION
        self._chosen = ChosenExperts(_routers(self._module)) if routes else None

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return cast("torch.device", self._source.device)

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """Logits after each piece's last token, [pieces, vocabulary]; the pieces' keys and values are stored, and the
        step is told its tokens' experts.
        """
        found = self._logits(step)
        if self._chosen is not None:
            step.routes = self._chosen.take()
        return found

    def _logits(self, step: Step) -> Tensor:
        if step.views:
            hidden = read(self._module, step.input_ids, step.views, step.positions, self._reader, step=step)
            return cast("Tensor", self._module.get_output_embeddings()(hidden[0, step.last_tokens]))
        output = self._module(
            input_ids=step.input_ids,
            position_ids=step.positions,
            use_cache=False,
            logits_to_keep=step.last_tokens,
            step=step,
        )
        return cast("Tensor", output.logits[0])

    @torch.no_grad()
    def load(self, weights: Mapping[str, Any]) -> None:
        """Copy weights into the parameters, all or none; frozen ones may be left out.

        Raises:
            EngineError: a name or a shape is not the model's, or a parameter is missing.
        """
        parameters: dict[str, Tensor] = dict(self._source.named_parameters())
        known = {**self._source.state_dict(keep_vars=True), **parameters}
        if unknown := sorted(set(weights) - set(known)):
            raise EngineError("weights that the model does not have", got=", ".join(unknown[:3]))
        trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        if missing := sorted(trained - set(weights)):
            raise EngineError("weights are missing", got=f"none for {', '.join(missing[:3])}")
        for name, tensor in weights.items():
            if tensor.shape != known[name].shape:
                raise EngineError(
                    f"weight {name} has another shape", got=tuple(tensor.shape), expected=tuple(known[name].shape)
                )
        for name, tensor in weights.items():
            known[name].copy_(tensor)


def _routers(model: PreTrainedModel) -> list[torch.nn.Module]:
    if found := routers(model):
        return found
    raise UsageError(
        "the local engine cannot tell experts",
        got=type(model).__name__,
        expected="a mixture of experts",
        hint="set trainer.mixture.replay=false",
    )


def _check(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise UsageError(f"the local engine cannot run {name}", got="attention that cannot be replaced")
