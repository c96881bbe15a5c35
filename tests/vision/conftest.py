"""Tiny vision-language models, made once."""

from __future__ import annotations

import functools
import io

import numpy as np
import pytest
import torch
from PIL import Image
from support.vision import FAMILIES, vision_model, vision_processor, vision_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agentrl.message import ImagePart
from agentrl.render.images import ImageProcessor
from agentrl.render.renderer import Renderer


class Eyes:
    """A family's tokenizer, processor, renderer and model."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.tokenizer: PreTrainedTokenizerFast = vision_tokenizer()
        self.images: ImageProcessor = vision_processor(family, self.tokenizer)
        self.renderer = Renderer(self.tokenizer, images=self.images)

    @functools.cached_property
    def model(self) -> PreTrainedModel:
        return vision_model(self.family, self.tokenizer)


@functools.cache
def eyes_of(family: str) -> Eyes:
    return Eyes(family)


@pytest.fixture(params=FAMILIES)
def eyes(request: pytest.FixtureRequest) -> Eyes:
    return eyes_of(request.param)


def noise(height: int, width: int, seed: int = 0) -> ImagePart:
    """An image of random pixels, as PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return ImagePart(data=file.getvalue())


def processor_inputs(eyes: Eyes, ids: list[int], images: list[ImagePart]) -> dict[str, torch.Tensor]:
    """What transformers' model wants besides ids without sampled placeholders."""
    opened = [Image.open(io.BytesIO(image.data)) for image in images]
    found = dict(eyes.images.processor(images=opened, return_tensors="pt"))
    kinds = torch.tensor([[int(token == eyes.images.pad_id) for token in ids]])
    return {**found, "mm_token_type_ids": kinds}
