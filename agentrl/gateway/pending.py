"""State of one request to a session: its rules for training, its answers, and its reply so far."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from agentrl.agent_loop import Answer, AnswerSoFar
from agentrl.errors import AgentRLError, UsageError
from agentrl.errors.foreign import run_in_own_thread
from agentrl.gateway.dialect import TEXT_ARGUMENT, ChatRequest, Reply, ReplyAnswer, StreamingReply
from agentrl.gateway.history import MAX_FLOAT, Chain
from agentrl.remote.listening import DEEPEST, is_deep

Result = TypeVar("Result")
LARGE = 1 << 18
"""Bytes above which a request is processed in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UntrainedRequestRules:
    """Rules that exclude side calls from training: requests for titles, summaries and the like.

    A request that matches any rule is excluded.
    """

    models: tuple[str, ...] = ()
    """Model names that clients use for side calls."""
    markers: tuple[str, ...] = ()
    """Texts that occur in the system message of side calls."""

    @classmethod
    def of(cls, side_models: Sequence[str], side_markers: Sequence[str]) -> UntrainedRequestRules:
        """Make the rules of the options `side_models` and `side_markers` of an agent loop.

        Raises:
            UsageError: an option is not a list of texts.
        """
        for name, value in (("side_models", side_models), ("side_markers", side_markers)):
            if isinstance(value, str) or not all(isinstance(one, str) and one for one in value):
                raise UsageError(f"agent.options.{name} is not a list of texts", got=value, expected='["text", …]')
        return cls(models=tuple(side_models), markers=tuple(side_markers))

    def matches(self, request: ChatRequest) -> bool:
        """Return True if the request is a side call."""
        if request.model in self.models:
            return True
        systems = [message.text for message in request.messages if message.role == "system"]
        return any(marker in text for marker in self.markers for text in systems)


NO_SIDE_CALLS = UntrainedRequestRules()


@dataclass(slots=True)
class PendingRequest:
    """One request and its retries."""

    request: ChatRequest
    chain: Chain
    streaming: StreamingReply
    """The reply so far."""
    answers: list[tuple[Answer, ReplyAnswer]] = field(default_factory=list)
    """Sampled answers; a retry samples only the missing ones."""
    failure: AgentRLError | None = None
    """The infrastructure failure that ended the latest attempt."""
    task: asyncio.Task[Reply] | None = None

    def update(self, so_far: AnswerSoFar) -> None:
        """Stream the stable text of a partial answer, up to the first stop string."""
        text, _ = cut_at(so_far.text, self.request.stop)
        self.streaming.update(so_far.prompt_tokens, so_far.reasoning, text)


async def off_loop(size: int, work: Callable[..., Result], *arguments: Any) -> Result:
    """Run `work` on `size` bytes; in a thread from `LARGE` bytes, so that it does not block other requests."""
    return await run_in_own_thread(work, *arguments) if size >= LARGE else work(*arguments)


def digest_of(path: str, raw: bytes) -> bytes:
    """Return a hash that a request and its retries share."""
    return hashlib.blake2b(path.encode() + b"\n" + raw, digest_size=16).digest()


def cut_at(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first stop string, and the stop string (``None`` if there is none).

    >>> cut_at("The answer is 4.</done> And", ("</done>", "."))
    ('The answer is 4', '.')
    """
    found = [(text.find(end), end) for end in stop if end in text]
    if not found:
        return text, None
    at, end = min(found)
    return text[:at], end


def without_unwritable_calls(answer: Answer, text_tools: Sequence[str] = ()) -> Answer:
    """Return an answer whose calls can be sent back as JSON or, of the tools `text_tools`, as text.

    Calls become text if their arguments are nested too deeply, contain numbers that JSON parsers take for infinity, or
    are not the one text of a tool in `text_tools`.
    """
    arguments = [dict(call.arguments) for call in answer.message.tool_calls]
    texts = [call for call in answer.message.tool_calls if call.name in text_tools]
    if any(map(is_deep, arguments)):
        problem = f"the arguments of a call have more than {DEEPEST} levels of lists and objects"
    elif any(map(_has_huge_number, arguments)):
        problem = "the arguments of a call contain a number that is too large"
    elif any(
        set(call.arguments) != {TEXT_ARGUMENT} or not isinstance(call.arguments[TEXT_ARGUMENT], str) for call in texts
    ):
        problem = f"the tool takes one text, {TEXT_ARGUMENT}"
    else:
        return answer
    message = replace(answer.message, content=text_with_calls(answer), tool_calls=())
    return replace(answer, message=message, problems=(*answer.problems, problem))


def _has_huge_number(value: object) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_huge_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) >= MAX_FLOAT


def text_with_calls(answer: Answer) -> str:
    """Return an answer without its thinking, but with its calls as written."""
    return answer.raw_text if answer.after_thinking is None else answer.after_thinking.lstrip()
