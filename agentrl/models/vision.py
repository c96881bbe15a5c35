"""The forward pass of a vision-language model over tokens whose images are known by their place.

transformers' models find images by the id of their placeholders; here the ledger says where they are, so that a
placeholder which the policy sampled is a token like any other. The models are those whose `base_model` has a
`language_model` and `get_image_features`, with three rotary positions per token: Qwen2.5-VL and Qwen3-VL.
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
from agentrl.image import ImageReader, PlacedImage, rope_positions
from agentrl.message import ImagePart

MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl")
"""`model_type` of the models that can be read like this."""


@dataclass(frozen=True, slots=True)
class View:
    """Neighbouring tokens of a forward pass that stand for an image, or for a part of it."""

    row: int
    first: int
    """Index in the row of the first of the tokens."""
    skipped: int
    """Tokens of the image before them, which are not part of this pass."""
    count: int
    image: ImagePart


def views_of(images: Sequence[PlacedImage], start: int, end: int, *, row: int = 0, at: int = 0) -> Iterator[View]:
    """The images, or parts of them, among a sequence's tokens `start` to `end`, which stand in a `row` from `at` on."""
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
    """The last hidden states of sequences from their start, right-padded: [sequences, longest, width].

    Args:
        model: A causal language model.
        input_ids: int64 [sequences, longest], on the model's device.
        images: Of each sequence; where there are none at all, `model` need not be a vision-language model.
        reader: Prepares images.
        options: More for the layers of a model that reads text.
    """
    if not any(images):
        return cast("Tensor", model.base_model(input_ids=input_ids, use_cache=False, **options).last_hidden_state)
    length = input_ids.shape[1]
    views = [view for row, own in enumerate(images) for view in views_of(own, 0, length, row=row)]
    positions = np.stack([rope_positions(own, 0, length) for own in images], axis=1)
    return read(model, input_ids, views, torch.from_numpy(positions).to(input_ids.device), reader)


def read(
    model: PreTrainedModel,
    input_ids: Tensor,
    views: Sequence[View],
    positions: Tensor,
    reader: ImageReader | None,
    **options: Any,
) -> Tensor:
    """The last hidden states of a forward pass with images: [rows, tokens, width].

    Args:
        model: A vision-language model of `MODEL_TYPES`.
        input_ids: int64 [rows, tokens].
        views: Which tokens stand for images, in order of rows and tokens; the ids there do not matter.
        positions: Rotary positions, int64 [3, rows, tokens].
        reader: Prepares images.
        options: For the language model.
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
    """Compute the vision tower's features of all views, one after the other."""

    embeddings: Tensor
    """[tokens, width]."""
    deeper: list[Tensor]
    """What Qwen3-VL adds to the hidden states of its first layers: [tokens, width] each."""


def _features(base: Any, views: Sequence[View], reader: ImageReader) -> _Features:
    """Each image goes through the tower once, however often it is seen."""
    numbers: dict[ImagePart, int] = {}
    for view in views:
        numbers.setdefault(view.image, len(numbers))
    patches = [reader(image) for image in numbers]
    merge = int(base.config.vision_config.spatial_merge_size)
    grid = torch.tensor([[1, image.rows * merge, image.columns * merge] for image in patches], device=base.device)
    values = torch.from_numpy(np.concatenate([image.values for image in patches])).to(base.device)
    output = base.get_image_features(values, grid, return_dict=True)

    def seen(images: Sequence[Tensor]) -> Tensor:
        parts = [images[numbers[view.image]][view.skipped : view.skipped + view.count] for view in views]
        return torch.cat(parts)

    deeper = getattr(output, "deepstack_features", None) or []
    return _Features(seen(output.pooler_output), [seen(layer) for layer in deeper])
