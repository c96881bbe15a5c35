"""The contract of the gateway's dialects, and the requests and replies that they share.

A dialect is a vendor's HTTP API. It reads the JSON of a request into a `ChatRequest`, and writes a `Reply` in the
vendor's format, whole or as a stream of events. It refuses what it does not support with a `BadRequest` that names the
field; no such field is ignored.
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
"""A tool in the form of chat templates: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""
Finish: TypeAlias = Literal["stop", "length", "tool_calls", "stop_text"]
Part: TypeAlias = tuple[Literal["reasoning", "text"], str]
"""A piece of an answer while it is sampled."""
Event: TypeAlias = tuple[str | None, Json | str]
"""A server-sent event: its name or ``None``, and its data as JSON or as text (``[DONE]``)."""
TEXT_ARGUMENT = "input"
"""The only argument of a tool that takes a text."""
OPENAI_ERRORS: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class BadRequest(Exception):
    """A request that cannot be served; the client should not retry it.

    Args:
        message: What is wrong, what was received and what is expected.
        field: Path of the field, such as ``messages.2.content``.
        status: HTTP status.
        code: Machine-readable error code.
        is_offer: True if the client only probes for an optional feature and continues without it; such a refusal does
            not fail the episode.
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
    """A request for an answer, independent of the dialect."""

    model: str
    """Model name that the client sent; the policy answers under every name."""
    messages: Sequence[Message]
    """The whole history."""
    tools: Sequence[ToolSchema] = ()
    """Tools that the policy may call."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not sent to the client."""
    count: int = 1
    """Number of answers to the same history."""
    stream: bool = False
    settings: Mapping[str, float | str] = field(default_factory=dict)
    """The client's generation settings: temperature, top_p, seed, effort. The run's settings apply instead, except that
    live traffic follows the client's sampling."""
    form: AnswerForm | None = None
    """Form that the answer must have."""
    form_field: str = ""
    """Path of the field that requires `form`."""
    single_call: bool = False
    """True if an answer may contain at most one tool call."""
    logprobs: bool = False
    """True if the client wants the log-probabilities of the sampled tokens."""
    text_tools: Sequence[str] = ()
    """Names of tools whose only argument is the text `TEXT_ARGUMENT`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values that the dialect needs to write the reply. With ``store``, the session stores ``history`` and the answer
    under the reply's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyAnswer:
    """One answer as the client receives it."""

    text: str
    """Content without thinking and tool calls, and without the stop string."""
    finish: Finish
    calls: Sequence[ToolCall] = ()
    """Tool calls, each with the id that its result must carry."""
    reasoning: str | None = None
    stop_text: str | None = None
    """The stop string that ended the answer, if `finish` is ``stop_text``."""
    tokens: int = 0
    """Number of sampled tokens, including thinking and the stop token."""
    logprobs: Sequence[TokenLogprob] = ()
    """Log-probabilities of the text's tokens, if the client requested them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answers to one request."""

    id: str
    """Letters and digits; the dialect adds its prefix."""
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
        """Number of sampled tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)


class StreamingReply:
    """A reply while it is sampled. Several clients may read it, each from the beginning."""

    def __init__(self, head: Reply) -> None:
        self.head = head
        self._parts: list[Part] = []
        self._sent = {"reasoning": "", "text": ""}
        self._reply: Reply | None = None
        self._changed = asyncio.Event()

    @property
    def text(self) -> str:
        """Text already streamed; it cannot be changed."""
        return self._sent["text"]

    def is_beginning_of(self, answer: ReplyAnswer) -> bool:
        """Return True if the answer starts with the text and reasoning already streamed."""
        return answer.text.startswith(self._sent["text"]) and (answer.reasoning or "").startswith(
            self._sent["reasoning"]
        )

    def update(self, prompt_tokens: int, reasoning: str, text: str) -> None:
        """Stream the new part of the text and reasoning, which are the whole answer so far."""
        self.head = replace(self.head, prompt_tokens=prompt_tokens)
        self._add("reasoning", reasoning)
        self._add("text", text)

    def end(self, reply: Reply) -> None:
        """Stream the rest of the reply and end it."""
        self.head = replace(self.head, prompt_tokens=reply.prompt_tokens, cached_tokens=reply.cached_tokens)
        self._add("reasoning", reply.answer.reasoning or "")
        self._add("text", reply.answer.text)
        self._reply = reply
        self._wake()

    def _add(self, kind: Literal["reasoning", "text"], whole: str) -> None:
        sent = self._sent[kind]
        if len(whole) > len(sent) and whole.startswith(sent):
            self._parts.append((kind, whole[len(sent) :]))
            self._sent[kind] = whole
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_start(self) -> None:
        """Wait for the first piece or the end."""
        while not self._parts and self._reply is None:
            await self._changed.wait()

    async def parts(self) -> AsyncIterator[Part]:
        """Yield the pieces of the only answer as they arrive; then `reply` is set."""
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
        """The whole reply, available after the last part."""
        assert self._reply is not None
        return self._reply


class Dialect(ABC):
    """HTTP API of one vendor; stateless."""

    name: str
    """Name in messages and records."""
    path: str
    """Route of requests, relative to the session's base URL."""
    count_route: str | None = None
    """Path, without the vendor's version, of requests for the number of tokens of a prompt; ``None`` without one."""
    keep_alive: bytes = b": waiting\n\n"
    """Bytes that a stream sends while nothing is sampled: clients assume that a silent server is dead."""

    @property
    def route(self) -> str:
        """The path without the vendor's version."""
        return self.path.removeprefix("/v1")

    def read_count(self, body: Mapping[str, Any], stored: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """Read a request to count tokens, which may lack fields of other requests; arguments as for `read`."""
        return self.read(body, stored)

    def write_count(self, tokens: int) -> Json:
        """Write the number of tokens of a prompt."""
        return {"input_tokens": tokens}

    @abstractmethod
    def read(self, body: Mapping[str, Any], stored: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """Read a request.

        Args:
            body: JSON of the request.
            stored: Histories of earlier replies by `reply_id`, including their answers, for dialects whose requests may
                refer to a reply instead of sending the history.

        Raises:
            BadRequest: the request is malformed or not supported.
        """

    @abstractmethod
    def write(self, request: ChatRequest, reply: Reply) -> Json:
        """Write a reply that is not streamed."""

    @abstractmethod
    def events(self, request: ChatRequest, streaming: StreamingReply) -> AsyncIterator[Event]:
        """Write a reply as the events of a stream, while it is sampled."""

    @abstractmethod
    def error(self, status: int, message: str, *, field: str | None = None, code: str | None = None) -> Json:
        """Write an error in the vendor's format."""

    def reply_id(self, reply: Reply) -> str:
        """Return the id of a reply with the dialect's prefix."""
        return reply.id


class OpenAIDialect(Dialect):
    """Errors in the format that both of OpenAI's dialects share."""

    def error(self, status: int, message: str, *, field: str | None = None, code: str | None = None) -> Json:
        """Write an error."""
        kind = OPENAI_ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def logprob_rows(answer: ReplyAnswer) -> list[Json]:
    """Return the log-probabilities of an answer in OpenAI's format, without alternative tokens."""
    return [
        {"token": one.text, "logprob": one.logprob, "bytes": list(one.text.encode()), "top_logprobs": []}
        for one in answer.logprobs
    ]


def finish_of(stop_reason: StopReason, calls: Sequence[ToolCall], stop_text: str | None) -> Finish:
    """Return the finish reason for the client; a truncated answer reports ``length`` even after a complete call."""
    if stop_reason is StopReason.LENGTH:
        return "length"
    if calls:
        return "tool_calls"
    return "stop" if stop_text is None else "stop_text"
