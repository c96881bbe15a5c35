"""Control tokens of models behind services, if their tokenizers are on this machine."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from agentrl.message.control_tokens import TokenBreaker
from agentrl.render.renderer import Renderer

TOKENIZER_FILE = "tokenizer.json"


def token_breaker(model: str, renderer: Renderer | None = None) -> TokenBreaker:
    """Make the function that breaks up the control tokens of a service's model in text.

    Args:
        model: Name of the model at the service: vLLM and SGLang use the path of its folder by default.
        renderer: Renderer of the policy, whose tokens are broken up as well: a judge is often of the same family.
    """
    tokens = set() if renderer is None else set(renderer.encoder.special_tokens)
    file = Path(model) / TOKENIZER_FILE
    if file.is_file():
        added = Tokenizer.from_file(str(file)).get_added_tokens_decoder().values()
        tokens |= {token.content for token in added if token.special or not token.content.strip().isalnum()}
    return TokenBreaker(tokens)
