"""Which module of a model is the first that gives, or passes back, what is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


class ModuleWatch:
    """What was seen; names are those of `named_modules`."""

    def __init__(self) -> None:
        self.forward: str | None = None
        """The first module whose output is not finite, with what it was given."""
        self.backward: str | None = None
        """The first module, on the way back, that is told a gradient of its output which is not finite."""


@contextmanager
def watched_modules(model: nn.Module) -> Iterator[ModuleWatch]:
    """Look at every module's output, and at the gradient of it, inside the block."""
    watch = ModuleWatch()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(_forward(watch, name)).remove)
        yield watch


def _forward(watch: ModuleWatch, name: str) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if watch.forward is None and not _finite(output):
            given = "finite" if _finite(inputs) else "not finite"
            own = [key for key, parameter in module.named_parameters() if not _finite(parameter)]
            about = f", whose {', '.join(own)} holds what is not" if own else ""
            watch.forward = f"{name or 'the model'} ({type(module).__name__}): input {given}{about}"
        if isinstance(output, torch.Tensor) and output.requires_grad:
            register: Any = output.register_hook
            register(_backward(watch, f"{name} ({type(module).__name__})"))

    return hook


def _backward(watch: ModuleWatch, name: str) -> Any:
    def hook(gradient: torch.Tensor) -> None:
        if watch.backward is None and not _finite(gradient):
            watch.backward = f"of the output of {name}"

    return hook


def _finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(value.detach().isfinite().all())
    if isinstance(value, dict):
        return all(_finite(each) for each in value.values())
    return all(_finite(each) for each in value) if isinstance(value, list | tuple) else True
