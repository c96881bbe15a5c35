"""Messages of agent loops, tools and environments, before they are tokenized."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from agentrl.message.control_tokens import TokenBreaker

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
"""Role of a message."""
broken_up = TokenBreaker()
"""Function that inserts a space into spelled-out control tokens, for services that render messages themselves.

Messages that agentrl renders do not need it: see `agentrl.render.content_guard`.
"""
MAX_DIGITS = 1000
"""Maximum number of digits that `parse_int` accepts; Python does not convert more than 4300 digits."""
_INTEGER = re.compile(r"(?<![\w.])[-+]?\d+(?![\w]|\.\d)")
_SURROGATES = re.compile(
    rb"(?:\\\\)+|\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(?P<lone>\\u[dD][89a-fA-F][\da-fA-F]{2})"
)
"""Pattern of escaped backslashes, pairs of surrogates, and lone surrogates in JSON."""


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
    """Description in words, for experts, logs and viewers; not shown to the policy."""

    @property
    def checksum(self) -> str:
        """SHA-256 of the encoded image, in hexadecimal digits."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def data_url(self) -> str:
        """The image as a ``data:`` URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"

    @classmethod
    def from_data_url(cls, url: str) -> ImagePart:
        """Decode a ``data:`` URL, whose base64 text may be broken into lines.

        Raises:
            ValueError: it is not such a URL of an image, or its text is not valid base64.
        """
        head, comma, data = url.partition(",")
        if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
            raise ValueError(f"it must be a data: URL of an image in base64, and is {url[:60]!r}")
        media_type = head.removeprefix("data:").removesuffix(";base64")
        return cls(data=base64.b64decode("".join(data.split()), validate=True), media_type=media_type)


ContentPart: TypeAlias = TextPart | ImagePart
"""Part of a message with images."""
Content: TypeAlias = str | tuple[ContentPart, ...]
"""Content of a message: text, or parts with text and images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A parsed tool call of the policy."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation.

    A sampled assistant message is stored in the ledger as tokens; its `content` is parsed from them and only serves
    agent loops and viewers.
    """

    role: Role
    content: Content = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Id of the call that a message with role ``tool`` answers."""
    name: str | None = None
    reasoning: str | None = None
    """Reasoning, which the model family's parser separated from the content."""

    @property
    def text(self) -> str:
        """Text of the content, without images."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    def to_template(self) -> dict[str, Any]:
        """Return this message as a dictionary for Hugging Face chat templates."""
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


def text_of(content: Content) -> str:
    """Return content as text, with alternative texts for images."""
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.alternative for part in content)


def plainly_written(message: Message) -> str:
    """Return a message as text, with alternative texts for images and tool calls as JSON."""
    calls = [json.dumps({"name": call.name, "arguments": dict(call.arguments)}) for call in message.tool_calls]
    text = text_of(message.content)
    return "\n".join([*([text] if text else []), *calls])


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptMessage:
    """A message as text."""

    role: str
    text: str
    turn: int | None = None
    """Index of the turn in the episode, for an answer of the policy; ``None`` for other messages."""


Transcript: TypeAlias = list[list[TranscriptMessage]]
"""Messages of each conversation."""


def transcript(conversations: Sequence[Sequence[Message]], answers: Sequence[Message], n_turns: int) -> Transcript:
    """Return conversations as text; `answers` are the messages that are the policy's turns, in order.

    Turns are not identified if `n_turns`, the number of turns in the episode, differs from the number of answers.
    """
    turns = {id(answer): turn for turn, answer in enumerate(answers)} if len(answers) == n_turns else {}
    return [
        [_transcript_message(message, turns.get(id(message))) for message in messages] for messages in conversations
    ]


def _transcript_message(message: Message, turn: int | None) -> TranscriptMessage:
    thought = "" if message.reasoning is None else f"<think>{message.reasoning}</think>\n"
    return TranscriptMessage(role=message.role, text=f"{thought}{plainly_written(message)}", turn=turn)


def transcript_record(conversations: Transcript) -> list[list[dict[str, Any]]]:
    """Return a transcript as plain JSON types."""
    return [[asdict(message) for message in messages] for messages in conversations]


def transcript_from_record(rows: Iterable[Iterable[Mapping[str, Any]]]) -> Transcript:
    """Restore a transcript from `transcript_record`."""
    return [[TranscriptMessage(**row) for row in messages] for messages in rows]


def system(text: str) -> Message:
    """Return a system message."""
    return Message(role="system", content=text)


def user(content: Content) -> Message:
    """Return a user message with text, or with parts that may be images."""
    return Message(role="user", content=content)


def tool_result(call: ToolCall, content: Content) -> Message:
    """Return the message with the result of a tool call."""
    return Message(role="tool", content=content, tool_call_id=call.id, name=call.name)


def broken_up_message(message: Message, break_up: Callable[[str], str] = broken_up) -> Message:
    """Insert spaces into the spelled-out control tokens of a message, unless it is the assistant's."""
    if message.role == "assistant":
        return message
    if isinstance(message.content, str):
        return replace(message, content=break_up(message.content))
    parts = (TextPart(text=break_up(p.text)) if isinstance(p, TextPart) else p for p in message.content)
    return replace(message, content=tuple(parts))


def encodable(text: str) -> str:
    r"""Return a text without lone surrogates, which JSON may contain but UTF-8 cannot encode.

    >>> encodable("5\ud83d")
    '5?'
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def encodable_json(raw: bytes) -> bytes:
    r"""Replace escapes of lone surrogates in JSON, as JavaScript does when it encodes a text.

    JavaScript writes such escapes for a text that was truncated within a pair; strict parsers reject them.

    >>> print(encodable_json(rb'["\ud83d\ude00", "\ud83d", "\\ud83d"]').decode())
    ["\ud83d\ude00", "\ufffd", "\\ud83d"]
    """
    return _SURROGATES.sub(lambda found: rb"\ufffd" if found["lone"] else found[0], raw)


def parse_int(text: str) -> int | None:
    """Return the last whole number in `text`; ``None`` if there is none, or it has more than `MAX_DIGITS` digits.

    >>> parse_int("I try 50, no: 42."), parse_int("no idea"), parse_int("9" * 5000)
    (42, None, None)
    """
    numbers = _INTEGER.findall(text)
    return int(numbers[-1]) if numbers and len(numbers[-1]) <= MAX_DIGITS else None


_OPTIONAL = ("tool_call_id", "name", "reasoning")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeMessages:
    """Messages of an episode; the fields are those of a `Trajectory` with the same names."""

    conversations: list[list[Message]]
    answers: list[Message]
    """Answers of the policy; the conversations contain the same objects."""
    completions: list[str]

    def to_record(self) -> dict[str, Any]:
        """Return the messages as JSON types. Each answer is written once; images are referenced by checksum."""
        numbers = {id(answer): number for number, answer in enumerate(self.answers)}
        return {
            "answers": [_message_record(answer) for answer in self.answers],
            "completions": [
                None if text == answer.content else text
                for answer, text in zip(self.answers, self.completions, strict=True)
            ],
            "conversations": [
                [numbers[id(message)] if id(message) in numbers else _message_record(message) for message in messages]
                for messages in self.conversations
            ],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], images: Mapping[str, ImagePart]) -> EpisodeMessages:
        """Restore the messages from `to_record`; `images` are given by checksum."""
        answers = [_message(row, images) for row in record["answers"]]
        return cls(
            conversations=[
                [answers[row] if isinstance(row, int) else _message(row, images) for row in rows]
                for rows in record["conversations"]
            ],
            answers=answers,
            completions=[
                answer.text if text is None else text
                for answer, text in zip(answers, record["completions"], strict=True)
            ],
        )

    def images(self) -> list[ImagePart]:
        """Return all images in the messages."""
        messages = [message for conversation in self.conversations for message in conversation]
        contents = [message.content for message in messages if not isinstance(message.content, str)]
        return [part for content in contents for part in content if isinstance(part, ImagePart)]


def _message_record(message: Message) -> dict[str, Any]:
    given = {name: value for name in _OPTIONAL if (value := getattr(message, name)) is not None}
    calls = [
        {"name": call.name, "arguments": _arguments_text(call.arguments), "id": call.id} for call in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": _content_record(message.content),
        **({"tool_calls": calls} if calls else {}),
        **given,
    }


def _arguments_text(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON text, because stores limit the size of numbers; ``{}`` if JSON cannot represent them."""
    try:
        return json.dumps(dict(arguments))
    except (TypeError, ValueError, RecursionError):
        return "{}"


def _content_record(content: Content) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"text": part.text} if isinstance(part, TextPart) else {"image": part.checksum} for part in content]


def _message(row: Mapping[str, Any], images: Mapping[str, ImagePart]) -> Message:
    content: Content = row["content"]
    if not isinstance(content, str):
        content = _parts(row["content"], images)
    calls = tuple(
        ToolCall(name=call["name"], arguments=json.loads(call["arguments"]), id=call["id"])
        for call in row.get("tool_calls", ())
    )
    optional = {name: row[name] for name in _OPTIONAL if name in row}
    return Message(role=row["role"], content=content, tool_calls=calls, **optional)


def _parts(rows: Sequence[Mapping[str, str]], images: Mapping[str, ImagePart]) -> Content:
    return tuple(TextPart(text=row["text"]) if "text" in row else images[row["image"]] for row in rows)
