"""What the gateway's dialects have in common: a request for an answer, the answer, and the contract of a dialect.

A dialect is the HTTP form in which a vendor's clients ask for answers. It reads a request's JSON into an `Asked`, and
writes a `Reply` as that vendor would, whole or as a stream of events. What it cannot do it refuses with a `BadRequest`
that names the field; nothing is ignored.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from agentrl.agent_loop import AnswerForm, TokenLogprob
from agentrl.engine import StopReason
from agentrl.message import Message, ToolCall

Json: TypeAlias = dict[str, Any]
ToolSchema: TypeAlias = Mapping[str, Any]
"""As chat templates read it: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""
Finish: TypeAlias = Literal["stop", "length", "tool_calls", "stop_text"]


class BadRequest(Exception):
    """A request that cannot be served as it is asked; the client should not send it again.

    Args:
        message: What is wrong, got and expected.
        field: Path of the field, like ``messages.2.content``.
        status: The HTTP status.
        code: A word for programs.
        is_offer: The client only tries whether this can be done, and goes on without it: it is no reason to fail.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        status: int = 400,
        code: str = "invalid",
        is_offer: bool = False,
    ) -> None:
        super().__init__(message)
        self.is_offer = is_offer
        self.message, self.field, self.status, self.code = message, field, status, code


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for an answer, in words that all dialects share."""

    model: str
    """The name that the client gave; the policy answers whatever it is."""
    messages: Sequence[Message]
    """The whole history."""
    tools: Sequence[ToolSchema] = ()
    """What the policy may call."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the answer; the client does not get them."""
    count: int = 1
    """Number of answers to the same history."""
    stream: bool = False
    settings: Mapping[str, float | str] = field(default_factory=dict)
    """How the client wants the model to answer: temperature, top_p, seed, effort. The run decides; in live traffic the
    client's sampling is followed."""
    form: AnswerForm | None = None
    """What the answer has to be."""
    form_field: str = ""
    """Path of the field that says so."""
    single_call: bool = False
    """An answer may have one call of a tool at most."""
    logprobs: bool = False
    """The client wants the log-probabilities of what was sampled."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the dialect needs again to write the reply. With ``store``, the session keeps ``history`` and the answer
    under the reply's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyAnswer:
    """One answer, as the client gets it."""

    text: str
    """Content without thinking and tool calls, and without the stop text."""
    finish: Finish
    calls: Sequence[ToolCall] = ()
    """Each with the id under which its result is expected."""
    reasoning: str | None = None
    stop_text: str | None = None
    """The stop text that ended it, where `finish` says so."""
    tokens: int = 0
    """Sampled tokens, thinking and the stop token included."""
    logprobs: Sequence[TokenLogprob] = ()
    """Of the text's tokens, where they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answers to one request."""

    id: str
    """Letters and digits, without the dialect's prefix."""
    created: int
    """Seconds since 1970."""
    model: str
    answers: Sequence[ReplyAnswer]
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def answer(self) -> ReplyAnswer:
        """The only answer, or the first."""
        return self.answers[0]

    @property
    def answer_tokens(self) -> int:
        """Sampled tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)


Part: TypeAlias = tuple[Literal["reasoning", "text"], str]
"""A piece of an answer while it is sampled."""


class StreamingReply:
    """A reply while it is sampled, for those who wait for it; several may, each from the beginning.

    Args:
        head: The reply without its answers.
    """

    def __init__(self, head: Reply) -> None:
        self.head = head
        self._parts: list[Part] = []
        self._said = {"reasoning": "", "text": ""}
        self._reply: Reply | None = None
        self._changed = asyncio.Event()

    @property
    def text(self) -> str:
        """What has been said of the answer's text, which nothing can take back."""
        return self._said["text"]

    def is_beginning_of(self, answer: ReplyAnswer) -> bool:
        """Return True if an answer goes on with what has been said."""
        return answer.text.startswith(self._said["text"]) and (answer.reasoning or "").startswith(
            self._said["reasoning"]
        )

    def say(self, prompt_tokens: int, reasoning: str, text: str) -> None:
        """Tell what is certain of the answer by now."""
        self.head = replace(self.head, prompt_tokens=prompt_tokens)
        self._add("reasoning", reasoning)
        self._add("text", text)

    def end(self, reply: Reply) -> None:
        """Tell the rest."""
        self._add("reasoning", reply.answer.reasoning or "")
        self._add("text", reply.answer.text)
        self._reply = reply
        self._wake()

    def _add(self, kind: Literal["reasoning", "text"], whole: str) -> None:
        said = self._said[kind]
        if len(whole) > len(said) and whole.startswith(said):
            self._parts.append((kind, whole[len(said) :]))
            self._said[kind] = whole
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def begun(self) -> None:
        """Wait for the first piece, or for the end."""
        while not self._parts and self._reply is None:
            await self._changed.wait()

    async def parts(self) -> AsyncIterator[Part]:
        """Yield the pieces of the only answer, as they come; then `reply` is there."""
        count = 0
        while True:
            while count < len(self._parts):
                count += 1
                yield self._parts[count - 1]
            if self._reply is not None:
                return
            await self._changed.wait()

    @property
    def reply(self) -> Reply:
        """The whole reply, once the parts have ended."""
        assert self._reply is not None
        return self._reply


Event: TypeAlias = tuple[str | None, Json | str]
"""A server-sent event: its name, if it has one, and its data, as JSON or as text (``[DONE]``)."""


class Dialect(ABC):
    """How one vendor's clients and servers speak. Holds no state."""

    name: str
    """For messages and records."""
    path: str
    """Route of requests, after the session's base URL."""
    keep_alive: bytes = b": waiting\n\n"
    """What a stream says while nothing is sampled yet: clients take silence for a dead server."""

    @abstractmethod
    def read(self, body: Mapping[str, Any], stored: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """Read a request.

        Args:
            body: Its JSON.
            stored: Histories of earlier replies by `reply_id`, each with its answer, for dialects that name one
                instead of sending it again.

        Raises:
            BadRequest: it is malformed, or asks for what cannot be done.
        """

    @abstractmethod
    def write(self, asked: ChatRequest, reply: Reply) -> Json:
        """Write a reply that is sent whole."""

    @abstractmethod
    def events(self, asked: ChatRequest, growing: StreamingReply) -> AsyncIterator[Event]:
        """Write a reply as the events of a stream, while it is sampled."""

    @abstractmethod
    def error(self, status: int, message: str, *, field: str | None = None, code: str | None = None) -> Json:
        """Write an error as the vendor does."""

    def reply_id(self, reply: Reply) -> str:
        """Return the id of a reply as the client reads it."""
        return reply.id


OPENAI_ERRORS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class OpenAIDialect(Dialect):
    """Errors and fields that both dialects of OpenAI share."""

    def error(self, status: int, message: str, *, field: str | None = None, code: str | None = None) -> Json:
        """Write an error."""
        kind = OPENAI_ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def logprob_rows(answer: ReplyAnswer) -> list[Json]:
    """Return the log-probabilities of an answer as OpenAI writes them; alternatives are not known."""
    return [
        {"token": one.text, "logprob": one.logprob, "bytes": list(one.text.encode()), "top_logprobs": []}
        for one in answer.logprobs
    ]


def finish_of(stop_reason: StopReason, calls: Sequence[ToolCall], stop_text: str | None) -> Finish:
    """Return why an answer ended, for the client; one that was cut off says so, even after a whole call."""
    if stop_reason is StopReason.LENGTH:
        return "length"
    if calls:
        return "tool_calls"
    return "stop" if stop_text is None else "stop_text"
