"""A small byte-level BPE tokenizer with ChatML special tokens, trained on the text that a model will see."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentrl.errors import ConfigError
from agentrl.training.scratch_template import CHAT_TEMPLATE

PADDING = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CONTROL_TOKENS = (PADDING, TURN_START, TURN_END)
"""Tokens that decoding for people leaves out."""
MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<action>",
    "</action>",
)
"""One token each, but part of the text: parsers read them."""

BYTES = 256
_PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"
"""A word, a digit or punctuation with the space before it; other white space one character at a time."""


def build_scratch_tokenizer(corpus: Iterable[str], *, vocab_size: int, max_context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with at most `vocab_size` entries; every text survives encoding and decoding.

    Raises:
        ConfigError: the vocabulary cannot hold the 256 bytes and the special tokens.
    """
    special = [*CONTROL_TOKENS, *MARKUP_TOKENS]
    if vocab_size < BYTES + len(special):
        raise ConfigError("scratch vocabulary is too small", got=vocab_size, expected=f"{BYTES + len(special)} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_as_turns(_without_special(corpus, special)), trainer)
    tokenizer.add_tokens([AddedToken(text, special=text in CONTROL_TOKENS, normalized=False) for text in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PADDING,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_context,
        clean_up_tokenization_spaces=False,
    )


def _without_special(corpus: Iterable[str], special: list[str]) -> Iterable[str]:
    for text in corpus:
        for token in special:
            text = text.replace(token, "\n")
        yield text


def _as_turns(corpus: Iterable[str]) -> Iterable[str]:
    """Each text with the names of the roles around it, which the chat template writes as often as texts."""
    for text in corpus:
        yield from ("user\n", text, "assistant\n")
