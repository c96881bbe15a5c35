"""One episode behind the gateway: its key, its conversations, its retries, its end.

request ──► side call? ──► longest known history ──► fork, or a new conversation ──► generate ──► reply
                                                                                        └► remembered for the next one

The work of a request is a task of the session, not of the connection: a client that leaves and asks again joins it, and
an episode that ends cancels it.
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
    LARGEST_REWARD,
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
from agentrl.gateway.fields import given, number, optional, refuse_unknown, take
from agentrl.gateway.history import Chain, Histories, chain_of, key_of
from agentrl.gateway.refusals import SessionOver, as_told
from agentrl.gateway.work import (
    NO_SIDE_CALLS,
    PendingRequest,
    Result,
    UntrainedRequestRules,
    cut_at,
    digest_of,
    off_loop,
)
from agentrl.message import Message, ToolCall
from agentrl.remote.listening import DEEPEST, is_deep

_log = logging.getLogger(__name__)
KEY_PREFIX = "sk-agentrl-"
ENDED = "this episode has ended"
FOLLOWED_LIVE = ("temperature", "top_p", "seed")
"""Settings of clients that are followed where nothing is trained."""
NAMES = "messages.name"
TOO_LONG = "context_length_exceeded"
"""OpenAI's word for a prompt that leaves no room for an answer; clients shorten their history when they read it."""
KEPT_ANSWERS = 32
"""Answers that a retry may still ask for."""


@dataclass(frozen=True, slots=True)
class _ClientTool:
    """A tool that the client runs: only its schema is known here."""

    schema: ToolSchema

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


class GatewaySession:
    """Answers the requests of one episode with its policy, and records them in its trajectory.

    Args:
        episode: Whose conversations are opened.
        side_calls: Which requests are left out of training.
        steps: The client may take actions in the environment.
        is_live: Nothing is trained on it: what the client asks for decides the sampling, and no limit ends the session.
        holds_forms: Answers are held to the JSON schemas and calls that the client asks for; else the policy is free.
        said: Names of settings of which was said that they are not followed; several sessions may share it.
    """

    def __init__(
        self,
        episode: Episode,
        *,
        side_calls: UntrainedRequestRules = NO_SIDE_CALLS,
        steps: bool = True,
        is_live: bool = False,
        holds_forms: bool = True,
        said: set[str] | None = None,
    ) -> None:
        self.id = secrets.token_urlsafe(12)
        self.key = KEY_PREFIX + secrets.token_urlsafe(24)
        """What the model's clients send as their key."""
        self.secret = secrets.token_urlsafe(24)
        """What actions and rewards are sent with; tools that the policy calls should not see it."""
        self.outcome: Outcome | None = None
        """Of a budget that a request has spent."""
        self.spent = asyncio.Event()
        """Set with the outcome of a request: the client gets answers no more."""
        self.refusal: str | None = None
        """The first request that could not be served as it was asked."""
        self.requests = 0
        self.retries = 0
        self.answers = 0
        self.is_done = False
        """An action has ended the environment's episode."""
        self._episode = episode
        self._side_calls = side_calls
        self._steps = steps
        self._is_live = is_live
        self._holds_forms = holds_forms
        self._said = set() if said is None else said
        self._histories = Histories()
        self._stored: dict[str, Sequence[Message]] = {}
        self._works: dict[bytes, PendingRequest] = {}
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
        """The episode takes no more requests."""
        return self._is_over

    @property
    def failure(self) -> AgentRLError | None:
        """Why the episode says nothing about the policy: something failed that no retry has made good."""
        failures = [work.failure for work in self._failed if work.failure is not None]
        return self._step_failure or (failures[0] if failures else None)

    @property
    def idle_s(self) -> float:
        """Seconds since the latest request came or was answered; 0 while one is answered."""
        return 0.0 if self._waiting_since is not None else time.monotonic() - self._active_at

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
        """Begin to answer one request, or join the work on one that was sent before.

        Args:
            dialect: Of the client.
            body: The request's JSON.
            raw: Its bytes: a retry is known by them.
            is_retry: The client says that it has sent this before.

        Raises:
            BadRequest: it cannot be answered as it is asked.
            SessionOver: the episode has ended.
        """
        if self._is_over:
            raise SessionOver(ENDED)
        self._active_at = time.monotonic()
        digest = await off_loop(len(raw), digest_of, dialect.path, raw)
        work = self._works.get(digest) if is_retry else None
        if work is None:
            asked, chain = await off_loop(len(raw), self._read, dialect, body)
            if self._is_over or self.outcome is not None:
                raise SessionOver(ENDED if self.outcome is None else f"{ENDED}: {self.outcome.value}")
            work = self._works.get(digest) if is_retry else None  # a large one may have come while this one was read
        if work is None:
            self.requests += 1
            self._forget_old_works()
            head = Reply(id=secrets.token_hex(12), created=int(time.time()), model=asked.model, answers=())
            work = self._works[digest] = PendingRequest(asked=asked, chain=chain, growing=StreamingReply(head))
        else:
            self.retries += 1
        if work.task is None or _has_failed(work.task):
            work.growing = StreamingReply(work.growing.head)  # of one that has failed, nothing is gone on with
            work.task = self._start(self._reply(dialect, work))
        return work

    async def finish(self, work: PendingRequest) -> Reply:
        """Wait for the reply to a request.

        Raises:
            BadRequest: it cannot be answered as it is asked.
            SessionOver: the episode has ended.
            Unavailable: the engine is not there now.
        """
        assert work.task is not None
        try:
            return await asyncio.shield(work.task)
        except asyncio.CancelledError:
            if work.task.cancelled():
                raise SessionOver(ENDED) from None
            raise

    def has_request(self, digest: bytes) -> bool:
        """Return True if a request with this digest may be asked again here."""
        return digest in self._works

    def has_reply(self, name: str) -> bool:
        """Return True if a reply is stored here under this id."""
        return name in self._stored

    def has_answer_of(self, chain: Chain, asked: ChatRequest) -> bool:
        """Return True if a request goes on with an answer of this session."""
        return self._histories.has_answer_of(chain, asked.messages)

    def _read(self, dialect: Dialect, body: Mapping[str, Any]) -> tuple[ChatRequest, Chain]:
        """Read a request, and hash its history; in a thread, where it is large."""
        try:
            asked = dialect.read(body, self._stored)
            return asked, chain_of(asked.messages, asked.tools)
        except BadRequest as error:
            if not error.is_offer:
                self.refusal = self.refusal or error.message
            raise
        except RecursionError as error:
            raise BadRequest("the request is nested too deeply", code="invalid_json") from error

    def _start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run work that ends with the session at the latest."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        _has_failed(task)  # an error that nobody waits for is known by now

    def _forget_old_works(self) -> None:
        """Forget answers that no retry asks for any more."""
        done = [digest for digest, work in self._works.items() if work.task is not None and work.task.done()]
        for digest in done[:-KEPT_ANSWERS]:
            del self._works[digest]

    async def _reply(self, dialect: Dialect, work: PendingRequest) -> Reply:
        asked = work.asked
        self._say_what_is_not_followed(asked)
        try:
            with self._waiting():
                await self._sample(work)
            if not work.growing.is_beginning_of(work.answers[0][1]):
                raise EngineError("a server was lost in the middle of a stream; another answer was sampled: ask again")
        except AgentRLError as error:
            work.failure = error
            if work not in self._failed:
                self._failed.append(work)
            raise as_told(error) from error
        work.failure = None
        first = work.answers[0][0]
        reply = replace(
            work.growing.head,
            answers=[given for _, given in work.answers],
            prompt_tokens=first.prompt_tokens,
            cached_tokens=first.cached_tokens,
        )
        if first.turn is not None:
            self._turns[dialect.reply_id(reply)] = first.turn
        if asked.extra.get("store"):
            self._stored[dialect.reply_id(reply)] = [*asked.extra["history"], sent_message(reply.answer)]
        work.growing.end(reply)
        return reply

    def _say_what_is_not_followed(self, asked: ChatRequest) -> None:
        followed = FOLLOWED_LIVE if self._is_live else ()
        self._say_if_names_are_not_shown(asked)
        new = {name: value for name, value in asked.settings.items() if name not in (*followed, *self._said)}
        if new:
            self._said.update(new)
            told = ", ".join(f"{name}={value}" for name, value in new.items())
            _log.warning("a client asks for %s: these settings are the run's, and not followed", told)

    def _say_if_names_are_not_shown(self, asked: ChatRequest) -> None:
        """Say once that speakers' names are not in the prompt, where the model's chat template leaves them out."""
        named = next((message for message in asked.messages if message.name and message.role != "tool"), None)
        if named is None or NAMES in self._said:
            return
        self._said.add(NAMES)
        try:
            counts = [self._episode.count_tokens([one]) for one in (named, replace(named, name=None))]
        except (TemplateError, UsageError):
            return
        if counts[0] == counts[1]:
            _log.warning("a client names who speaks (%s): the chat template does not show names", named.name)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Inside the block a client waits; clients that wait at the same time wait once."""
        if self._waiting_since is not None:
            yield
            return
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waited_s, self._waiting_since = self.waited_s, None
            self._active_at = time.monotonic()

    async def _sample(self, work: PendingRequest) -> None:
        """Sample the answers that a request lacks: the first alone, so that the others share its prompt."""
        if not work.answers:
            work.answers.append(await self._one(work))
        missing = work.asked.count - len(work.answers)
        if missing and self.outcome is None:
            tasks = [self._start(self._one(work)) for _ in range(missing)]
            await asyncio.wait(tasks)
            work.answers += [task.result() for task in tasks if not _has_failed(task)]
            for task in tasks:
                task.result()

    async def _one(self, work: PendingRequest) -> tuple[Answer, ReplyAnswer]:
        """Sample one answer, and remember where it leads."""
        asked = work.asked
        followed: dict[str, Any] = {}
        if self._is_live:
            followed = {name: asked.settings[name] for name in FOLLOWED_LIVE if name in asked.settings}
        options = TurnOptions(
            max_tokens=asked.max_tokens,
            stop=asked.stop,
            trained=not self._side_calls.has(asked),
            on_progress=work.say if asked.stream and not work.answers else None,
            form=self._form(asked),
            logprobs=asked.logprobs,
            **followed,
        )
        try:
            conversation, messages = self._conversation(asked, work.chain)
            answer = without_deep_calls(await conversation.generate(options=options))
        except EpisodeEnd as end:
            return self._cut_off(end)
        except UnsupportedOption as error:
            if isinstance(error, FormMissed):  # which is the policy's doing: the gateway can give such answers
                raise BadRequest(f"{asked.form_field}: {error}", field=asked.form_field, code="form_missed") from error
            field = {"form": asked.form_field, "images": "messages"}.get(error.option, error.option)
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
        given = self._given(answer, asked, "" if work.answers else work.growing.text)
        sent = sent_message(given)
        chain = [*work.chain, chain_step(work.chain, sent)]
        recorded = [*messages, answer.message]
        self._histories.remember(conversation, recorded, chain, given=sent, tools=asked.tools)
        return answer, given

    def _cut_off(self, end: EpisodeEnd) -> tuple[Answer, ReplyAnswer]:
        """Give the empty answer of a spent budget; the episode takes no more requests, unless the traffic is live.

        Raises:
            BadRequest: the prompt is too long, and nothing was answered before it: clients are told what the vendors
                tell them, since an empty answer would look like one of the policy's.
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

    def _form(self, asked: ChatRequest) -> AnswerForm | None:
        """Return the form of an answer, if the session holds answers to forms; with tools, calls are one as well."""
        form = asked.form if self._holds_forms else None
        if form is not None and form.schema is not None and asked.tools:
            return replace(form, or_calls=True)
        return form

    def _conversation(self, asked: ChatRequest, chain: Chain) -> tuple[Conversation, Sequence[Message]]:
        """The conversation that a history continues, and the history as it is recorded."""
        known, count = self._histories.longest(chain, asked.messages)
        new = [self._with_own_ids(message) for message in asked.messages[count:]]
        if known is None:
            opened = self._episode.open(list(asked.messages), tools=[_ClientTool(schema) for schema in asked.tools])  # type: ignore[misc]
            return opened, asked.messages
        messages = [*known.messages[:count], *new]
        return known.conversation.fork(messages), messages

    def _with_own_ids(self, message: Message) -> Message:
        """A tool's result under the id that the policy's call has in the ledger."""
        own = self._call_ids.get(message.tool_call_id or "")
        return message if own is None else replace(message, tool_call_id=own)

    def _given(self, answer: Answer, asked: ChatRequest, said: str) -> ReplyAnswer:
        """Make what the client gets of an answer, of which it may have got the beginning.

        Unreadable calls come as text. Where the client takes one call at a time it gets the first: the policy reads
        that it made the others, and no results of them.
        """
        message, stop = answer.message, asked.stop
        text, stop_text = cut_at(message.text, stop)
        if answer.problems and not message.tool_calls:
            text, stop_text = cut_at(answer.raw_text[max(answer.raw_text.find(said), 0) :], stop)
        calls = tuple(self._named(call) for call in message.tool_calls[: 1 if asked.single_call else None])
        return ReplyAnswer(
            text=text,
            finish=finish_of(answer.stop_reason, calls, stop_text),
            calls=calls,
            reasoning=message.reasoning,
            stop_text=None if calls else stop_text,
            tokens=answer.answer_tokens,
            logprobs=_up_to(len(text), answer.logprobs),
        )

    def _named(self, call: ToolCall) -> ToolCall:
        """A call under an id that no other call of the session has."""
        given = f"call_{secrets.token_hex(12)}"
        self._call_ids[given] = call.id
        return replace(call, id=given)

    async def step(self, action: str) -> StepResult:
        """Take an action in the episode's environment; one at a time.

        Raises:
            SessionOver: the episode has ended, or ends with it.
            BadRequest: the policy has not answered yet, or the program takes no actions itself.
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
                raise BadRequest("the answer is the only action; agent.options.answer=none allows others")
            if not self.answers:
                raise BadRequest("the policy has not answered yet: ask it before the first action")
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

    def count_tokens(self, asked: ChatRequest) -> int:
        """Return how many tokens a request's prompt has."""
        try:
            return self._episode.count_tokens(asked.messages, asked.tools)
        except (TemplateError, UsageError) as error:
            raise BadRequest(str(error), field="messages") from error

    def take_reward(self, body: Mapping[str, Any]) -> None:
        """Take a posted reward: ``{"reward": 1.0}`` of the episode, or of one answer with ``reply`` or ``turn``.

        The latest of the episode, or of one answer, counts: a reward that is posted again is not paid again.

        Raises:
            BadRequest: it cannot be read, or names an answer that was not given.
        """
        if self._is_over:
            raise SessionOver(ENDED)
        refuse_unknown(body, ("reward", "success", "turn", "reply"))
        reward = number(body, "reward", -LARGEST_REWARD, LARGEST_REWARD)
        if reward is None:
            raise BadRequest("reward is missing", field="reward")
        success = body.get("success")
        if success is not None and not isinstance(success, bool):
            raise BadRequest(f"success must be true or false: got {success!r}", field="success")
        turn = optional(body, "turn", int, None)
        if given(body, "reply"):
            turn = self._turns.get(take(body, "reply", str))
            if turn is None:
                raise BadRequest("reply is no answer of this episode", field="reply", status=404)
        try:
            self._episode.give_reward(reward - self._rewards.get(turn, 0.0), turn=turn, success=success)
        except UsageError as error:
            raise BadRequest(str(error), field="turn") from error
        self._rewards[turn] = reward

    def conversations(self) -> list[tuple[Sequence[Message], Sequence[ToolSchema]]]:
        """Return the conversations so far, each up to its last answer, with the tools that were offered in it."""
        return [(known.messages, known.tools) for known in self._histories.ends()]

    async def close(self) -> None:
        """Take no more requests, and end those that run; an action that is being taken is waited for."""
        self._is_over = True
        async with self._stepping:
            running = list(self._running)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        self._works.clear()


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def chain_step(chain: Chain, message: Message) -> bytes:
    """Return the hash of a history with one more message."""
    return hashlib.blake2b(chain[-1] + key_of(message), digest_size=16).digest()


def without_deep_calls(answer: Answer) -> Answer:
    """Return an answer whose calls can be written as JSON: one with deeper arguments becomes text."""
    if not any(is_deep(dict(call.arguments)) for call in answer.message.tool_calls):
        return answer
    problem = f"the arguments of a call have more than {DEEPEST} levels of lists and objects"
    message = replace(answer.message, content=answer.raw_text, tool_calls=())
    return replace(answer, message=message, problems=(*answer.problems, problem))


def sent_message(answer: ReplyAnswer) -> Message:
    """Return an answer as the client has it, and sends it back."""
    return Message(role="assistant", content=answer.text, tool_calls=tuple(answer.calls), reasoning=answer.reasoning)


def _up_to(length: int, tokens: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
    """Return the tokens with which a text of this length begins."""
    begins = [0, *itertools.accumulate(len(token.text) for token in tokens)]
    return [token for token, begin in zip(tokens, begins, strict=False) if begin < length]
