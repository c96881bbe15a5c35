"""Insertion of few-shot examples into the messages of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.message import Content, ContentPart, Message, TextPart, system, user

NEXT = "Here is the next task."
"""Text between the end of an example and the following task."""
ANNOUNCED = "Here are some examples from other tasks. Your own task comes after them."


def with_shots(messages: Sequence[Message], shots: Sequence[Message]) -> Sequence[Message]:
    """Insert examples after a conversation's system message, which then announces them."""
    if not shots:
        return messages
    opening = [message for message in messages[:1] if message.role == "system"]
    announced = [system(f"{message.text}\n\n{ANNOUNCED}") for message in opening]
    return [*announced, *join_messages(shots, messages[len(opening) :])]


def join_messages(first: Sequence[Message], then: Sequence[Message]) -> list[Message]:
    """Concatenate messages; two adjacent user messages become one, because chat templates expect alternating roles."""
    if not (first and then and first[-1].role == then[0].role == "user"):
        return [*first, *then]
    last, following = first[-1].content, then[0].content
    parts = [*_parts(last), TextPart(text=f"\n\n{NEXT}\n"), *_parts(following)]
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    return [*first[:-1], user("".join(texts) if len(texts) == len(parts) else tuple(parts)), *then[1:]]


def _parts(content: Content) -> tuple[ContentPart, ...]:
    return (TextPart(text=content),) if isinstance(content, str) else content
