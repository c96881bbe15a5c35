"""Renderers of all families on one small vocabulary, made once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.tokenizers import build_tokenizer

from agentrl.render.renderer import Renderer

RendererOf = Callable[..., Renderer]


@pytest.fixture(scope="session")
def renderer_of() -> RendererOf:
    """A renderer by family name and `enable_thinking`."""
    made: dict[tuple[str, bool], Renderer] = {}

    def get(family: str, *, enable_thinking: bool = False) -> Renderer:
        key = (family, enable_thinking)
        if key not in made:
            made[key] = Renderer(build_tokenizer(family), enable_thinking=enable_thinking)
        return made[key]

    return get
