"""Keeps what messages say text: no content can be encoded to a control token of the model.

An observation, a file that a tool reads, a task or another agent's answer may spell ``<|im_end|>``, and would then end
its message and begin another one, with a role of its choice. So each control token that a content spells gets a `BREAK`
before the template is rendered. The tokenizer finds no control token there, drops the break, and encodes the rest
letter by letter: the policy reads what is written. Contents without such a spelling are left as they are, but for lone
surrogates, which nothing can encode.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from agentrl.message import encodable

BREAK = "\ufdd0"
"""A code point that Unicode keeps free for such use inside a program: no text has it."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BLANK = " "
"""Takes the place of the break where a tokenizer knows its control tokens even in broken text."""


def unbroken(text: str) -> str:
    """Return a rendered text as it is read."""
    return text.replace(BREAK, "")


class ContentGuard:
    """Breaks the control tokens that messages spell.

    Args:
        tokens: The model's control tokens.
        is_text: Tells whether the tokenizer makes no control token of a text with breaks.
        normalize: What the tokenizer does to a text before it looks for control tokens; ``None`` for nothing.
    """

    def __init__(
        self,
        tokens: Collection[str],
        *,
        is_text: Callable[[str], bool],
        normalize: Callable[[str], str] | None = None,
    ) -> None:
        names = "|".join(map(re.escape, tokens)) or r"(?!)"
        self._spelled = re.compile(names)
        self._first_letter = re.compile(f"(?={names}).", re.DOTALL)
        self._tokens = frozenset(tokens)
        self._is_text = is_text
        self._normalize = normalize

    def message(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Guard all texts of a message as a chat template reads it."""
        content = row["content"]
        if not isinstance(content, str):
            together = "".join(part.get("text", "") for part in content)
            if self.text(together) != together:
                row = {**row, "content": list(_joined(content))}
        return self.texts(row)

    def texts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Guard all texts in a mapping, keys too."""
        guarded: dict[str, Any] = self._guarded(values)
        return guarded

    def text(self, text: str) -> str:
        """Guard a text."""
        text = encodable(text).replace(BREAK, "")
        if self._spelled.search(text) is not None:
            text = self._broken(text, self._breaking)
        if self._normalize is not None and self._spelled.search(normal := self._normalize(text)) is not None:
            text = self._broken(normal, self._breaking)
        return text

    def _guarded(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self._guarded(key): self._guarded(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [*map(self._guarded, value)]
        return value

    def _broken(self, text: str, breaking: str) -> str:
        """Put a break after the first letter of each spelling, overlapping ones, too; replace a token of one letter."""

        def broken(found: re.Match[str]) -> str:
            return REPLACEMENT if found[0] in self._tokens else found[0] + breaking

        return self._first_letter.sub(broken, text)

    @functools.cached_property
    def _breaking(self) -> str:
        """Return what breaks every token; found when the first one is spelled, for that takes a moment."""
        return BREAK if all(self._is_text(self._broken(token, BREAK)) for token in self._tokens) else BLANK


def _joined(parts: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Join texts that follow one another: a token may be spelled in two of them."""
    for kind, group in itertools.groupby(parts, key=lambda part: part["type"]):
        if kind == "text":
            yield {"type": kind, "text": "".join(part["text"] for part in group)}
        else:
            yield from group
