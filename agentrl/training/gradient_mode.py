"""Gradient checkpointing for the duration of a training step."""

from __future__ import annotations

from collections.abc import Iterator
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
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    try:
        yield
    finally:
        model.eval()
        model.gradient_checkpointing_disable()
