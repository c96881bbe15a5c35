"""New Hugging Face model folders: a tokenizer, a chat template and a small Qwen3 model with random weights.

The tokenizer is a byte-level BPE trained on text that the model will see; the template is Qwen's variant of ChatML.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from agentrl.config.config import ScratchModelConfig
from agentrl.config.model_size import FEED_FORWARD_RATIO
from agentrl.errors import ConfigError
from agentrl.models.model_files import complete_config, save_tokenizer

CHAT_TEMPLATE = """\
{%- macro tool_list() -%}
{{- '# Tools\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- '\\nTo call one, answer with\\n<tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call>' -}}
{%- endmacro -%}
{%- if tools and (not messages or messages[0].role != 'system') -%}
{{- '<|im_start|>system\\n' + tool_list() + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.content is string -%}
{%- set text = message.content -%}
{%- else -%}
{%- set text = message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join -%}
{%- endif -%}
{%- if message.role == 'system' -%}
{{- '<|im_start|>system\\n' + text -}}
{%- if tools and loop.first -%}{{- '\\n\\n' + tool_list() -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + text + '\\n</tool_response><|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if message.reasoning_content -%}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n' -}}{%- endif -%}
{{- text -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{{- '\\n' if text or not loop.first else '' -}}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{{- call.arguments if call.arguments is string else call.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


PADDING = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
ROLE_STARTS = tuple(f"{TURN_START}{role}\n" for role in ("system", "user", "assistant"))
"""Starts of messages, which are frequent in rendered conversations; one token each."""
CONTROL_TOKENS = (PADDING, TURN_START, TURN_END, *ROLE_STARTS)
"""Special tokens, which decoding can skip."""
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
"""Tags that are one token each but not special, because parsers read them in the decoded text."""

BYTES = 256
_PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"
"""Pattern of pre-tokens: a word, a digit or punctuation with the space before it, or one other whitespace character."""
_NUMBERED_NAME = r" ?\p{L}+ \p{N}{1,2}(?!\p{N})|"
"""Pattern of a word followed by a number of one or two digits."""


def build_scratch_tokenizer(
    corpus: Iterable[str], *, vocab_size: int, max_context: int, numbered_names: bool
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with at most `vocab_size` entries; encoding and decoding any text is lossless.

    With `numbered_names`, merges may join a word and the number that follows it, as in ``mug 1``.

    Raises:
        ConfigError: the vocabulary cannot hold the 256 bytes and the special tokens.
    """
    special = [*CONTROL_TOKENS, *MARKUP_TOKENS]
    if vocab_size < BYTES + len(special):
        raise ConfigError(
            "the scratch vocabulary is too small", got=vocab_size, expected=f"at least {BYTES + len(special)}"
        )
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


def build_scratch_model(directory: Path, corpus: Iterable[str], config: ScratchModelConfig, *, seed: int) -> None:
    """Write a new model to `directory`, which `AutoTokenizer` and `AutoModelForCausalLM` can load.

    The tokenizer's merges are learned from the corpus. The same corpus, config and seed give the same files.
    """
    tokenizer = build_scratch_tokenizer(
        corpus,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        numbered_names=config.numbered_names,
    )
    model_config = scratch_model_config(
        config, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(model_config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    transformers_logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, directory)
    model.save_pretrained(directory)
    complete_config(directory)


def scratch_model_config(
    config: ScratchModelConfig, *, vocab_size: int, eos_token_id: int | None = None, pad_token_id: int | None = None
) -> Qwen3Config:
    """Create the transformers config of a new model.

    Raises:
        ConfigError: the sizes do not fit together.
    """
    if config.hidden_size % config.heads or config.heads % config.kv_heads or config.hidden_size // config.heads % 2:
        raise ConfigError(
            "the sizes of the scratch model do not fit together",
            got=f"hidden_size {config.hidden_size}, heads {config.heads}, kv_heads {config.kv_heads}",
            expected="an even hidden_size / heads, and kv_heads that divides heads",
        )
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=FEED_FORWARD_RATIO * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.hidden_size // config.heads,
        max_position_embeddings=config.max_context,
        initializer_range=config.initializer_range,
        tie_word_embeddings=config.tie_word_embeddings,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
