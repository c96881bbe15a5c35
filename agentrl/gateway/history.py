"""Which recorded conversation a client's history continues.

Clients send the whole history each time, and their libraries change what they send back: null, empty or split content,
arguments written with other spaces, other call ids, thinking left out, text trimmed at its end. Messages are therefore
compared by what they mean (`key_of`), and what was recorded is used in their place.

A history is the chain of its messages' keys; every beginning of a recorded one is known by a hash, so that the longest
known beginning of a new history is found in time that grows with that history only.
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
"""Characters from which on the hash of a text stands for it."""
Chain = list[bytes]
"""The hash of each beginning of a history: of one message, of two, and so on."""


def key_of(message: Message) -> bytes:
    """Return what a message means, as bytes: equal for messages that client libraries take for one another.

    Only answers come back trimmed, and under the client's own name for the policy; what others say is the client's own,
    with its spaces and the speaker's name.
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
    """Return what stands for a text: its hash, where writing it as JSON would hold up others."""
    if len(text) < LONG_TEXT:
        return text
    return [hashlib.blake2b(text.encode(errors="surrogatepass")).hexdigest()]


def _plain(value: object) -> object:
    """Return JSON with whole numbers as such: JavaScript knows no other."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def tools_key(tools: Sequence[ToolSchema]) -> bytes:
    """Return the hash with which the chains of conversations with these tools begin."""
    return hashlib.blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=16).digest()


def chain_of(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Chain:
    """Return the hashes of a history's beginnings."""
    chain, last = [], tools_key(tools)
    for message in messages:
        last = hashlib.blake2b(last + key_of(message), digest_size=16).digest()
        chain.append(last)
    return chain


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedHistory:
    """A recorded conversation, up to an answer or to the end of what it was asked."""

    conversation: Conversation
    messages: Sequence[Message]
    """As they were recorded."""
    given: Message | None = None
    """The answer that ends it, as the client got it; ``None`` for a beginning of a history."""
    tools: Sequence[ToolSchema] = ()

    def is_meant_by(self, message: Message) -> bool:
        """Return True if an answer comes back with this one's call ids, or with its thinking."""
        if self.given is None:
            return False
        ids = {call.id for call in self.given.tool_calls}
        if ids:
            return ids == {call.id for call in message.tool_calls}
        return message.reasoning is not None and message.reasoning == self.given.reasoning


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
        given: Message,
        tools: Sequence[ToolSchema],
    ) -> None:
        """Keep a conversation under every beginning that is not known yet, and under its whole history.

        Args:
            conversation: As it is after the last message.
            messages: As they were recorded.
            chain: Of what the client was given.
            given: The answer that it ends with, as the client was given it.
            tools: Those that were offered.
        """
        messages = tuple(messages)
        for beginning in chain[:-1]:
            self._by_beginning.setdefault(beginning, [RecordedHistory(conversation=conversation, messages=messages)])
        ended = self._by_beginning.setdefault(chain[-1], [])
        ended.append(RecordedHistory(conversation=conversation, messages=messages, given=given, tools=tools))
        self._continued.update(chain[:-1])

    def has_answer_of(self, chain: Chain, messages: Sequence[Message]) -> bool:
        """Return True if the latest answer in a history was given here, after the same messages."""
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        return bool(answers) and chain[answers[-1]] in self._by_beginning

    def ends(self) -> list[RecordedHistory]:
        """Return the conversations that were not continued, in the order of their last answers."""
        ended = (known for chain, known in self._by_beginning.items() if chain not in self._continued)
        return [one for known in ended for one in known if one.given is not None]

    def longest(self, chain: Chain, messages: Sequence[Message]) -> tuple[RecordedHistory | None, int]:
        """Return the conversation that shares the longest beginning with a history, and how many messages that are.

        Of answers that say the same, it is the one whose call ids or thinking come back, else the latest.
        """
        for count in range(len(chain), 0, -1):
            if found := self._by_beginning.get(chain[count - 1]):
                meant = [known for known in found if known.is_meant_by(messages[count - 1])]
                return (meant or found)[-1], count
        return None, 0
