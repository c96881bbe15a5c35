"""Which part of a rendered suffix is the template's, and which is what the messages say."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agentrl.message import Message
from agentrl.trajectory import Source

_MARK = "@@CONTENT-{}@@"
_MARKS = re.compile(r"@@CONTENT-\d+@@")
_SHAPES = 512


@dataclass(frozen=True, slots=True)
class Span:
    """A range of characters that does not come from the template."""

    start: int
    end: int
    source: Source


class ContentSpans:
    """Finds the contents of messages in their rendering.

    The same messages are rendered once per shape with marks as contents; what is left between the marks is the
    template's.

    Args:
        render: Gives the text of messages that follow an answer.
    """

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        self._render = render
        self._pieces = functools.lru_cache(_SHAPES)(self._split_by_marks)

    def find(self, text: str, messages: Sequence[Message]) -> list[Span]:
        """The spans of the messages' contents in `text`, in order."""
        shape = tuple(_shape(message) for message in messages)
        pieces = self._pieces(shape)
        if len(pieces) != len(messages) + 1 or not text.startswith(pieces[0]):
            return [Span(0, len(text), Source.OBSERVATION)]
        spans: list[Span] = []
        cursor = len(pieces[0])
        for message, after in zip(messages, pieces[1:], strict=True):
            end = _content_end(text, cursor, message.text, after)
            spans.append(Span(cursor, end, _source(message)))
            cursor = end + len(after)
        return spans

    def _split_by_marks(self, shape: tuple[Message, ...]) -> list[str]:
        marked = [replace(message, content=_MARK.format(i)) for i, message in enumerate(shape)]
        return _MARKS.split(self._render(marked))


def _shape(message: Message) -> Message:
    return replace(message, content="", tool_calls=(), reasoning=None)


def _source(message: Message) -> Source:
    return Source.FORCED if message.role == "assistant" else Source.OBSERVATION


def _content_end(text: str, start: int, content: str, after: str) -> int:
    for candidate in (content, content.strip()):
        if text.startswith(candidate + after, start):
            return start + len(candidate)
    found = text.find(after, start) if after else -1
    return found if found >= 0 else len(text)
