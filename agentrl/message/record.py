"""The messages of an episode as plain JSON types, as trajectory stores keep them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.message.message import Content, ImagePart, Message, TextPart, ToolCall

_OPTIONAL = ("tool_call_id", "name", "reasoning")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeMessages:
    """Messages of an episode; the fields are those of a `Trajectory` with the same names."""

    conversations: list[list[Message]]
    answers: list[Message]
    """Answers of the policy; the same objects are in the conversations."""
    completions: list[str]

    def to_record(self) -> dict[str, Any]:
        """Return the messages as JSON types. An answer is written once; images are named by their checksums."""
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
    """Return arguments as JSON text, as numbers may be larger than a store accepts; ``{}`` if JSON cannot hold them."""
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
