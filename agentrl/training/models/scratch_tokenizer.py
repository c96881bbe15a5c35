"""A small byte-level BPE tokenizer with ChatML special tokens, trained on the text that a model will see."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentrl.errors import ConfigError
from agentrl.training.models.scratch_template import CHAT_TEMPLATE

PADDING = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
ROLE_STARTS = tuple(f"{TURN_START}{role}\n" for role in ("system", "user", "assistant"))
"""The template writes these as often as anything else: one token each."""
CONTROL_TOKENS = (PADDING, TURN_START, TURN_END, *ROLE_STARTS)
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
_NUMBERED_NAME = r" ?\p{L}+ \p{N}{1,2}(?!\p{N})|"
"""A word and a small number after it."""


def build_scratch_tokenizer(
    corpus: Iterable[str], *, vocab_size: int, max_context: int, numbered_names: bool
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with at most `vocab_size` entries; every text survives encoding and decoding.

    Args:
        corpus: Texts on which merges are learnt.
        vocab_size: With the special tokens.
        max_context: Most tokens of a sequence.
        numbered_names: Whether merges may join a word and the number after it, as in ``mug 1``.

    Raises:
        ConfigError: the vocabulary cannot hold the 256 bytes and the special tokens.
    """
    special = [*CONTROL_TOKENS, *MARKUP_TOKENS]
    if vocab_size < BYTES + len(special):
        raise ConfigError("scratch vocabulary is too small", got=vocab_size, expected=f"{BYTES + len(special)} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_NUMBERED_NAME + _PIECES if numbered_names else _PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_special(corpus, special), trainer)
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
