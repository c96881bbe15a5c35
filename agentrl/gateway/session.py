"""One episode behind the gateway: its key, conversations, retries and end.

request ──► side call? ──► longest recorded history ──► fork, or a new conversation ──► generate ──► reply
                                                                                        └► recorded for the next request

A request runs as a task of the session, not of the connection: a client that disconnects and retries joins the task,
and the end of the episode cancels it.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import secrets
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from agentrl.agent_loop import (
    Answer,
    AnswerForm,
    Conversation,
    Episode,
    EpisodeEnd,
    FormMissed,
    TokenLogprob,
    TurnOptions,
    UnsupportedOption,
)
from agentrl.engine import StopReason
from agentrl.env import StepResult
from agentrl.errors import (
    MAX_REWARD,
    AgentRLError,
    EngineError,
    EnvironmentFailure,
    Outcome,
    TemplateError,
    UsageError,
    described_error,
)
from agentrl.gateway.dialect import (
    BadRequest,
    ChatRequest,
    Dialect,
    Reply,
    ReplyAnswer,
    StreamingReply,
    ToolSchema,
    finish_of,
)
from agentrl.gateway.fields import is_given, number, refuse_unknown, take, take_optional
from agentrl.gateway.history import Chain, Histories, chain_of, key_of
from agentrl.gateway.pending import (
    NO_SIDE_CALLS,
    PendingRequest,
    Result,
    UntrainedRequestRules,
    cut_at,
    digest_of,
    off_loop,
    text_with_calls,
    without_unwritable_calls,
)
from agentrl.gateway.refusals import TOO_DEEP, SessionOver, client_error_of
from agentrl.message import Message, ToolCall

_log = logging.getLogger(__name__)
KEY_PREFIX = "sk-agentrl-"
ENDED = "this episode has ended"
FOLLOWED_LIVE = ("temperature", "top_p", "seed")
"""Client settings that are followed in live traffic, which is not trained on."""
NAMES = "messages.name"
TOO_LONG = "context_length_exceeded"
"""OpenAI's error code for a prompt that leaves no room for an answer; clients react by shortening their history."""
KEPT_ANSWERS = 32
"""Maximum number of finished requests that are kept for retries."""


@dataclass(frozen=True, slots=True)
class _ClientTool:
    """A tool that the client runs; only its schema is known."""

    schema: ToolSchema

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


class GatewaySession:
    """Session that answers the requests of one episode with its policy, and records them in its trajectory.

    Args:
        episode: Episode in which conversations are opened.
        side_calls: Rules for requests that are excluded from training.
        steps: True if the client may take actions in the environment.
        is_live: True for live traffic, which is not trained on: the client's sampling settings apply, and no limit ends
            the session.
        holds_forms: True if answers must follow the JSON schemas and forced calls of the client.
        warned: Settings for which the log already has a warning; several sessions may share the set.
    """

    def __init__(
        self,
        episode: Episode,
        *,
        side_calls: UntrainedRequestRules = NO_SIDE_CALLS,
        steps: bool = True,
        is_live: bool = False,
        holds_forms: bool = True,
        warned: set[str] | None = None,
    ) -> None:
        self.id = secrets.token_urlsafe(12)
        self.key = KEY_PREFIX + secrets.token_urlsafe(24)
        """API key of the model's clients."""
        self.secret = secrets.token_urlsafe(24)
        """Key for actions and rewards; hide it from the tools that the policy calls."""
        self.outcome: Outcome | None = None
        """Outcome of the budget that a request has exhausted."""
        self.spent = asyncio.Event()
        """Set together with `outcome`: the client receives no more answers."""
        self.refusal: str | None = None
        """Error of the first request that could not be served."""
        self.requests = 0
        self.retries = 0
        self.answers = 0
        self.is_done = False
        """True if an action has ended the environment's episode."""
        self._episode = episode
        self._side_calls = side_calls
        self._steps = steps
        self._is_live = is_live
        self._holds_forms = holds_forms
        self._warned = set() if warned is None else warned
        self._histories = Histories()
        self._stored: dict[str, Sequence[Message]] = {}
        self._pending: dict[bytes, PendingRequest] = {}
        self._failed: list[PendingRequest] = []
        self._step_failure: AgentRLError | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._stepping = asyncio.Lock()
        self._call_ids: dict[str, str] = {}
        self._turns: dict[str, int] = {}
        self._rewards: dict[int | None, float] = {}
        self._began_at = self._active_at = time.monotonic()
        self._waited_s = 0.0
        self._waiting_since: float | None = None
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """True if the session accepts no more requests."""
        return self._is_over

    @property
    def failure(self) -> AgentRLError | None:
        """Infrastructure failure that no retry has fixed; it makes the episode invalid for training."""
        failures = [pending.failure for pending in self._failed if pending.failure is not None]
        return self._step_failure or (failures[0] if failures else None)

    @property
    def idle_s(self) -> float:
        """Seconds since the latest request arrived or was answered; 0 while one is being answered."""
        return 0.0 if self._waiting_since is not None else time.monotonic() - self._active_at

    @property
    def is_answering(self) -> bool:
        """True while a request is being answered."""
        return self._waiting_since is not None

    @property
    def age_s(self) -> float:
        """Seconds since the session was opened."""
        return time.monotonic() - self._began_at

    @property
    def waited_s(self) -> float:
        """Seconds in which the client waited for an answer."""
        since = self._waiting_since
        return self._waited_s + (0.0 if since is None else time.monotonic() - since)

    async def begin(self, dialect: Dialect, body: Mapping[str, Any], raw: bytes, *, is_retry: bool) -> PendingRequest:
        """Start to answer a request, or join the task of the request that it retries.

        `raw` are the bytes of the request, which identify a retry.

        Raises:
            BadRequest: the request cannot be served.
            SessionOver: the episode has ended.
        """
        if self._is_over:
            raise SessionOver(ENDED)
        self._active_at = time.monotonic()
        digest = await off_loop(len(raw), digest_of, dialect.path, raw)
        pending = self._pending.get(digest) if is_retry else None
        if pending is None:
            request, chain = await off_loop(len(raw), self._read, dialect, body)
            if self._is_over or self.outcome is not None:
                raise SessionOver(ENDED if self.outcome is None else f"{ENDED}: {self.outcome.value}")
            # The same request may have arrived in another connection while this one was read in a thread.
            pending = self._pending.get(digest) if is_retry else None
        if pending is None:
            self.requests += 1
            self._forget_old_answers()
            head = Reply(id=secrets.token_hex(12), created=int(time.time()), model=request.model, answers=())
            pending = self._pending[digest] = PendingRequest(
                request=request, chain=chain, streaming=StreamingReply(head)
            )
        else:
            self.retries += 1
        if pending.task is None or _has_failed(pending.task):
            pending.streaming = StreamingReply(pending.streaming.head)  # a failed attempt is not continued
            pending.task = self._start(self._reply(dialect, pending))
        return pending

    async def finish(self, pending: PendingRequest) -> Reply:
        """Wait for the reply to a request.

        Raises:
            BadRequest: the request cannot be served.
            SessionOver: the episode has ended.
            Unavailable: the engine cannot answer now.
        """
        assert pending.task is not None
        try:
            return await asyncio.shield(pending.task)
        except asyncio.CancelledError:
            if pending.task.cancelled():
                raise SessionOver(ENDED) from None
            raise

    def has_request(self, digest: bytes) -> bool:
        """Return True if a request with this digest is kept for retries."""
        return digest in self._pending

    def has_reply(self, name: str) -> bool:
        """Return True if a reply is stored here under this id."""
        return name in self._stored

    def has_answer_of(self, chain: Chain, request: ChatRequest) -> bool:
        """Return True if a request continues an answer of this session."""
        return self._histories.has_answer_of(chain, request.messages)

    def _read(self, dialect: Dialect, body: Mapping[str, Any]) -> tuple[ChatRequest, Chain]:
        """Read a request and hash its history; large requests run in a thread."""
        try:
            request = dialect.read(body, self._stored)
            return request, chain_of(request.messages, request.tools)
        except BadRequest as error:
            if not error.is_offer:
                self.refusal = self.refusal or error.message
            raise
        except RecursionError as error:
            raise BadRequest(TOO_DEEP, code="invalid_json") from error

    def _start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run a coroutine as a task that the end of the session cancels."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        _has_failed(task)  # retrieves the exception, so that asyncio does not log it

    def _forget_old_answers(self) -> None:
        """Forget the oldest finished requests above `KEPT_ANSWERS`."""
        done = [digest for digest, pending in self._pending.items() if pending.task is not None and pending.task.done()]
        for digest in done[:-KEPT_ANSWERS]:
            del self._pending[digest]

    async def _reply(self, dialect: Dialect, pending: PendingRequest) -> Reply:
        request = pending.request
        self._warn_about_ignored_settings(request)
        try:
            with self._waiting():
                await self._sample(pending)
            if not pending.streaming.is_beginning_of(pending.answers[0][1]):
                raise EngineError(
                    "an engine server was lost during a stream, and the new answer differs: send the request again"
                )
        except AgentRLError as error:
            pending.failure = error
            if pending not in self._failed:
                self._failed.append(pending)
            raise client_error_of(error) from error
        pending.failure = None
        first = pending.answers[0][0]
        reply = replace(
            pending.streaming.head,
            answers=[answer for _, answer in pending.answers],
            prompt_tokens=first.prompt_tokens,
            cached_tokens=first.cached_tokens,
        )
        if first.turn is not None:
            self._turns[dialect.reply_id(reply)] = first.turn
        if request.extra.get("store"):
            self._stored[dialect.reply_id(reply)] = [*request.extra["history"], sent_message(reply.answer)]
        pending.streaming.end(reply)
        return reply

    def _warn_about_ignored_settings(self, request: ChatRequest) -> None:
        followed = FOLLOWED_LIVE if self._is_live else ()
        self._warn_about_hidden_names(request)
        new = {name: value for name, value in request.settings.items() if name not in (*followed, *self._warned)}
        if new:
            self._warned.update(new)
            text = ", ".join(f"{name}={value}" for name, value in new.items())
            _log.warning("a client requests %s: ignored, because the run sets them", text)

    def _warn_about_hidden_names(self, request: ChatRequest) -> None:
        """Warn once if the model's chat template leaves the authors' names out of the prompt."""
        named = next((message for message in request.messages if message.name and message.role != "tool"), None)
        if named is None or NAMES in self._warned:
            return
        self._warned.add(NAMES)
        try:
            counts = [self._episode.count_tokens([one]) for one in (named, replace(named, name=None))]
        except (TemplateError, UsageError):
            return
        if counts[0] == counts[1]:
            _log.warning("a client sends messages with names (%s): the chat template does not show names", named.name)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the block as waiting time; overlapping waits count once."""
        if self._waiting_since is not None:
            yield
            return
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waited_s, self._waiting_since = self.waited_s, None
            self._active_at = time.monotonic()

    async def _sample(self, pending: PendingRequest) -> None:
        """Sample the missing answers: first one, then the others together, so that they share its cached prompt."""
        if not pending.answers:
            pending.answers.append(await self._sample_one(pending))
        missing = pending.request.count - len(pending.answers)
        if missing and self.outcome is None:
            tasks = [self._start(self._sample_one(pending)) for _ in range(missing)]
            await asyncio.wait(tasks)
            pending.answers += [task.result() for task in tasks if not _has_failed(task)]
            for task in tasks:
                task.result()

    async def _sample_one(self, pending: PendingRequest) -> tuple[Answer, ReplyAnswer]:
        """Sample one answer and record the conversation that it extends."""
        request = pending.request
        followed: dict[str, Any] = {}
        if self._is_live:
            followed = {name: request.settings[name] for name in FOLLOWED_LIVE if name in request.settings}
        options = TurnOptions(
            max_tokens=request.max_tokens,
            stop=request.stop,
            trained=not self._side_calls.matches(request),
            on_progress=pending.update if request.stream and not pending.answers else None,
            form=self._form(request),
            logprobs=request.logprobs,
            **followed,
        )
        try:
            conversation, messages = self._conversation(request, pending.chain)
            answer = without_unwritable_calls(await conversation.generate(options=options), request.text_tools)
        except EpisodeEnd as end:
            return self._cut_off(end)
        except UnsupportedOption as error:
            if isinstance(error, FormMissed):  # the policy's fault: the gateway supports the form
                raise BadRequest(
                    f"{request.form_field}: {error}", field=request.form_field, code="form_missed"
                ) from error
            field = {"form": request.form_field, "images": "messages"}.get(error.option, error.option)
            self.refusal = self.refusal or f"{field}: {error}"
            raise BadRequest(f"{field}: {error}", field=field, code="unsupported") from error
        except TemplateError as error:
            self.refusal = self.refusal or str(error)
            raise BadRequest(str(error), field="messages") from error
        except AgentRLError:
            raise
        except Exception as error:
            raise EnvironmentFailure("the gateway failed", got=described_error(error)) from error
        self.answers += 1
        reply = self._reply_answer(answer, request, "" if pending.answers else pending.streaming.text)
        sent = sent_message(reply)
        chain = [*pending.chain, chain_step(pending.chain, sent)]
        recorded = [*messages, answer.message]
        self._histories.remember(conversation, recorded, chain, sent=sent, tools=request.tools)
        return answer, reply

    def _cut_off(self, end: EpisodeEnd) -> tuple[Answer, ReplyAnswer]:
        """Return the empty answer of an exhausted budget and, except in live traffic, accept no more requests.

        Raises:
            BadRequest: the prompt is too long, and either traffic is live or nothing was answered before. Clients get
                the vendors' error, because an empty answer would look like the policy's.
            SessionOver: the session of live traffic has just ended.
        """
        is_too_long = end.outcome is Outcome.TRUNCATED_TOKENS
        if not self._is_live:
            self._spend(end.outcome)
        elif not is_too_long:
            raise SessionOver(ENDED) from end
        if is_too_long and (self._is_live or not self.answers):
            reason = end.detail or end.outcome.value
            raise BadRequest(
                f"prompt is too long: {reason}; this is the maximum context length here. Send a shorter history",
                field="messages",
                code=TOO_LONG,
            ) from end
        spent = Answer(message=Message(role="assistant"), raw_text="", stop_reason=StopReason.LENGTH)
        return spent, ReplyAnswer(text="", finish="length")

    def _spend(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.spent.set()

    def _form(self, request: ChatRequest) -> AnswerForm | None:
        """Return the required form of an answer, if the session enforces forms; offered tools may be called instead."""
        form = request.form if self._holds_forms else None
        if form is not None and form.schema is not None and request.tools:
            return replace(form, or_calls=True)
        return form

    def _conversation(self, request: ChatRequest, chain: Chain) -> tuple[Conversation, Sequence[Message]]:
        """Return the conversation that a history continues, and the history as recorded."""
        recorded, count = self._histories.find_longest(chain, request.messages)
        new = [self._with_own_ids(message) for message in request.messages[count:]]
        if recorded is None:
            opened = self._episode.open(list(request.messages), tools=[_ClientTool(schema) for schema in request.tools])  # type: ignore[misc]
            return opened, request.messages
        messages = [*recorded.messages[:count], *new]
        return recorded.conversation.fork(messages), messages

    def _with_own_ids(self, message: Message) -> Message:
        """Return a tool's result with the call id that the ledger uses."""
        own = self._call_ids.get(message.tool_call_id or "")
        return message if own is None else replace(message, tool_call_id=own)

    def _reply_answer(self, answer: Answer, request: ChatRequest, sent: str) -> ReplyAnswer:
        """Return an answer as the client receives it; `sent` is the text that it already has.

        Unreadable calls become text. A client that takes one call at a time receives the first call; the history keeps
        the other calls, without results.
        """
        message, stop = answer.message, request.stop
        text, stop_text = cut_at(message.text, stop)
        if answer.problems and not message.tool_calls:
            written = text_with_calls(answer)
            text, stop_text = cut_at(written[max(written.find(sent), 0) :], stop)
        calls = tuple(self._with_client_id(call) for call in message.tool_calls[: 1 if request.single_call else None])
        return ReplyAnswer(
            text=text,
            finish=finish_of(answer.stop_reason, calls, stop_text),
            calls=calls,
            reasoning=message.reasoning,
            stop_text=None if calls else stop_text,
            tokens=answer.answer_tokens,
            logprobs=_tokens_within(len(text), answer.logprobs),
        )

    def _with_client_id(self, call: ToolCall) -> ToolCall:
        """Return a call with an id that is unique in the session."""
        client_id = f"call_{secrets.token_hex(12)}"
        self._call_ids[client_id] = call.id
        return replace(call, id=client_id)

    async def step(self, action: str) -> StepResult:
        """Take an action in the episode's environment; concurrent calls run one after the other.

        Raises:
            SessionOver: the episode has ended, or this action exhausts a budget.
            BadRequest: the policy has not answered yet, or the program may not take actions.
        """
        try:
            return await asyncio.shield(self._start(self._act(action)))
        except BadRequest as error:
            self.refusal = self.refusal or error.message
            raise

    async def _act(self, action: str) -> StepResult:
        async with self._stepping:
            if self._is_over or self.is_done or self.outcome is not None:
                raise SessionOver(ENDED)
            if not self._steps:
                raise BadRequest("the final answer is the only action; agent.options.answer=none allows others")
            if not self.answers:
                raise BadRequest("the policy has not answered yet: send it a request before the first action")
            try:
                result = await self._episode.step(action)
            except EpisodeEnd as end:
                self._spend(end.outcome)
                raise SessionOver(f"{ENDED}: {end.outcome.value}") from end
            except AgentRLError as error:
                self._step_failure = error
                raise
            self.is_done = result.done
            return result

    def count_tokens(self, dialect: Dialect, body: Mapping[str, Any]) -> int:
        """Return the number of tokens of a request's prompt."""
        request = dialect.read_count(body, self._stored)
        try:
            return self._episode.count_tokens(request.messages, request.tools)
        except (TemplateError, UsageError) as error:
            raise BadRequest(str(error), field="messages") from error

    def take_reward(self, body: Mapping[str, Any]) -> None:
        """Record a posted reward: ``{"reward": 1.0}`` for the episode, or for one answer with ``reply`` or ``turn``.

        A later reward for the episode, or for the same answer, replaces the earlier one.

        Raises:
            BadRequest: the body is malformed, or names an unknown answer.
        """
        if self._is_over:
            raise SessionOver(ENDED)
        refuse_unknown(body, ("reward", "success", "turn", "reply"))
        reward = number(body, "reward", -MAX_REWARD, MAX_REWARD)
        if reward is None:
            raise BadRequest("reward is missing", field="reward")
        success = body.get("success")
        if success is not None and not isinstance(success, bool):
            raise BadRequest(f"success must be true or false: got {success!r}", field="success")
        turn = take_optional(body, "turn", int, None)
        if is_given(body, "reply"):
            turn = self._turns.get(take(body, "reply", str))
            if turn is None:
                raise BadRequest("reply is not an answer of this episode", field="reply", status=404)
        try:
            self._episode.give_reward(reward - self._rewards.get(turn, 0.0), turn=turn, success=success)
        except UsageError as error:
            raise BadRequest(str(error), field="turn") from error
        self._rewards[turn] = reward

    def conversations(self) -> list[tuple[Sequence[Message], Sequence[ToolSchema]]]:
        """Return the conversations so far, each up to its last answer, with the tools offered in it."""
        return [(recorded.messages, recorded.tools) for recorded in self._histories.ends()]

    async def close(self) -> None:
        """Stop accepting requests, cancel the running ones, and wait for a running action."""
        self._is_over = True
        async with self._stepping:
            running = list(self._running)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        self._pending.clear()


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def chain_step(chain: Chain, message: Message) -> bytes:
    """Return the hash of a history with one more message."""
    return hashlib.blake2b(chain[-1] + key_of(message), digest_size=16).digest()


def sent_message(answer: ReplyAnswer) -> Message:
    """Return an answer as the message that the client sends back."""
    return Message(role="assistant", content=answer.text, tool_calls=tuple(answer.calls), reasoning=answer.reasoning)


def _tokens_within(length: int, tokens: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
    """Return the tokens that start within the first `length` characters."""
    begins = [0, *itertools.accumulate(len(token.text) for token in tokens)]
    return [token for token, begin in zip(tokens, begins, strict=False) if begin < length]
