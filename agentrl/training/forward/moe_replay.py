"""Router replay: tokens go to the experts to which the engine that sampled them sent them (R3,
https://arxiv.org/abs/2510.11370).

Engine and trainer round differently, and a router that is nearly undecided then chooses other experts: the token's
log-probability jumps, and with it the ratio that losses clip. So the engine tells its choice S, and the trainer takes
it over. The gates are the trainer's own, with s the scores (softmax or sigmoid) of its router:

    gate_e = scale * s_e [/ sum of s over S]      for e in S, with gradient

which is what the router computes for a choice of its own. Tokens whose routes are unknown go where the router says.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.errors import ConfigError, TrainingError
from agentrl.models.moe import routers
from agentrl.models.vision import MODEL_TYPES

ROUTES = "routes"
"""Name of the model's argument for routes, which its layers do not pass on."""
UNKNOWN = -1
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Greatest difference of gates that numbers rounded in another order make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFormula:
    """Formula by which a router's logits become the gates of chosen experts."""

    sigmoid: bool
    normalised: bool
    scale: float

    def gates(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """float32 [tokens, chosen], from logits [tokens, experts] and the experts chosen, int64 [tokens, chosen]."""
        scores = logits.float().sigmoid() if self.sigmoid else logits.float().softmax(-1)
        gates = scores.gather(-1, chosen)
        if self.normalised:
            gates = gates / gates.sum(-1, keepdim=True)
        return gates * self.scale


@dataclass(slots=True)
class ReplayCount:
    """Count of a forward pass whose routes were replayed."""

    differing: list[Tensor] = field(default_factory=list)
    """Of each layer, whether the router itself would have chosen another set of experts: bool [tokens with routes]."""


class RouterReplay:
    """Lets the routers of a model follow given routes, by hooks on its layers and routers; without any, they are free.

    Copies of the model are not given any.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        found = routers(model)
        if not found or model.config.model_type in MODEL_TYPES:
            raise _refusal(type(model).__name__, "no routers that are known here")
        self._now = threading.local()  # a lane of several; layers are computed again in threads of autograd's
        self._formulas: dict[int, GateFormula] = {}
        self._name = type(model).__name__
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        numbers = [number for number, layer in enumerate(layers) if any(part in found for part in layer.modules())]
        if len(numbers) != len(found):
            raise _refusal(type(model).__name__, f"{len(found)} routers in {len(numbers)} layers")
        router: Any = found[0]
        self._chosen, self._experts = int(router.top_k), int(router.num_experts)
        self._layers, self._with_experts = len(layers), numbers
        for layer in layers:
            layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        for number, router in enumerate(found):
            router.register_forward_hook(self._hook(number))

    def __deepcopy__(self, memo: Any) -> RouterReplay:
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """Layers with experts, and experts chosen in each."""
        return len(self._with_experts), self._chosen

    def wanted(self, routes: Sequence[Tensor | None], places: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Lay routes out at the sequences' `places` in a micro-batch: int64 [rows, tokens, MoE layers, chosen]."""
        tokens, width = shape[0] * shape[1], len(self._with_experts) * self._chosen
        told = torch.full((tokens, width), UNKNOWN)
        for own, place in zip(routes, places, strict=True):
            if own is not None:
                told[place[: len(own)]] = self._of_experts(own).long()
        return told.view(*shape, len(self._with_experts), self._chosen)

    def _of_experts(self, routes: Tensor) -> Tensor:
        """Without layers that have no experts, of which some engines tell zeros."""
        every = self._layers * self._chosen
        if routes.shape[1] == every != len(self._with_experts) * self._chosen:
            routes = routes.view(-1, self._layers, self._chosen)[:, self._with_experts].flatten(1)
        expected = len(self._with_experts) * self._chosen
        if routes.shape[1] != expected or int(routes.max()) >= self._experts:
            raise TrainingError(
                "the engine's experts are not the model's",
                got=f"{routes.shape[1]} numbers per token, up to {int(routes.max())}",
                expected=f"{expected} (or {every}) of {self._name}, below {self._experts}",
                hint="engine and trainer must have the same model",
            )
        return routes

    @contextmanager
    def counted(self) -> Iterator[ReplayCount]:
        """Count forward passes of this thread inside the block."""
        self._now.count = count = ReplayCount()
        try:
            yield count
        finally:
            del self._now.count

    def _enter(self, layer: nn.Module, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._now.routes = options.get(ROUTES)
        return inputs, {name: value for name, value in options.items() if name != ROUTES}

    def _hook(self, number: int) -> Any:
        def route(module: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            told = getattr(self._now, "routes", None)
            return None if told is None else self._route(module, number, output, told[..., number, :].flatten(0, 1))

        return route

    def _route(self, router: nn.Module, number: int, output: tuple[Tensor, ...], told: Tensor) -> tuple[Tensor, ...]:
        if len(output) != 3:
            raise _refusal(self._name, f"{type(router).__name__} of transformers 4, which does not give its choice")
        logits, own_gates, own = output
        known = told[:, :1] >= 0
        if number not in self._formulas:
            self._formulas[number] = gate_formula(router, logits, own_gates, own)
        chosen = torch.where(known, told.to(own.dtype), own)
        gates = self._formulas[number].gates(logits, chosen).to(own_gates.dtype)
        if (count := getattr(self._now, "count", None)) is not None:
            apart = (chosen.sort(-1).values != own.sort(-1).values).any(-1)
            count.differing.append(apart[known[:, 0]])
        return logits, torch.where(known, gates, own_gates), chosen


@torch.no_grad()
def gate_formula(router: nn.Module, logits: Tensor, gates: Tensor, chosen: Tensor) -> GateFormula:
    """Find the formula that comes closest to a router's gates, [tokens, chosen], from its logits, [tokens, experts]."""
    likely = hasattr(router, "e_score_correction_bias")
    scale = float(getattr(router, "routed_scaling_factor", 1.0))
    known = [
        GateFormula(sigmoid=sigmoid, normalised=normalised, scale=scale)
        for sigmoid in (likely, not likely)
        for normalised in (False, True)
    ]
    apart = [float((formula.gates(logits, chosen) - gates.float()).abs().max()) for formula in known]
    best = min(range(len(known)), key=apart.__getitem__)
    if apart[best] > CLOSE.get(gates.dtype, 1e-4) * scale:
        raise ConfigError(
            "trainer.moe.router_replay does not know how this router weighs its experts",
            got=f"{type(router).__name__}, whose gates are {apart[best]:.2g} off",
            expected="scores by softmax or sigmoid, of the chosen experts",
            hint="set trainer.moe.router_replay=false",
        )
    return known[best]


def _refusal(model: str, why: str) -> ConfigError:
    return ConfigError(
        "trainer.moe.router_replay is of language models with routed experts",
        got=f"{model}: {why}",
        expected="a mixture of experts such as Qwen3-MoE, Mixtral or DeepSeek",
        hint="set trainer.moe.router_replay=false",
    )
