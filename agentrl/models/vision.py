"""Forward pass of a vision-language model with images at known positions.

The models of transformers find images by their placeholder ids. Here, the ledger provides the positions, so that a
placeholder that the policy sampled is an ordinary token. It supports models whose `base_model` has a `language_model`
and `get_image_features`, with three rotary positions per token: Qwen2.5-VL and Qwen3-VL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.errors import UsageError
from agentrl.message import ImagePart
from agentrl.message.image import ImageReader, PlacedImage, rope_positions

MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl")
"""Supported values of `model_type`."""


@dataclass(frozen=True, slots=True)
class View:
    """Consecutive tokens of a forward pass that represent an image or a part of it."""

    row: int
    first: int
    """Index in the row of the first token."""
    skipped: int
    """Number of the image's tokens before this pass."""
    count: int
    image: ImagePart


def find_views(images: Sequence[PlacedImage], start: int, end: int, *, row: int = 0, at: int = 0) -> Iterator[View]:
    """Yield the images or parts of images in tokens `start` to `end` of a sequence, placed in `row` from index `at`."""
    for image in images:
        first, last = max(image.start, start), min(image.end, end)
        if first < last:
            yield View(row, at + first - start, first - image.start, last - first, image.image)


def hidden_states(
    model: PreTrainedModel,
    input_ids: Tensor,
    images: Sequence[Sequence[PlacedImage]],
    reader: ImageReader | None,
    **options: Any,
) -> Tensor:
    """Compute the last hidden states of whole, right-padded sequences: [sequences, longest, width].

    Args:
        model: A causal language model; with images, a vision-language model.
        input_ids: Token ids on the model's device: int64 [sequences, longest].
        images: Images of each sequence.
        reader: Image processor.
        options: Further arguments of the model, for sequences without images.
    """
    if not any(images):
        return cast("Tensor", model.base_model(input_ids=input_ids, use_cache=False, **options).last_hidden_state)
    length = input_ids.shape[1]
    views = [view for row, own in enumerate(images) for view in find_views(own, 0, length, row=row)]
    positions = np.stack([rope_positions(own, 0, length) for own in images], axis=1)
    return forward_with_images(model, input_ids, views, torch.from_numpy(positions).to(input_ids.device), reader)


def forward_with_images(
    model: PreTrainedModel,
    input_ids: Tensor,
    views: Sequence[View],
    positions: Tensor,
    reader: ImageReader | None,
    **options: Any,
) -> Tensor:
    """Compute the last hidden states of a forward pass with images: [rows, tokens, width].

    Args:
        model: A vision-language model of `MODEL_TYPES`.
        input_ids: Token ids: int64 [rows, tokens].
        views: Tokens that represent images, in order of rows and tokens; their ids are ignored.
        positions: Rotary positions: int64 [3, rows, tokens].
        reader: Image processor.
        options: Further arguments of the language model.

    Raises:
        UsageError: the model does not support images, or `reader` is missing.
    """
    if reader is None or model.config.model_type not in MODEL_TYPES:
        raise UsageError(
            "this model cannot read images", got=model.config.model_type, expected=f"one of {', '.join(MODEL_TYPES)}"
        )
    base: Any = model.base_model
    embeddings = base.get_input_embeddings()(input_ids)
    mask = torch.zeros(input_ids.shape, dtype=torch.bool)
    for view in views:
        mask[view.row, view.first : view.first + view.count] = True
    mask = mask.to(input_ids.device)
    features = _features(base, views, reader)
    embeddings = embeddings.masked_scatter(mask[..., None], features.embeddings.to(embeddings))
    if features.deeper:
        options |= {"visual_pos_masks": mask, "deepstack_visual_embeds": features.deeper}
    output = base.language_model(inputs_embeds=embeddings, position_ids=positions, use_cache=False, **options)
    return cast("Tensor", output.last_hidden_state)


@dataclass(frozen=True, slots=True)
class _Features:
    """Vision tower features of all views, concatenated."""

    embeddings: Tensor
    """Input embeddings of the views' tokens: [tokens, width]."""
    deeper: list[Tensor]
    """Features that Qwen3-VL adds to the hidden states of its first layers: [tokens, width] each."""


def _features(base: Any, views: Sequence[View], reader: ImageReader) -> _Features:
    """Compute the features of views; the tower processes each distinct image once."""
    numbers: dict[ImagePart, int] = {}
    for view in views:
        numbers.setdefault(view.image, len(numbers))
    patches = [reader(image) for image in numbers]
    merge = int(base.config.vision_config.spatial_merge_size)
    grid = torch.tensor([[1, image.rows * merge, image.columns * merge] for image in patches], device=base.device)
    values = torch.from_numpy(np.concatenate([image.values for image in patches])).to(base.device)
    output = base.get_image_features(values, grid, return_dict=True)

    def select(images: Sequence[Tensor]) -> Tensor:
        parts = [images[numbers[view.image]][view.skipped : view.skipped + view.count] for view in views]
        return torch.cat(parts)

    deeper = getattr(output, "deepstack_features", None) or []
    return _Features(select(output.pooler_output), [select(layer) for layer in deeper])
