"""The routers of a mixture of experts: which modules they are, and which experts they choose."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.routed_experts import RoutedExperts, small


def routers(model: nn.Module) -> list[nn.Module]:
    """Routers in the order of layers: what transformers records as such, and gives logits first and experts last."""
    for part in model.modules():
        recorder = getattr(part, "_can_record_outputs", None) or {}
        kind = getattr(recorder.get("router_logits"), "target_class", None)
        if kind is not None:
            return [module for module in model.modules() if isinstance(module, kind)]
    return []


class ChosenExperts:
    """Remembers which experts the routers of a model chose in the latest forward pass of each thread."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self._latest = threading.local()
        for number, router in enumerate(layers):
            router.register_forward_hook(self._hook(number))

    def _hook(self, number: int) -> Any:
        def remember(module: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> None:
            if number == 0:
                self._latest.chosen = []
            self._latest.chosen.append(output[-1])

        return remember

    def take(self) -> RoutedExperts:
        """Of the tokens of the pass, which is forgotten."""
        chosen = torch.cat(self._latest.chosen, dim=1).cpu().numpy()
        del self._latest.chosen
        return small(chosen)
