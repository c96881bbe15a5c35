"""A trained policy as a folder: a whole model, or adapters alone where these are what is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from agentrl.render.images import ImageProcessor
from agentrl.training.checkpoint import save_adapter_folder, save_model_folder, whole_on_cpu
from agentrl.training.models.lora import has_adapters
from agentrl.training.models.weights import ModelWeights


def save_policy_folder(
    source: ModelWeights, tokenizer: PreTrainedTokenizerBase, folder: Path, images: ImageProcessor | None = None
) -> None:
    """Write a policy as it is now; ranks that share it help.

    Args:
        source: Of its tensors.
        tokenizer: Its own.
        folder: Made if needed.
        images: The image processor of a model that sees.

    Raises:
        OSError: it cannot be written.
    """
    model = source.model
    if has_adapters(model):
        save_adapter_folder(model, tokenizer, folder, images, trained=source.trained())
    else:
        weights = source.weights() if source.ranks.are_many else None
        save_model_folder(model, tokenizer, folder, images, weights=weights)


def copy_policy(
    source: ModelWeights, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None = None
) -> Callable[[Path], None]:
    """Copy what `save_policy_folder` writes to the CPU; gives what writes the copy while training goes on."""
    model = source.model
    if has_adapters(model):
        trained = {name: tensor.detach().to("cpu", copy=True) for name, tensor in source.trained().items()}
        return lambda folder: save_adapter_folder(model, tokenizer, folder, images, trained=trained)
    weights = whole_on_cpu(model, source.weights())
    return lambda folder: save_model_folder(model, tokenizer, folder, images, weights=weights)
