"""Detection of spelled-out control tokens in text, for services that render messages with their own tokenizer.

Most control tokens have one of a few shapes; the others are listed by model family. If the tokenizer of a service is
known, its control tokens are detected as well.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_ANGLE_SHAPES = (
    r"[|｜]",  # <|im_end|>, <｜User｜>, Gemma 4's <|turn>
    r"\w+[|｜]>",  # Gemma 4's <turn|>
    r"/?[a-z]*_\w*>",  # <start_of_turn>, <tool_call>, <BOS_TOKEN>, <extra_id_0>, TeleChat's <_user>
    r"/?[a-z]+:\w+>",  # Seed-OSS's <seed:bos>, <minimax:tool_call>, ERNIE's <mask:1>
    r"unused\d+>",
    r"</?SYS>>",  # Llama 2
)
_ANGLE_WORDS = (
    *("s", "bos", "eos", "unk", "pad", "mask", "cls", "sep", "eod", "sop", "eop"),  # sentencepiece, GLM
    *("think", "answer", "response", "escape", "image", "video", "audio", "role"),  # Qwen, Hunyuan, ERNIE, Ling
    *("eoh", "eoa", "eosys"),  # InternLM
    *("functions", "documents", "citations", "toolcall", "tools"),  # OLMo, Jamba, Nemotron, Hermes
    *("filename", "reponame"),  # StarCoder, Granite
)
_BRACKET_SHAPES = (
    r"\|",  # EXAONE's [|user|]
    r"/?[A-Z]+_[A-Z0-9_]*\]",  # Mistral's [TOOL_CALLS], InternLM's [UNUSED_TOKEN_145]
    r"(?:unused|control_)\d+\]",  # BERT, openPangu, Mistral
    r"e~\[",  # MiniMax
    r">\[",
)
_BRACKET_WORDS = (
    *("INST", "THINK", "ARGS", "IMG", "PREFIX", "MIDDLE", "SUFFIX", "AUDIO", "TRANSCRIBE"),  # Mistral
    *("BOS", "EOS", "EOT", "PAD", "UNK", "CLS", "SEP", "MASK", "gMASK", "sMASK"),  # Kimi, GLM, BERT
    *("USER", "BOT", "SYSTEM"),  # Skywork
)
_OTHER_SHAPES = (
    r"\](?=~b\]|~!b\[|![a-z]~\[|<\])",  # MiniMax's ]~b], ]~!b[, ]!p~[, ]<]image[>[
    r"[|｜](?=DSML[|｜])",  # DeepSeek V3.2
    r"\|(?=\|\|[A-Z_]+\|\|\|)",  # OLMo's |||IP_ADDRESS|||
    r"\|(?=(?:ENDOFTEXT|SPEAKER|NEWLINE)\|)",  # Persimmon
    r">(?=>[A-Z]+<<)",  # Falcon's >>QUESTION<<
)


def _words(names: Collection[str], closing: str) -> str:
    return rf"/?(?:{'|'.join(names)}){closing}"


_ANGLE = "|".join([*_ANGLE_SHAPES, _words(_ANGLE_WORDS, ">")])
_BRACKET = "|".join([*_BRACKET_SHAPES, _words(_BRACKET_WORDS, r"\]")])
_SPELLED = re.compile(rf"(?i:<(?={_ANGLE}))|\[(?={_BRACKET})|{'|'.join(_OTHER_SHAPES)}")
"""The first character of a spelled control token."""


class TokenBreaker:
    """Function that breaks up spelled-out control tokens with a space after their first character.

    Args:
        tokens: Control tokens of a known tokenizer; single characters are ignored.
    """

    def __init__(self, tokens: Collection[str] = ()) -> None:
        own = "|".join(re.escape(token) for token in sorted(tokens) if len(token.strip()) > 1)
        self._own = re.compile(f"(?={own}).", re.DOTALL) if own else None

    def __call__(self, text: str) -> str:
        """Return the text with all spelled-out control tokens broken up.

        >>> TokenBreaker()("done<|im_end|> [/INST] a < b"), TokenBreaker(["@@END"])("so @@END")
        ('done< |im_end|> [ /INST] a < b', 'so @ @END')
        """
        text = _SPELLED.sub(_with_blank, text)
        return text if self._own is None else self._own.sub(_with_blank, text)


def _with_blank(found: re.Match[str]) -> str:
    return f"{found[0]} "
