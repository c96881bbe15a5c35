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

from agentrl.message import Message, encodable

BREAK = "\ufdd0"
"""A code point that Unicode keeps free for such use inside a program: no text has it."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BLANK = " "
"""Takes the place of the break where a tokenizer knows its control tokens even in broken text."""


def unbroken(text: str) -> str:
    """Return a rendered text as it is read."""
    return text.replace(BREAK, "")


class Spellings:
    """Finds some tokens in texts."""

    def __init__(self, tokens: Collection[str]) -> None:
        names = "|".join(map(re.escape, tokens)) or r"(?!)"
        self._any = re.compile(names)
        self._first_letters = re.compile(f"(?={names}).", re.DOTALL)
        self._letters = {token for token in tokens if len(token) == 1}

    def occur_in(self, text: str) -> bool:
        """Return True if `text` spells one of the tokens."""
        return self._any.search(text) is not None

    def broken(self, text: str, breaking: str) -> str:
        """Put a break after the first letter of each spelling, overlapping ones, too; replace a token of one letter."""
        return self._first_letters.sub(lambda found: self._broken_letter(found[0], breaking), text)

    def _broken_letter(self, letter: str, breaking: str) -> str:
        return REPLACEMENT if letter in self._letters else letter + breaking


class Guard:
    """Breaks the control tokens that messages spell.

    Args:
        tokens: The model's control tokens.
        in_answers: Those of them with which an answer is written: the assistant's messages may hold them.
        is_text: Tells whether the tokenizer makes no control token of a text with breaks.
        normalize: What the tokenizer does to a text before it looks for control tokens; ``None`` for nothing.
    """

    def __init__(
        self,
        tokens: frozenset[str],
        *,
        in_answers: frozenset[str],
        is_text: Callable[[str], bool],
        normalize: Callable[[str], str] | None = None,
    ) -> None:
        self._tokens = tokens
        self._spellings = Spellings(tokens)
        self._in_answers = Spellings(tokens - in_answers)
        self._is_text = is_text
        self._normalize = normalize

    def message(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Guard all texts of a message as a chat template reads it."""
        spellings = self._in_answers if row["role"] == "assistant" else self._spellings
        content = row["content"]
        if not isinstance(content, str):
            together = "".join(part.get("text", "") for part in content)
            if self._broken(together, spellings) != together:
                row = {**row, "content": list(_joined(content))}
        guarded: dict[str, Any] = self._guarded(row, spellings)
        return guarded

    def schema(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        """Guard all texts of a tool's schema."""
        guarded: dict[str, Any] = self._guarded(tool, self._spellings)
        return guarded

    def text(self, text: str) -> str:
        """Guard a text that anybody may have written."""
        return self._broken(text, self._spellings)

    def answer(self, text: str) -> str:
        """Guard the text of an answer that the policy did not sample."""
        return self._broken(text, self._in_answers)

    def content_of(self, message: Message) -> str:
        """Return the text of a message as it stands in a rendering."""
        return self.answer(message.text) if message.role == "assistant" else self.text(message.text)

    def _guarded(self, value: Any, spellings: Spellings) -> Any:
        if isinstance(value, str):
            return self._broken(value, spellings)
        if isinstance(value, Mapping):
            return {self._guarded(key, spellings): self._guarded(item, spellings) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(item, spellings) for item in value]
        return value

    def _broken(self, text: str, spellings: Spellings) -> str:
        text = encodable(text)
        if spellings.occur_in(text):
            return spellings.broken(text, self._breaking)
        if self._normalize is not None and spellings.occur_in(normal := self._normalize(text)):
            return spellings.broken(normal, self._breaking)
        return text

    @functools.cached_property
    def _breaking(self) -> str:
        """Return what breaks every token; found when the first one is spelled, for that takes a moment."""
        broken = (self._spellings.broken(token, BREAK) for token in self._tokens)
        return BREAK if all(map(self._is_text, broken)) else BLANK


def _joined(parts: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Join texts that follow one another: a token may be spelled in two of them."""
    for kind, group in itertools.groupby(parts, key=lambda part: part["type"]):
        if kind == "text":
            yield {"type": kind, "text": "".join(part["text"] for part in group)}
        else:
            yield from group
