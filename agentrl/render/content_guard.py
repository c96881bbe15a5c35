"""Guard of message contents: no content is encoded to a control token of the model.

An observation, a file that a tool reads, a task or another agent's answer may spell ``<|im_end|>``, which would end its
message and let it begin another one with any role. Therefore a `BREAK` is put into each control token that a content
spells, before the template is rendered. The tokenizer then finds no control token, drops the break, and encodes the
rest as ordinary text: the policy reads the original text. Other contents do not change, except that lone surrogates,
which cannot be encoded, are replaced.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from agentrl.message import encodable

BREAK = "\ufdd0"
"""Code point that Unicode reserves for internal use of programs; texts do not contain it."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BLANK = " "
"""Replacement of the break for tokenizers that find control tokens even in broken text."""


def unbroken(text: str) -> str:
    """Return a rendered text without breaks."""
    return text.replace(BREAK, "")


class ContentGuard:
    """Guard that breaks the control tokens in messages.

    Args:
        tokens: Control tokens of the model.
        is_text: Returns True if the tokenizer finds no control token in a text with breaks.
        normalize: Normalization by the tokenizer before it looks for control tokens; ``None`` for none.
    """

    def __init__(
        self, tokens: Collection[str], *, is_text: Callable[[str], bool], normalize: Callable[[str], str] | None = None
    ) -> None:
        names = "|".join(map(re.escape, tokens)) or r"(?!)"
        self._spelled = re.compile(names)
        self._first_letter = re.compile(f"(?={names}).", re.DOTALL)
        self._tokens = frozenset(tokens)
        self._is_text = is_text
        self._normalize = normalize

    def message(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Guard all texts of a message in the form for chat templates."""
        content = row["content"]
        if not isinstance(content, str):
            together = "".join(part.get("text", "") for part in content)
            if self.text(together) != together:
                row = {**row, "content": list(_join_texts(content))}
        return self.texts(row)

    def texts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Guard all texts in a mapping, including keys."""
        guarded: dict[str, Any] = self._guard(values)
        return guarded

    def text(self, text: str) -> str:
        """Guard a text."""
        text = encodable(text).replace(BREAK, "")
        if self._spelled.search(text) is not None:
            text = self._broken(text, self._breaking)
        if self._normalize is not None and self._spelled.search(normal := self._normalize(text)) is not None:
            text = self._broken(normal, self._breaking)
        return text

    def _guard(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self._guard(key): self._guard(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [*map(self._guard, value)]
        return value

    def _broken(self, text: str, breaking: str) -> str:
        """Put a break after the first letter of each token, even of overlapping ones; replace one-letter tokens."""

        def broken(found: re.Match[str]) -> str:
            return REPLACEMENT if found[0] in self._tokens else found[0] + breaking

        return self._first_letter.sub(broken, text)

    @functools.cached_property
    def _breaking(self) -> str:
        """Text that breaks every token; computed on first use because it takes some time."""
        return BREAK if all(self._is_text(self._broken(token, BREAK)) for token in self._tokens) else BLANK


def _join_texts(parts: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Join adjacent texts, because a token may be spelled across two of them."""
    for kind, group in itertools.groupby(parts, key=lambda part: part["type"]):
        if kind == "text":
            yield {"type": kind, "text": "".join(part["text"] for part in group)}
        else:
            yield from group
