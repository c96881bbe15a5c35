"""Router replay: the trainer routes tokens to the experts that the sampling engine chose (R3,
https://arxiv.org/abs/2510.11370).

Engine and trainer round differently, so a router with nearly equal scores may choose other experts. Then the token's
log-probability jumps, and with it the ratio that losses clip. Therefore the engine reports its choice S, and the
trainer uses it. The gates are the trainer's own; with s the scores (softmax or sigmoid) of its router,

    gate_e = scale * s_e [/ sum of s over S]      for e in S, with gradient

which is the router's own formula for its own choice. Tokens with unknown routes are routed freely.
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
"""Name of the model's argument with routes; hooks remove it before a layer runs."""
UNKNOWN = -1
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Maximum difference of gates that rounding in another order explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFormula:
    """Formula from a router's logits to the gates of the chosen experts."""

    sigmoid: bool
    normalized: bool
    scale: float

    def gates(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Compute the gates, float32 [tokens, chosen].

        Args:
            logits: Logits of the router: [tokens, experts].
            chosen: Chosen experts: int64 [tokens, chosen].
        """
        scores = logits.float().sigmoid() if self.sigmoid else logits.float().softmax(-1)
        gates = scores.gather(-1, chosen)
        if self.normalized:
            gates = gates / gates.sum(-1, keepdim=True)
        return gates * self.scale


@dataclass(slots=True)
class ReplayCount:
    """Differences between free and replayed routing in forward passes."""

    differing: list[Tensor] = field(default_factory=list)
    """Mask, per layer, of tokens for which the free router would choose other experts: bool [tokens with routes]."""


class RouterReplay:
    """Hooks on a model's layers and routers that make the routers follow given routes.

    Without routes, the routers are free. Copies of the model are not given routes.

    Raises:
        ConfigError: the model does not support router replay.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        found = routers(model)
        if not found or model.config.model_type in MODEL_TYPES:
            raise _refusal(type(model).__name__, "no known routers")
        self._now = threading.local()  # lanes are threads, and checkpointed layers are recomputed in autograd's threads
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
        """Number of layers with experts, and number of experts chosen in each."""
        return len(self._with_experts), self._chosen

    def lay_out(self, routes: Sequence[Tensor | None], indices: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Lay routes out at the sequences' `indices` in a micro-batch: int64 [rows, tokens, MoE layers, chosen]."""
        tokens, width = shape[0] * shape[1], len(self._with_experts) * self._chosen
        found = torch.full((tokens, width), UNKNOWN)
        for own, at in zip(routes, indices, strict=True):
            if own is not None:
                found[at[: len(own)]] = self._select_moe_layers(own).long()
        return found.view(*shape, len(self._with_experts), self._chosen)

    def _select_moe_layers(self, routes: Tensor) -> Tensor:
        """Drop layers without experts, for which some engines report zeros."""
        every = self._layers * self._chosen
        if routes.shape[1] == every != len(self._with_experts) * self._chosen:
            routes = routes.view(-1, self._layers, self._chosen)[:, self._with_experts].flatten(1)
        expected = len(self._with_experts) * self._chosen
        if routes.shape[1] != expected or int(routes.max()) >= self._experts:
            raise TrainingError(
                "the engine's routed experts do not fit the trainer's model",
                got=f"{routes.shape[1]} numbers per token, up to {int(routes.max())}",
                expected=f"{expected} (or {every}) numbers per token for {self._name}, below {self._experts}",
                hint="engine and trainer must have the same model",
            )
        return routes

    @contextmanager
    def count_differences(self) -> Iterator[ReplayCount]:
        """Count differences of free and replayed routing in forward passes of this thread in this block."""
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
            routes = getattr(self._now, "routes", None)
            return None if routes is None else self._route(module, number, output, routes[..., number, :].flatten(0, 1))

        return route

    def _route(self, router: nn.Module, number: int, output: tuple[Tensor, ...], routes: Tensor) -> tuple[Tensor, ...]:
        if len(output) != 3:
            raise _refusal(self._name, f"{type(router).__name__} of transformers 4 does not return its choice")
        logits, own_gates, own = output
        known = routes[:, :1] >= 0
        if number not in self._formulas:
            self._formulas[number] = gate_formula(router, logits, own_gates, own)
        chosen = torch.where(known, routes.to(own.dtype), own)
        gates = self._formulas[number].gates(logits, chosen).to(own_gates.dtype)
        if (count := getattr(self._now, "count", None)) is not None:
            apart = (chosen.sort(-1).values != own.sort(-1).values).any(-1)
            count.differing.append(apart[known[:, 0]])
        return logits, torch.where(known, gates, own_gates), chosen


@torch.no_grad()
def gate_formula(router: nn.Module, logits: Tensor, gates: Tensor, chosen: Tensor) -> GateFormula:
    """Find the formula that best reproduces a router's gates, [tokens, chosen], from its logits, [tokens, experts].

    Raises:
        ConfigError: no known formula reproduces the gates.
    """
    likely = hasattr(router, "e_score_correction_bias")
    scale = float(getattr(router, "routed_scaling_factor", 1.0))
    known = [
        GateFormula(sigmoid=sigmoid, normalized=normalized, scale=scale)
        for sigmoid in (likely, not likely)
        for normalized in (False, True)
    ]
    apart = [float((formula.gates(logits, chosen) - gates.float()).abs().max()) for formula in known]
    best = min(range(len(known)), key=apart.__getitem__)
    if apart[best] > CLOSE.get(gates.dtype, 1e-4) * scale:
        raise ConfigError(
            "trainer.moe.router_replay does not support the gates of this router",
            got=f"{type(router).__name__}, whose gates differ by {apart[best]:.2g} from every known formula",
            expected="softmax or sigmoid scores of the chosen experts",
            hint="set trainer.moe.router_replay=false",
        )
    return known[best]


def _refusal(model: str, why: str) -> ConfigError:
    return ConfigError(
        "trainer.moe.router_replay needs a language model with routed experts",
        got=f"{model}: {why}",
        expected="a mixture-of-experts model such as Qwen3-MoE, Mixtral or DeepSeek",
        hint="set trainer.moe.router_replay=false",
    )
