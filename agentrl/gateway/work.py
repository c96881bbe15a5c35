"""One request to a session: whether it is the agent's own work, and what is known of its reply so far."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl.agent_loop import Answer, AnswerSoFar
from agentrl.errors import AgentRLError
from agentrl.gateway.dialect import ChatRequest, Reply, ReplyAnswer, StreamingReply
from agentrl.gateway.history import Chain

Result = TypeVar("Result")
LARGE = 1 << 18
"""Bytes of a request from which on it is read in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UntrainedRequestRules:
    """Which requests are not the agent's own work (titles, summaries), and are left out of training.

    A request is one if any of these holds.
    """

    models: tuple[str, ...] = ()
    """Names of models that the client asks for."""
    markers: tuple[str, ...] = ()
    """Texts in a system message."""

    def has(self, asked: ChatRequest) -> bool:
        """Return True if a request is a side call."""
        if asked.model in self.models:
            return True
        systems = [message.text for message in asked.messages if message.role == "system"]
        return any(marker in text for marker in self.markers for text in systems)


NO_SIDE_CALLS = UntrainedRequestRules()


@dataclass(slots=True)
class PendingRequest:
    """One request, however often it is sent."""

    asked: ChatRequest
    chain: Chain
    growing: StreamingReply
    """What is known of the reply."""
    answers: list[tuple[Answer, ReplyAnswer]] = field(default_factory=list)
    """Those that were sampled; a retry samples only what is missing."""
    failure: AgentRLError | None = None
    """Why its last attempt failed, if that was an infrastructure failure."""
    task: asyncio.Task[Reply] | None = None

    def say(self, so_far: AnswerSoFar) -> None:
        """Tell those who wait what is certain of the answer, up to a stop text."""
        text, _ = cut_at(so_far.text, self.asked.stop)
        self.growing.say(so_far.prompt_tokens, so_far.reasoning, text)


async def off_loop(size: int, work: Callable[..., Result], *arguments: Any) -> Result:
    """Do work on `size` bytes: in a thread from `LARGE` on, so that it holds up no other request."""
    return await asyncio.to_thread(work, *arguments) if size >= LARGE else work(*arguments)


def digest_of(path: str, raw: bytes) -> bytes:
    """Return what a retry of a request has in common with it."""
    return hashlib.blake2b(path.encode() + b"\n" + raw, digest_size=16).digest()


def cut_at(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Return text up to the first stop text in it, and that.

    >>> cut_at("The answer is 4.</done> And", ("</done>", "."))
    ('The answer is 4', '.')
    """
    found = [(text.find(end), end) for end in stop if end in text]
    if not found:
        return text, None
    at, end = min(found)
    return text[:at], end
