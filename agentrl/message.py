"""Messages: what agent loops, tools and environments say to each other, before any token exists."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from agentrl.control_tokens import TokenBreaker

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A piece of text content."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """An image, encoded (PNG or JPEG bytes)."""

    data: bytes = field(repr=False)
    media_type: str = "image/png"
    alternative: str = field(default="", compare=False)
    """What it shows, in words: for experts, logs and people. The policy does not read it."""

    @property
    def checksum(self) -> str:
        """SHA-256 of the encoded image, in hexadecimal digits."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def data_url(self) -> str:
        """The image as a ``data:`` URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"


ContentPart: TypeAlias = TextPart | ImagePart
Content: TypeAlias = str | tuple[ContentPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool, as the policy wrote it and the parser understood it."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation.

    An assistant message that the policy sampled is stored in the ledger as tokens; its `content` here is only what
    was parsed from it, for agent loops and viewers.
    """

    role: Role
    content: Content = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """For role ``tool``: which call this answers."""
    name: str | None = None
    reasoning: str | None = None
    """Thinking that the family's parser separated from the content."""

    @property
    def text(self) -> str:
        """The text of the content, images left out."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    def to_template(self) -> dict[str, Any]:
        """Return this message as the dictionary that Hugging Face chat templates read."""
        message: dict[str, Any] = {"role": self.role, "content": _template_content(self.content)}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


def _template_content(content: Content) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image", "image": part.data_url}
        for part in content
    ]


def described(content: Content) -> str:
    """Return content in words: images by their alternative texts."""
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.alternative for part in content)


def plainly_written(message: Message) -> str:
    """Return a message as text: images by their alternative texts, tool calls as JSON."""
    calls = [json.dumps({"name": call.name, "arguments": dict(call.arguments)}) for call in message.tool_calls]
    text = described(message.content)
    return "\n".join([*([text] if text else []), *calls])


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptMessage:
    """A message as text."""

    role: str
    text: str
    turn: int | None = None
    """Place of the turn that it is the answer of, among the episode's turns; ``None`` for what others said."""


Transcript: TypeAlias = list[list[TranscriptMessage]]
"""The messages of each conversation."""


def transcript(conversations: Sequence[Sequence[Message]], answers: Sequence[Message], n_turns: int) -> Transcript:
    """Return conversations as text.

    Args:
        conversations: Their messages.
        answers: Those of them with which the policy took its turns, in order.
        n_turns: Turns of the episode. Where there are others than those of `answers`, no answer names its turn.
    """
    turns = {id(answer): turn for turn, answer in enumerate(answers)} if len(answers) == n_turns else {}
    return [[_said(message, turns.get(id(message))) for message in messages] for messages in conversations]


def _said(message: Message, turn: int | None) -> TranscriptMessage:
    thought = "" if message.reasoning is None else f"<think>{message.reasoning}</think>\n"
    return TranscriptMessage(role=message.role, text=f"{thought}{plainly_written(message)}", turn=turn)


def transcript_record(said: Transcript) -> list[list[dict[str, Any]]]:
    """Return a transcript as plain JSON types."""
    return [[asdict(one) for one in messages] for messages in said]


def transcript_from_record(rows: Iterable[Iterable[Mapping[str, Any]]]) -> Transcript:
    """Restore what `transcript_record` was given."""
    return [[TranscriptMessage(**row) for row in messages] for messages in rows]


def system(text: str) -> Message:
    """Make a system message."""
    return Message(role="system", content=text)


def user(content: Content) -> Message:
    """Make a user message: text, or parts with images."""
    return Message(role="user", content=content)


def tool_result(call: ToolCall, text: str) -> Message:
    """Make the answer to a tool call."""
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.name)


broken_up = TokenBreaker()
"""Puts a blank into spelled control tokens, for a service that renders what it is sent in its own way.

What a model of agentrl's own reads needs none of this: see `agentrl.render.content_guard`.
"""


def broken_up_message(message: Message, break_up: Callable[[str], str] = broken_up) -> Message:
    """Do the same to a message of others than the assistant."""
    if message.role == "assistant":
        return message
    if isinstance(message.content, str):
        return replace(message, content=break_up(message.content))
    parts = (TextPart(text=break_up(p.text)) if isinstance(p, TextPart) else p for p in message.content)
    return replace(message, content=tuple(parts))


def encodable(text: str) -> str:
    r"""Return a text without lone surrogates, which JSON may spell and nothing can encode.

    >>> encodable("5\ud83d")
    '5?'
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


MOST_DIGITS = 1000
"""Maximum length of a number that `parse_int` reads; Python refuses to convert more than 4300 digits."""
_INTEGER = re.compile(r"(?<![\w.])[-+]?\d+(?![\w]|\.\d)")


def parse_int(text: str) -> int | None:
    """Find the last whole number in `text`; ``None`` when there is none, or it has more than `MOST_DIGITS` digits.

    >>> parse_int("I try 50, no: 42."), parse_int("no idea"), parse_int("9" * 5000)
    (42, None, None)
    """
    numbers = _INTEGER.findall(text)
    return int(numbers[-1]) if numbers and len(numbers[-1]) <= MOST_DIGITS else None
