"""Routers of mixture-of-experts models, and a recorder of their routed experts."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.models.routed_experts import RoutedExperts, small


def routers(model: nn.Module) -> list[nn.Module]:
    """Find the routers of a model, in the order of layers.

    They are the modules whose outputs transformers records as router logits: logits first, chosen experts last.
    """
    for part in model.modules():
        recorder = getattr(part, "_can_record_outputs", None) or {}
        kind = getattr(recorder.get("router_logits"), "target_class", None)
        if kind is not None:
            return [module for module in model.modules() if isinstance(module, kind)]
    return []


class ChosenExperts:
    """Recorder of the experts that a model's routers chose in each thread's latest forward pass."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self._latest = threading.local()
        for number, router in enumerate(layers):
            router.register_forward_hook(self._hook(number))

    def _hook(self, number: int) -> Any:
        def record(module: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> None:
            if number == 0:
                self._latest.chosen = []
            self._latest.chosen.append(output[-1])

        return record

    def take(self) -> RoutedExperts:
        """Return and clear the experts of this thread's latest pass."""
        chosen = torch.cat(self._latest.chosen, dim=1).cpu().numpy()
        del self._latest.chosen
        return small(chosen)
