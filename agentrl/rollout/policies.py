"""Policies that answer in episodes: the contract, an inference engine that samples tokens into the ledger, and a text
service, which has no tokens and can only be evaluated. Scripted ones are in `agentrl.rollout.scripted_policies`.
"""

from __future__ import annotations

import asyncio
import bisect
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentrl.agent_loop import PLAIN_TURN, AgentLoop, Answer, Conversation, EpisodeEnd, TurnOptions, plainly_written
from agentrl.engine import (
    AdapterVersions,
    ChatPolicy,
    GenerateRequest,
    Generation,
    PolicyEngine,
    SamplingParams,
    StopReason,
)
from agentrl.errors import AgentRLError, EngineError, Outcome, TemplateError, UsageError, async_boundary
from agentrl.message import Content, Message
from agentrl.render.conversation import LedgerConversation
from agentrl.render.renderer import Renderer
from agentrl.render.tokens import CUT_MARK, ToolSchema
from agentrl.rollout.env_pool import EnvHandle
from agentrl.rollout.turns import TurnLog
from agentrl.rollout.waits import WaitKind
from agentrl.tool import Tool
from agentrl.trajectory import SOLE_ROLE, TokenSequence, Turn


class EpisodeView(Protocol):
    """Part of an episode that a policy may use, apart from its messages."""

    turns: TurnLog
    loop: AgentLoop
    environment: EnvHandle
    observation: Content
    """The latest observation, uncut."""


class EpisodePolicy(ABC):
    """Opens the conversations of episodes."""

    @abstractmethod
    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """Start a conversation of one episode; `tools` are offered to the policy."""

    @abstractmethod
    def cut(self, text: str, max_tokens: int) -> str:
        """`text`, cut to a token budget with a visible mark."""

    def written(self, message: Message) -> str:
        """Return an answer as the policy's model writes it; as JSON where that is not known."""
        return plainly_written(message)

    def of_role(self, role: str) -> EpisodePolicy:
        """Return the policy of a role; the same for all roles where they have no adapters of their own."""
        return self

    def count(self, messages: Sequence[Message], schemas: Sequence[ToolSchema]) -> int:
        """Return how many tokens a conversation would begin with; a `UsageError` where the policy has no tokens."""
        raise UsageError(f"{type(self).__name__} cannot count tokens", expected="a policy that samples tokens")

    async def end(self, episode: EpisodeView) -> None:
        """An episode is over: release what was kept for it."""
        return

    async def close(self) -> None:
        """Release what the policy of a role holds for the whole run."""
        return


MAX_RESUBMISSIONS = 8
"""Maximum number of requests for an answer that the engine aborts by itself."""


def written_by(renderer: Renderer, message: Message) -> str:
    """Return an answer as the model of `renderer` writes it; as JSON where its template has no way to."""
    try:
        return renderer.answer_text(message).strip()
    except TemplateError:
        return plainly_written(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleAdapters:
    """The adapters of an engine that answer for roles."""

    by_role: Mapping[str, str]
    """Roles that are left out are played by the model without adapters."""
    versions: AdapterVersions


class EngineEpisodePolicy(EpisodePolicy):
    """Opens conversations that an engine answers.

    The `max_tokens`, `seed` and stop tokens of `sampling` are set per turn.

    Args:
        engine: Answers.
        renderer: Renderer of its model.
        sampling: Settings of all answers.
        adapters: Which adapter answers for which role, where there are several.
    """

    adapter: str | None = None
    """Of the engine's, that answers."""

    def __init__(
        self,
        engine: PolicyEngine,
        renderer: Renderer,
        sampling: SamplingParams,
        *,
        adapters: RoleAdapters | None = None,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids | renderer.stop_token_ids)
        self.adapters = adapters

    def with_sampling(self, sampling: SamplingParams) -> EngineEpisodePolicy:
        """Return the same policy with other settings."""
        return EngineEpisodePolicy(self.engine, self.renderer, sampling, adapters=self.adapters)

    def of_role(self, role: str) -> EngineEpisodePolicy:
        """Return the policy of a role, whose adapter answers."""
        if self.adapters is None or role not in self.adapters.by_role:
            return self
        own = copy.copy(self)
        own.adapter = self.adapters.by_role[role]
        return own

    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """Return a conversation on the token ledger."""
        schemas: list[ToolSchema] = [tool.schema for tool in tools]
        ledger = LedgerConversation(self.renderer, episode.turns.trajectory, messages, tools=schemas)
        return EngineConversation(self, ledger, episode.turns)

    def cut(self, text: str, max_tokens: int) -> str:
        """Cut by the model's own tokens."""
        return self.renderer.cut(text, max_tokens)

    def written(self, message: Message) -> str:
        """Write it as the chat template does."""
        return written_by(self.renderer, message)

    def count(self, messages: Sequence[Message], schemas: Sequence[ToolSchema]) -> int:
        """Count the tokens of the rendered prompt."""
        return len(self.renderer.prompt(messages, schemas).ids)

    async def end(self, episode: EpisodeView) -> None:
        """Let the engine forget the episode's sessions."""
        trajectory = episode.turns.trajectory
        for index in range(len(trajectory.sequences)):
            await self.engine.end_session(session_id(trajectory.id, index))


def _params_of_turn(sampling: SamplingParams, options: TurnOptions, *, room: int, seed: int) -> SamplingParams:
    """Return the run's sampling parameters with what a turn says, within the tokens that are left."""
    return replace(
        sampling,
        max_tokens=min(room, options.max_tokens or room),
        seed=seed,
        stop=tuple(dict.fromkeys((*sampling.stop, *options.stop))),
        temperature=sampling.temperature if options.temperature is None else options.temperature,
        top_p=sampling.top_p if options.top_p is None else options.top_p,
    )


class EngineConversation(Conversation):
    """One sequence of the ledger, answered by an engine."""

    def __init__(self, policy: EngineEpisodePolicy, ledger: LedgerConversation, turns: TurnLog) -> None:
        self.ledger = ledger
        self._policy = policy
        self._turns = turns

    def add(self, *messages: Message) -> None:
        """Append messages; they become tokens with the next turn."""
        self.ledger.add(messages)

    def fork(self, messages: Sequence[Message]) -> Conversation:
        """Return a conversation with a rewritten history."""
        return EngineConversation(self._policy, self.ledger.fork(messages), self._turns)

    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        """Sample one turn."""
        seed = self._turns.begin()
        prompt_ids = self.ledger.prepare(prefill)
        room = self._turns.budget.answer_tokens(len(prompt_ids), self._policy.engine.capabilities.max_context)
        params = _params_of_turn(self._policy.sampling, options, room=room, seed=seed)
        request = GenerateRequest(
            prompt_ids=prompt_ids,
            params=params,
            session_id=self._session_id(),
            request_id=f"{self._turns.trajectory.id}/turn-{self._turns.budget.requests - 1}",
            adapter=self._policy.adapter,
            images=self.ledger.sequence.images,
            on_tokens=self.ledger.progress(params.stop, options.on_progress) if options.on_progress else None,
            routed_experts_from=self.ledger.sequence.routed
            if self._policy.engine.capabilities.routed_experts
            else None,
        )
        if request.images and not self._policy.engine.capabilities.images:
            raise UsageError("the engine does not take images", hint="set engine=local, or give text observations")
        try:
            generation = self._cut(await self._sample(request), params.stop)
        except AgentRLError:
            self._turns.budget.give_back_turn()
            self.ledger.withdraw()
            raise
        if self._turns.is_over:
            raise EpisodeEnd(Outcome.CANCELLED)
        self.ledger.verify(request.prompt_ids, request.images)
        answer = self.ledger.accept(generation, role=options.role, trained=options.trained)
        turn = self.ledger.sequence.turns[-1]
        turn.adapter = self._policy.adapter
        self._turns.take(
            turn, prompt_tokens=len(prompt_ids), answer_tokens=len(generation.token_ids), trained=options.trained
        )
        if generation.resubmissions:
            self._turns.add_metric("resubmissions", float(generation.resubmissions))
        if generation.stop_reason is StopReason.ABORT:
            raise EpisodeEnd(Outcome.TRUNCATED_TIME)
        return replace(
            answer,
            prompt_tokens=len(prompt_ids),
            cached_tokens=generation.cached_tokens,
            answer_tokens=len(generation.token_ids),
            turn=turn.index,
        )

    def _session_id(self) -> str:
        trajectory = self._turns.trajectory
        index = next(i for i, sequence in enumerate(trajectory.sequences) if sequence is self.ledger.sequence)
        return session_id(trajectory.id, index)

    def _cut(self, generation: Generation, stop: Sequence[str]) -> Generation:
        """Drop what an engine sampled past the first stop text."""
        end = ended_at(generation.token_ids, stop, self._policy.renderer.encoder.decode) if stop else None
        return generation if end is None else generation.cut(end)

    async def _sample(self, request: GenerateRequest) -> Generation:
        """Ask the engine until the answer is whole, or the episode's time is over (then it ends with ABORT)."""
        done: Generation | None = None
        for attempt in range(MAX_RESUBMISSIONS):
            part = await self._ask(
                replace(request, request_id=f"{request.request_id}/{attempt}") if attempt else request
            )
            done = part if done is None else done.followed_by(part)
            remaining_s = self._turns.budget.remaining_s
            time_is_over = remaining_s is not None and remaining_s <= 0
            if part.stop_reason is not StopReason.ABORT or time_is_over:
                return done
            request = _continued(request, part)
            if request.params.max_tokens == 0:
                return replace(done, stop_reason=StopReason.LENGTH)
        raise EngineError(
            f"the engine aborted request {request.request_id} again and again",
            got=f"{MAX_RESUBMISSIONS} partial answers",
            expected="a whole answer",
        )

    async def _ask(self, request: GenerateRequest) -> Generation:
        waits, limits = self._turns.waits, self._turns.limits
        what = f"answer to request {request.request_id}"
        with waits.on(WaitKind.ENGINE, self._turns.trajectory.id, "an answer"):
            async with async_boundary(EngineError, what, deadline_s=limits.answer_timeout_s):
                remaining_s = self._turns.budget.remaining_s
                if remaining_s is None:
                    answer = await self._policy.engine.generate(request)
                else:
                    answer = await self._ask_within(request, remaining_s)
        policy = self._policy
        if policy.adapters is None or policy.adapter is None:
            return answer
        return policy.adapters.versions.stamped(answer, policy.adapter)

    async def _ask_within(self, request: GenerateRequest, seconds: float) -> Generation:
        """Abort the request when the time is over, and take what was sampled until then."""
        engine = self._policy.engine
        loop = asyncio.get_running_loop()
        aborts: list[asyncio.Task[bool]] = []
        timer = loop.call_later(seconds, lambda: aborts.append(loop.create_task(engine.abort(request.request_id))))
        try:
            return await engine.generate(request)
        finally:
            timer.cancel()
            await asyncio.gather(*aborts)


def ended_at(ids: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int | None:
    """Return how many of the tokens it takes to complete one of the stop texts; ``None`` if none is among them."""

    def is_complete(tokens: int) -> bool:
        text = decode(ids[:tokens])
        return any(end in text for end in stop)

    if not is_complete(len(ids)):
        return None
    return bisect.bisect_left(range(len(ids)), True, key=is_complete)


def session_id(trajectory_id: str, sequence: int) -> str:
    """Return the engine's session of one sequence of an episode."""
    return f"{trajectory_id}/{sequence}"


def _continued(request: GenerateRequest, part: Generation) -> GenerateRequest:
    rest = request.params.max_tokens - len(part.token_ids)
    known = 0 if part.routed_experts is None else len(part.routed_experts)
    return replace(
        request,
        prompt_ids=[*request.prompt_ids, *part.token_ids],
        routed_experts_from=None if request.routed_experts_from is None else request.routed_experts_from + known,
        params=replace(request.params, max_tokens=rest),
    )


CHARACTERS_PER_TOKEN = 4
"""The usual estimate for English: a text service's tokens cannot be counted here."""


def cut_characters(text: str, max_tokens: int) -> str:
    """`text` cut to about `max_tokens` tokens, with a visible mark."""
    most = max_tokens * CHARACTERS_PER_TOKEN
    return text if len(text) <= most else text[:most] + CUT_MARK.format(len(text) - most)


def append_textual_turn(turns: TurnLog, stop_reason: str, role: str = SOLE_ROLE) -> Turn:
    """Record a turn without tokens, so that rewards have a place: in the role's own sequence without tokens."""
    trajectory = turns.trajectory
    textual = (s for s in trajectory.sequences if not len(s) and all(turn.role == role for turn in s.turns))
    sequence = next(textual, None)
    if sequence is None:
        trajectory.sequences.append(sequence := TokenSequence())
    turn = Turn(index=len(trajectory.turns), start=0, end=0, role=role, stop_reason=stop_reason)
    sequence.turns.append(turn)
    return turn


class ChatEpisodePolicy(EpisodePolicy):
    """Opens conversations that a text service answers; `max_tokens` and `seed` of `sampling` are set per turn."""

    def __init__(self, service: ChatPolicy, sampling: SamplingParams) -> None:
        self.service = service
        self.sampling = sampling

    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """Return a conversation in text."""
        return ChatConversation(self, messages, tools, episode.turns)

    def cut(self, text: str, max_tokens: int) -> str:
        """Cut by an estimate of the number of tokens."""
        return cut_characters(text, max_tokens)


class ChatConversation(Conversation):
    """A conversation that is sent whole with each turn."""

    def __init__(
        self, policy: ChatEpisodePolicy, messages: Sequence[Message], tools: Sequence[Tool], turns: TurnLog
    ) -> None:
        self.messages = list(messages)
        self._policy = policy
        self._tools = tools
        self._turns = turns
        self._prompt_tokens = 0

    def add(self, *messages: Message) -> None:
        """Append messages."""
        self.messages.extend(messages)

    def fork(self, messages: Sequence[Message]) -> Conversation:
        """Return a conversation with other messages."""
        return ChatConversation(self._policy, messages, self._tools, self._turns)

    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        """Ask for one turn."""
        if prefill:
            raise UsageError("a text service cannot continue an answer", got=f"prefill {prefill!r}", expected="none")
        seed = self._turns.begin()
        room = self._turns.budget.answer_tokens(self._prompt_tokens, self._policy.service.max_context)
        params = _params_of_turn(self._policy.sampling, options, room=room, seed=seed)
        trajectory_id = self._turns.trajectory.id
        request_id = f"{trajectory_id}/turn-{self._turns.budget.requests - 1}"
        deadline_s = self._turns.limits.answer_timeout_s
        with self._turns.waits.on(WaitKind.ENGINE, trajectory_id, "an answer"):
            async with async_boundary(EngineError, f"answer to request {request_id}", deadline_s=deadline_s):
                schemas = [tool.schema for tool in self._tools]
                chat = await self._policy.service.chat(self.messages, schemas, params, request_id)
        self.messages.append(chat.message)
        self._prompt_tokens = chat.prompt_tokens + chat.answer_tokens
        turn = append_textual_turn(self._turns, chat.stop_reason.value, options.role)
        self._turns.take(
            turn, prompt_tokens=chat.prompt_tokens, answer_tokens=chat.answer_tokens, trained=options.trained
        )
        return Answer(
            message=chat.message,
            raw_text=chat.message.text,
            problems=chat.problems,
            stop_reason=chat.stop_reason,
            prompt_tokens=chat.prompt_tokens,
            answer_tokens=chat.answer_tokens,
            turn=turn.index,
        )
