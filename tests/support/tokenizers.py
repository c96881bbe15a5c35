"""Small byte-level BPE tokenizers with the special tokens and the chat template of a model family."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from support import deepseek_templates as deepseek
from support import family_templates as templates
from support import mistral_templates as mistral
from support import other_templates as others
from support.chat_templates import (
    GEMMA,
    GEMMA3,
    GEMMA4,
    LLAMA3,
    LLAMA3_FIRST,
    QWEN3,
    QWEN3_CODER,
    QWEN25,
    QWEN25_VL,
)

DEFAULT_TEXT = (
    "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a drawer 2 and a countertop 1.",
    "Your task is to: put a clean mug in the cabinet. > go to cabinet 1. The cabinet 1 is closed. On it, nothing.",
    '{"name": "midpoint", "arguments": {"low": 1, "high": 100}} Higher. Lower. Guess a number from 1 to 100.',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFamily:
    """The added tokens and the template of a family."""

    chat_template: str
    special: tuple[str, ...]
    """Tokens that are left out of an answer's text."""
    plain: tuple[str, ...] = ()
    """Tokens of their own that are part of an answer's text."""
    eos: str
    bos: str | None = None


_FREQUENT = "aeostn<|>_\u0120\u010a"
"""Letters, and space and newline as byte-level BPE writes them."""
_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TOOL_TAGS = ("<tool_call>", "</tool_call>")
_THINK_TAGS = ("<think>", "</think>")
_MISTRAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_DEEPSEEK_ROLES = ("<｜User｜>", "<｜Assistant｜>", *_THINK_TAGS)
_DEEPSEEK_TOOLS = tuple(
    f"<｜tool▁{name}｜>"
    for name in (
        [
            "calls▁begin",
            "calls▁end",
            "call▁begin",
            "call▁end",
            "sep",
            "outputs▁begin",
            "outputs▁end",
            "output▁begin",
            "output▁end",
        ]
    )
)
_KIMI = ("[BOS]", "[EOS]", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")
_KIMI_TOOLS = tuple(
    f"<|tool_{name}|>"
    for name in ["calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end"]
)
TOKENIZER_FAMILIES: Mapping[str, TokenizerFamily] = {
    "qwen2.5": TokenizerFamily(chat_template=QWEN25, special=_CHATML, plain=_TOOL_TAGS, eos="<|im_end|>"),
    "qwen2.5-vl": TokenizerFamily(chat_template=QWEN25_VL, special=(*_CHATML, *_VISION), eos="<|im_end|>"),
    "qwen3": TokenizerFamily(
        chat_template=QWEN3,
        special=_CHATML,
        plain=(*_TOOL_TAGS, "<tool_response>", "</tool_response>", "<think>", "</think>"),
        eos="<|im_end|>",
    ),
    "qwen3_coder": TokenizerFamily(
        chat_template=QWEN3_CODER,
        special=_CHATML,
        plain=(*_TOOL_TAGS, "<tool_response>", "</tool_response>", "<think>", "</think>"),
        eos="<|im_end|>",
    ),
    "llama3": TokenizerFamily(
        chat_template=LLAMA3,
        special=(
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
        ),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "gemma": TokenizerFamily(
        chat_template=GEMMA,
        special=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        eos="<eos>",
        bos="<bos>",
    ),
    "gemma4": TokenizerFamily(
        chat_template=GEMMA4,
        special=(
            *("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool>"),
            *("<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
        ),
        eos="<eos>",
        bos="<bos>",
    ),
    "mistral": TokenizerFamily(
        chat_template=mistral.MISTRAL,
        special=(
            *_MISTRAL,
            *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
            *("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        ),
        eos="</s>",
        bos="<s>",
    ),
    "mistral_v3": TokenizerFamily(
        chat_template=mistral.MISTRAL_V3,
        special=(*_MISTRAL, "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
        eos="</s>",
        bos="<s>",
    ),
    "glm": TokenizerFamily(
        chat_template=templates.GLM45,
        special=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        plain=(
            *(*_TOOL_TAGS, *_THINK_TAGS, "<tool_response>", "</tool_response>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        eos="<|endoftext|>",
    ),
    "deepseek_v3": TokenizerFamily(
        chat_template=deepseek.DEEPSEEK_V3,
        special=_DEEPSEEK,
        plain=(*_DEEPSEEK_ROLES, *_DEEPSEEK_TOOLS),
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    "deepseek_v3.1": TokenizerFamily(
        chat_template=deepseek.DEEPSEEK_V31,
        special=_DEEPSEEK,
        plain=(*_DEEPSEEK_ROLES, *_DEEPSEEK_TOOLS),
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    "deepseek_v3.2": TokenizerFamily(
        chat_template=deepseek.DEEPSEEK_V32,
        special=_DEEPSEEK,
        plain=(*_DEEPSEEK_ROLES, "｜DSML｜"),
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    "kimi_k2": TokenizerFamily(
        chat_template=templates.KIMI_K2, special=(*_KIMI, *_KIMI_TOOLS), eos="<|im_end|>", bos="[BOS]"
    ),
    "kimi_k2_thinking": TokenizerFamily(
        chat_template=templates.KIMI_K2_THINKING,
        special=(*_KIMI, *_KIMI_TOOLS),
        plain=_THINK_TAGS,
        eos="<|im_end|>",
        bos="[BOS]",
    ),
    "gpt_oss": TokenizerFamily(
        chat_template=templates.GPT_OSS,
        special=(
            *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
            *("<|start|>", "<|end|>", "<|message|>", "<|call|>"),
        ),
        eos="<|return|>",
        bos="<|startoftext|>",
    ),
    "minimax_m2": TokenizerFamily(
        chat_template=templates.MINIMAX_M2,
        special=("]~!b[", "]~b]", "[e~["),
        plain=(*_THINK_TAGS, "<minimax:tool_call>", "</minimax:tool_call>"),
        eos="[e~[",
        bos="]~!b[",
    ),
    "lfm2": TokenizerFamily(
        chat_template=others.LFM25,
        special=(
            *(*_CHATML, "<|startoftext|>", "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>"),
            *("<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>"),
        ),
        plain=_THINK_TAGS,
        eos="<|im_end|>",
        bos="<|startoftext|>",
    ),
    "seed_oss": TokenizerFamily(
        chat_template=others.SEED_OSS,
        special=(
            *("<seed:bos>", "<seed:eos>", "<seed:pad>", "<seed:think>", "</seed:think>"),
            *("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>", "<seed:tool_call>", "</seed:tool_call>"),
        ),
        eos="<seed:eos>",
        bos="<seed:bos>",
    ),
    "apertus": TokenizerFamily(
        chat_template=others.APERTUS,
        special=(
            *("<s>", "</s>", "<|system_start|>", "<|system_end|>", "<|developer_start|>", "<|developer_end|>"),
            *("<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>", "<|inner_prefix|>"),
            *("<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"),
        ),
        eos="<|assistant_end|>",
        bos="<s>",
    ),
    "llama4": TokenizerFamily(
        chat_template=templates.LLAMA4,
        special=(
            *("<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>"),
            *("<|eom|>", "<|eot|>", "<|python_start|>", "<|python_end|>"),
        ),
        eos="<|eot|>",
        bos="<|begin_of_text|>",
    ),
}
"""Families by name."""


def build_tokenizer(
    family: str, *, text: Iterable[str] = DEFAULT_TEXT, vocab_size: int = 400
) -> PreTrainedTokenizerFast:
    """A tokenizer that knows every byte, with merges learned from `text`.

    Args:
        family: A name in `TOKENIZER_FAMILIES`.
        text: What the merges are learned from.
        vocab_size: Entries before the family's added tokens; 256 bytes and then merges.
    """
    return assemble_tokenizer(family, train_bpe(text, vocab_size=vocab_size))


def train_bpe(text: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE backend without added tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(text, trainer)
    return backend


def random_bpe(seed: int, *, merges: int = 60, words: bool = True) -> Tokenizer:
    """A byte-level BPE backend whose merges are drawn at random: no text was ever meant to be encoded with it.

    Args:
        seed: Of the draw.
        merges: Number of merges, mostly of frequent letters, spaces and newlines.
        words: Text is split into words first; without, tokens may reach over spaces and lines.
    """
    generator = random.Random(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    parts, pairs = list(_FREQUENT), []
    for _ in range(merges):
        left, right = generator.choice(parts), generator.choice(parts)
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            parts.append(left + right)
            pairs.append((left, right))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    backend.decoder = decoders.ByteLevel()
    return backend


def train_unigram(text: Iterable[str] = DEFAULT_TEXT, *, vocab_size: int = 200) -> Tokenizer:
    """A backend like sentencepiece's: spaces are part of words, and rare characters are written as bytes."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces = ["<unk>", *(f"<0x{value:02X}>" for value in range(256))]
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=pieces, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(text, trainer)
    written = json.loads(backend.to_str())
    written["model"]["byte_fallback"], written["added_tokens"] = True, []
    return Tokenizer.from_str(json.dumps(written))


def train_words(text: Iterable[str] = DEFAULT_TEXT) -> Tokenizer:
    """A backend that knows whole words in lower case, drops white space, and has a token for unknown words."""
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(text, trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False))
    return backend


def assemble_tokenizer(family: str, backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Give a backend the added tokens and the chat template of a family."""
    parts = TOKENIZER_FAMILIES[family]
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in parts.special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in parts.plain])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=parts.eos, bos_token=parts.bos)
    tokenizer.chat_template = parts.chat_template
    return tokenizer


OTHER_TEMPLATES: Mapping[str, tuple[str, str]] = {
    "llama3_first": ("llama3", LLAMA3_FIRST),
    "gemma3": ("gemma", GEMMA3),
    "mistral_v7": ("mistral_v3", mistral.MISTRAL_V7),
    "deepseek_r1": ("deepseek_v3", deepseek.DEEPSEEK_R1),
    "deepseek_v3_joined": ("deepseek_v3", deepseek.DEEPSEEK_V3_JOINED),
    "deepseek_v3.1_joined": ("deepseek_v3.1", deepseek.DEEPSEEK_V31_JOINED),
    "deepseek_v4": ("deepseek_v3.2", deepseek.DEEPSEEK_V4),
    "glm47": ("glm", templates.GLM47),
    "glm45_training": ("glm", templates.GLM45_TRAINING),
    "kimi_k2_first": ("kimi_k2", templates.KIMI_K2_FIRST),
    "lfm2_first": ("lfm2", others.LFM2),
    "llama4_json": ("llama4", templates.LLAMA4_JSON),
}
"""Other published templates of these families: the family whose tokens they are written in, and the template."""


def build_with_other_template(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with a template in `OTHER_TEMPLATES`."""
    family, template = OTHER_TEMPLATES[name]
    tokenizer = build_tokenizer(family)
    tokenizer.chat_template = template
    return tokenizer
