"""Text to token ids and back, through the tokenizer's own fast backend."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.errors import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CUT_MARK = "… [cut: {} characters left out]"
"""What stands where a text was cut."""
CHARACTERS_PER_TOKEN = 16
"""A long text is first encoded up to so many characters per token of its budget; ordinary text has about four."""
UNSTABLE_TOKENS = 8
"""The last tokens of a prefix may differ from those of the whole text."""
_SEGMENT_CACHE = 2048


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a text, and where each character went."""

    ids: list[int]
    backend: Any

    def token_span(self, start: int, end: int) -> tuple[int, int]:
        """First token and the token after the last one that hold characters `start` to `end`."""
        first = next((t for i in range(start, end) if (t := self.backend.char_to_token(i)) is not None), None)
        if first is None:
            return 0, 0
        last = next(t for i in range(end - 1, start - 1, -1) if (t := self.backend.char_to_token(i)) is not None)
        return first, last + 1


class TextEncoder:
    """Encodes text without adding anything to it.

    Text between added tokens (``<|im_end|>`` and the like) is encoded piece by piece where the tokenizer allows it, so
    that pieces that come back, such as system prompts, are encoded once.

    Raises:
        TemplateError: the tokenizer has no fast backend.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if not tokenizer.is_fast:
            raise TemplateError(
                f"{type(tokenizer).__name__} is a slow tokenizer",
                expected="one with a tokenizer.json",
                hint="save it with AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(...)",
            )
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._added: dict[str, int] = {t.content: i for i, t in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        names = sorted(self._added, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._segment = functools.lru_cache(_SEGMENT_CACHE)(self._encode_whole)
        if not self._pieces_are_independent():
            self._split = None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        if self._split is None:
            return list(self._segment(text))
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece in self._added:
                ids.append(self._added[piece])
            elif piece:
                ids.extend(self._segment(piece))
        return ids

    def encode_with_offsets(self, text: str) -> Encoded:
        """Token ids of `text`, with the way back from characters to tokens."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return Encoded(encoding.ids, encoding)

    def added_id(self, token: str) -> int | None:
        """Id of an added token, ``None`` when the vocabulary has no such added token."""
        return self._added.get(token)

    def is_added(self, token_id: int) -> bool:
        """Whether an id stands for an added token, which text never merges with."""
        return token_id in self._added.values()

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, exactly."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def decode_plain(self, ids: Sequence[int], *, keep: frozenset[int] = frozenset()) -> str:
        """Text of token ids, special tokens left out but for those in `keep`."""
        left_out = self._special - keep
        return self.decode([i for i in ids if i not in left_out])

    def cut(self, text: str, max_tokens: int) -> str:
        """Cut `text` to a token budget, with a mark that tells how many characters were left out.

        A text that fits comes back as it is. When not even the mark fits, the mark alone is returned. The cost depends
        on the budget and not on the length of the text: only as much of it is encoded as the budget could hold.
        """
        if text.isascii() and len(text) < max_tokens:
            return text
        encoding, is_whole = self._beginning(text, max_tokens)
        total = len(encoding.ids)
        if is_whole and total <= max_tokens:
            return text
        kept = min(max_tokens, total)
        while kept > 0:
            end = encoding.offsets[kept][0] if kept < total else encoding.offsets[kept - 1][1]
            shortened = text[:end] + CUT_MARK.format(len(text) - end)
            excess = len(self._encode_whole(shortened)) - max_tokens
            if excess <= 0:
                return shortened
            kept -= excess
        return CUT_MARK.format(len(text))

    def _beginning(self, text: str, max_tokens: int) -> tuple[Any, bool]:
        """Encode so much of `text` that it exceeds a budget; whether that is all of it."""
        most = (max_tokens + UNSTABLE_TOKENS) * self._longest_token
        size = CHARACTERS_PER_TOKEN * (max_tokens + UNSTABLE_TOKENS)
        while True:
            encoding = self._backend.encode(text[:size], add_special_tokens=False)
            if size >= min(len(text), most) or len(encoding.ids) >= max_tokens + UNSTABLE_TOKENS:
                return encoding, size >= len(text)
            size = min(4 * size, most)

    @functools.cached_property
    def _longest_token(self) -> int:
        """Maximum number of characters that one token stands for."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def _encode_whole(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def _pieces_are_independent(self) -> bool:
        """Whether text around an added token is encoded as if it stood alone (not so with prefix spaces or strips)."""
        if self._split is None:
            return False
        probes = [f"{left}{name}{right}" for name in self._added for left, right in (("a\n", "\nb "), ("a ", " b\n"))]
        whole = [list(self._encode_whole(probe)) for probe in probes]
        return whole == [self.encode(probe) for probe in probes]
