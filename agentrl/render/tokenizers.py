"""Tokenizers of model folders: loading, comparison, and the control tokens that are broken up in text."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentrl.errors import ConfigError, UsageError
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


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model folder or of a model on the Hugging Face hub.

    Raises:
        UsageError: the tokenizer cannot be loaded.
    """
    try:
        return cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(path, use_fast=True))
    except (OSError, ValueError, KeyError) as error:
        is_gone = Path(path).is_absolute() and not Path(path).exists()
        raise UsageError(
            f"cannot load the tokenizer of {path}",
            got="no such folder" if is_gone else str(error).strip().splitlines()[0],
            expected="a folder with a Hugging Face tokenizer, or a model on the hub and a connection to it",
        ) from error


def check_same_tokens(what: str, path: str, model_path: str) -> None:
    """Check that a model has the policy's vocabulary: the same ids for the same pieces of text.

    `what` describes the model in the error, such as ``the teacher``.

    Raises:
        ConfigError: the vocabularies differ; shows the first difference.
        UsageError: a model has no tokenizer.
    """
    if (difference := token_difference(path, model_path)) is not None:
        raise ConfigError(
            f"{what} does not have the policy's tokenizer",
            got=difference,
            expected="the same pieces under the same ids",
            hint="use a model of the policy's family, or a run that started from the same model",
        )


def token_difference(path: str, model_path: str) -> str | None:
    """Describe how the vocabulary of the model at `path` differs from the policy's; ``None`` if they are the same.

    Raises:
        UsageError: a model has no tokenizer.
    """
    if path == model_path:
        return None
    own, other = (
        {number: piece for piece, number in load_tokenizer(at).get_vocab().items()} for at in (model_path, path)
    )
    apart = sorted(number for number in own.keys() | other.keys() if own.get(number) != other.get(number))
    if not apart:
        return None
    first = apart[0]
    return (
        f"{len(apart)} ids that differ; id {first} is {_piece(other.get(first))} for {path} "
        f"and {_piece(own.get(first))} for {model_path}"
    )


def _piece(piece: str | None) -> str:
    return "nothing" if piece is None else repr(piece)
