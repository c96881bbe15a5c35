"""Parser of gpt-oss messages (harmony): channels for thinking, tool calls and the answer, between special tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from agentrl.message import ToolCall
from agentrl.render.tool_parsers import CollectedCalls, MalformedCall, ParsedCalls, ToolSchemas, make_call
from agentrl.render.tool_parsers.tolerant_tags import fitting_call
from agentrl.render.tool_parsers.untagged import NO_ARGUMENTS
from agentrl.render.tool_parsers.values import read_json

FORM = "Write <|channel|>commentary to=functions.tool <|constrain|>json<|message|>{...}<|call|>."
FINAL_FORM = "Write <|channel|>final<|message|> before an answer."
UNCLOSED = "no closing token"
_FUNCTIONS = "functions."
_MESSAGE = re.compile(
    r"(?P<header>(?:(?!<\|(?:end|call|return)\|>).)*?)<\|message\|>(?P<body>.*?)"
    r"(?P<end><\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|(?=<\|channel\|>)|\Z)",
    re.DOTALL,
)
_STRAY = re.compile(r"(?:(?!<\|message\|>).)*?(?P<end><\|(?:end|call|return)\|>)", re.DOTALL)
"""Pattern of a message that ends in its header."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_MARKS = re.compile(r"<\|(?:start|channel|constrain|message|end|call|return)\|>")


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """One message of an answer."""

    channel: str | None
    recipient: str | None
    body: str
    end: str
    """Token that ends the message; empty if the message was cut."""
    text: str
    """Whole text of the message."""

    @property
    def is_unfinished(self) -> bool:
        """True if the message ends in its header."""
        return self.body == self.text and self.text.startswith(("<|start|>", "<|channel|>"))


def split_messages(text: str) -> Iterator[ChannelMessage]:
    """Yield the messages of an answer; remaining text comes last, without a channel."""
    cursor = 0
    while match := _MESSAGE.match(text, cursor) or _STRAY.match(text, cursor):
        if match.re is _STRAY:
            cursor = match.end()
            yield ChannelMessage(None, None, match[0], match["end"], match[0])
            continue
        channel, recipient = _CHANNEL.search(match["header"]), _RECIPIENT.search(match["header"])
        yield ChannelMessage(
            channel[1] if channel else None, recipient[1] if recipient else None, match["body"], match["end"], match[0]
        )
        cursor = match.end()
    if rest := text[cursor:]:
        yield ChannelMessage(None, None, rest, "", rest)


def is_thinking(message: ChannelMessage) -> bool:
    """Return True for a message of thinking, on the analysis channel without a recipient."""
    return message.channel == "analysis" and message.recipient is None


def parse(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Parse messages to tools as calls, and those on other channels as content; thinking is already removed."""
    found = CollectedCalls()
    content: list[str] = []
    for message in split_messages(text):
        if message.recipient is not None:
            if found.take(partial(_call, message, tools, found.number)):
                empty = [NO_ARGUMENTS] if message.body.strip() in ("", "null") else []
                found.note([*empty, *([] if message.end else [UNCLOSED])])
        elif message.channel in ("final", "commentary"):
            content.append(message.body.strip())
        elif message.is_unfinished:
            found.problems.append(f"A message ends before its <|message|>. {FINAL_FORM}")
        elif bare := _MARKS.sub("", message.body).strip():
            content.append(bare)
            named = f"is on the channel {message.channel!r}" if message.channel else "has no channel"
            found.problems.append(f"A part of the answer {named}. {FINAL_FORM}")
    found.content.append("\n".join(part for part in content if part))
    return found.result()


def _call(message: ChannelMessage, tools: ToolSchemas, number: int) -> ToolCall:
    recipient = str(message.recipient)
    if not recipient.startswith(_FUNCTIONS):
        raise MalformedCall(f"Tool call {number} is to {recipient!r}, not to functions. {FORM}")
    name = recipient.removeprefix(_FUNCTIONS)
    if name in tools and message.end and message.body.strip() in ("", "null"):
        return fitting_call(name, {}, tools, number)
    what = f"The arguments of tool call {number}"
    arguments = read_json(message.body, 0, what, FORM)
    if arguments.end != len(message.body):
        raise MalformedCall(f"{what} continue after their JSON object. {FORM}")
    return make_call(name, arguments.value, tools, number)
