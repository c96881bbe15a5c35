"""Find the recorded conversation that a client's history continues.

Clients send the whole history with each request, and their libraries change earlier messages: null, empty or split
content, other spaces in arguments, other call ids, no thinking, text trimmed at its end. Messages are therefore
compared by their meaning (`key_of`), and the recorded messages replace the client's.

A history is stored as the chain of its messages' keys, with one hash per prefix. The longest recorded prefix of a new
history is found in time linear in the length of that history.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.agent_loop import Conversation
from agentrl.gateway.dialect import ToolSchema
from agentrl.message import Message, TextPart

LONG_TEXT = 1 << 14
"""Characters above which a text is compared by its hash."""
MAX_EXACT_FLOAT = 1 << 53
"""Whole number above which JavaScript rounds."""
MAX_FLOAT = 1 << 1023
Chain = list[bytes]
"""The hash of each prefix of a history: of one message, of two, and so on."""


def key_of(message: Message) -> bytes:
    """Return the meaning of a message as bytes: equal for all forms in which client libraries send it back.

    Answers are compared without surrounding spaces and without the client's name for the policy. Spaces and names count
    in messages that the client wrote.
    """
    calls = [[call.name, _plain(dict(call.arguments))] for call in message.tool_calls]
    speaker = message.name if message.role in ("system", "user") else None
    if isinstance(message.content, str):
        content: object = _brief(message.content.strip() if message.role == "assistant" else message.content)
    else:
        content = [_brief(part.text) if isinstance(part, TextPart) else part.checksum for part in message.content]
    meaning = [message.role, content, calls] if speaker is None else [message.role, content, calls, speaker]
    return json.dumps(meaning, sort_keys=True, ensure_ascii=False).encode(errors="surrogatepass")


def _brief(text: str) -> object:
    """Return a text, or its hash if it is so long that encoding it as JSON would block other requests."""
    if len(text) < LONG_TEXT:
        return text
    return [hashlib.blake2b(text.encode(errors="surrogatepass")).hexdigest()]


def _plain(value: object) -> object:
    """Return JSON with numbers as JavaScript has them: floats of integral value as ints, large ints rounded."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_EXACT_FLOAT:
        value = float(value) if abs(value) < MAX_FLOAT else str(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def tools_key(tools: Sequence[ToolSchema]) -> bytes:
    """Return the initial hash of conversations with these tools."""
    return hashlib.blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=16).digest()


def chain_of(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Chain:
    """Return the hashes of a history's prefixes."""
    chain, last = [], tools_key(tools)
    for message in messages:
        last = hashlib.blake2b(last + key_of(message), digest_size=16).digest()
        chain.append(last)
    return chain


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedHistory:
    """A recorded conversation that ends with an answer, or a prefix of one."""

    conversation: Conversation
    messages: Sequence[Message]
    """Messages as recorded."""
    sent: Message | None = None
    """The last answer as the client received it; ``None`` for a prefix."""
    tools: Sequence[ToolSchema] = ()

    def is_echoed_by(self, message: Message) -> bool:
        """Return True if `message` has the call ids of the last answer or, without calls, its reasoning."""
        if self.sent is None:
            return False
        ids = {call.id for call in self.sent.tool_calls}
        if ids:
            return ids == {call.id for call in message.tool_calls}
        return message.reasoning is not None and message.reasoning == self.sent.reasoning


class Histories:
    """The conversations of one session."""

    def __init__(self) -> None:
        self._by_beginning: dict[bytes, list[RecordedHistory]] = {}
        self._continued: set[bytes] = set()

    def remember(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        chain: Chain,
        *,
        sent: Message,
        tools: Sequence[ToolSchema],
    ) -> None:
        """Record a conversation under its whole history and under every prefix that is not recorded yet.

        `messages` are as recorded; the client received the last answer as `sent`, and the history with the hashes
        `chain`.
        """
        messages = tuple(messages)
        for beginning in chain[:-1]:
            self._by_beginning.setdefault(beginning, [RecordedHistory(conversation=conversation, messages=messages)])
        ended = self._by_beginning.setdefault(chain[-1], [])
        ended.append(RecordedHistory(conversation=conversation, messages=messages, sent=sent, tools=tools))
        self._continued.update(chain[:-1])

    def has_answer_of(self, chain: Chain, messages: Sequence[Message]) -> bool:
        """Return True if the latest answer in a history was recorded here, after the same messages."""
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        return bool(answers) and chain[answers[-1]] in self._by_beginning

    def ends(self) -> list[RecordedHistory]:
        """Return the conversations that no later one continues, in the order of their last answers."""
        ended = (found for chain, found in self._by_beginning.items() if chain not in self._continued)
        return [one for found in ended for one in found if one.sent is not None]

    def find_longest(self, chain: Chain, messages: Sequence[Message]) -> tuple[RecordedHistory | None, int]:
        """Return the conversation that shares the longest prefix with a history, and the prefix's number of messages.

        If several answers have the same meaning, the one with the client's call ids or reasoning is taken, even if a
        conversation with another one shares a longer prefix; else the latest.
        """
        for count in range(len(chain), 0, -1):
            if found := self._by_beginning.get(chain[count - 1]):
                echoed = self._find_echoed(chain, messages, count)
                return self._with_own_answer((echoed or found)[-1], chain, messages, count)
        return None, 0

    def _find_echoed(self, chain: Chain, messages: Sequence[Message], count: int) -> list[RecordedHistory]:
        found = self._by_beginning.get(chain[count - 1], [])
        return [one for one in found if one.is_echoed_by(messages[count - 1])]

    def _with_own_answer(
        self, longest: RecordedHistory, chain: Chain, messages: Sequence[Message], count: int
    ) -> tuple[RecordedHistory, int]:
        """Return the conversation whose answer the client has; `longest` if that contains it."""
        for end in range(count, 0, -1):
            if messages[end - 1].role == "assistant" and (echoed := self._find_echoed(chain, messages, end)):
                is_own = any(one.messages[end - 1] is longest.messages[end - 1] for one in echoed)
                return (longest, count) if is_own else (echoed[-1], end)
        return longest, count
