"""Gradient checkpointing for the duration of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel


@contextmanager
def gradients_recomputed(model: PreTrainedModel, *, enabled: bool) -> Iterator[None]:
    """Recompute activations in backward passes inside the block, if `enabled`; the model is left in `eval` mode.

    Layers recompute only in training mode. Dropout is off in models that `load_model` gives, so that the mode changes
    no number.
    """
    if not enabled:
        yield
        return
    _switch(model, "enable")({"use_reentrant": False})
    model.train()
    try:
        yield
    finally:
        model.eval()
        _switch(model, "disable")()


def _switch(model: PreTrainedModel, verb: str) -> Callable[..., None]:
    """Transformers 5 calls it activation checkpointing, transformers 4 gradient checkpointing."""
    name = f"activation_checkpointing_{verb}"
    switch: Callable[..., None] = getattr(model, name if hasattr(model, name) else f"gradient_checkpointing_{verb}")
    return switch
