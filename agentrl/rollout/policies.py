"""Policies that answer in episodes: the contract, the policy of an inference engine, and the policy of a chat service.

The engine's policy samples tokens into the ledger. A chat service gives no tokens and can only be evaluated. Scripted
policies are in `agentrl.rollout.scripted_policies`.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from agentrl.agent_loop import (
    PLAIN_TURN,
    AgentLoop,
    Answer,
    Conversation,
    EpisodeEnd,
    FormMissed,
    TokenLogprob,
    TurnOptions,
    UnsupportedOption,
)
from agentrl.engine import (
    AdapterVersions,
    ChatAnswer,
    ChatPolicy,
    GenerateRequest,
    Generation,
    PolicyEngine,
    SamplingParams,
    StopReason,
)
from agentrl.errors import AgentRLError, EngineError, Outcome, TemplateError, UsageError
from agentrl.errors.deadlines import async_boundary
from agentrl.errors.foreign import run_in_own_thread
from agentrl.message import Content, Message, plainly_written
from agentrl.render.answer_tokens import content_logprobs, find_stop
from agentrl.render.chat_template import CUT_MARK, ToolSchema
from agentrl.render.content_guard import unbroken
from agentrl.render.conversation import LedgerConversation
from agentrl.render.renderer import Renderer
from agentrl.render.structured_output import ATTEMPTS, StructureCheck, make_structure_check
from agentrl.render.tool_parsers import ParsedCalls
from agentrl.render.tool_parsers.untagged import read_untagged
from agentrl.rollout.env_pool import EnvHandle
from agentrl.rollout.turns import TurnLog, derive_seed
from agentrl.rollout.waits import WaitKind
from agentrl.tool import Tool
from agentrl.trajectory import REPAIRED_CALLS, SOLE_ROLE, TokenSequence, Turn

_log = logging.getLogger(__name__)
THREAD_ABOVE_CHARACTERS = 1 << 17
"""Length in characters from which a prompt is tokenized in a thread."""
MAX_NORMALIZATION = 4
"""Maximum number of characters that a tokenizer's normalization joins into one, in any language."""
MAX_RESUBMISSIONS = 8
"""Maximum number of requests for one answer if the engine aborts them on its own."""
CHARACTERS_PER_TOKEN = 4
"""Usual estimate for English; the tokens of a chat service cannot be counted here."""


class EpisodeView(Protocol):
    """Part of an episode that a policy may use besides its messages."""

    turns: TurnLog
    loop: AgentLoop
    environment: EnvHandle
    observation: Content
    """Latest observation, not cut."""

    @property
    def has_own_tools(self) -> bool:
        """True if the environment has tools of its own."""


class EpisodePolicy(ABC):
    """Policy of episodes; opens their conversations."""

    @abstractmethod
    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """Start a conversation of one episode; `tools` are offered to the policy."""

    @property
    def reads_images(self) -> bool:
        """True if tool results may contain images; otherwise the policy reads a notice in their place."""
        return False

    @abstractmethod
    def cut(self, text: str, max_tokens: int) -> str:
        """Truncate `text` to at most `max_tokens` tokens and append a visible mark."""

    @abstractmethod
    def split(self, text: str, max_tokens: int) -> list[str]:
        """Split `text` into parts of at most `max_tokens` tokens."""

    def write_answer(self, message: Message) -> str:
        """Return an answer as the policy's model writes it, or as JSON if the model's format is not known."""
        return plainly_written(message)

    def for_role(self, name: str, *, of_environment: bool = False) -> EpisodePolicy:
        """Return the policy of one of several agents or of an environment's role; by default this policy."""
        return self

    def count(self, messages: Sequence[Message], schemas: Sequence[ToolSchema]) -> int:
        """Return the number of tokens of a conversation's first prompt; a `UsageError` if the policy has no tokens."""
        raise UsageError(f"{type(self).__name__} cannot count tokens", expected="a policy that samples tokens")

    async def end(self, episode: EpisodeView) -> None:
        """Release what the policy keeps for an episode, which has ended."""
        return

    async def close(self) -> None:
        """Release what the policy keeps for the whole run."""
        return


def write_answer(renderer: Renderer, message: Message) -> str:
    """Return an answer as the model of `renderer` writes it, or as JSON if its template cannot render it."""
    try:
        return unbroken(renderer.answer_text(message)).strip()
    except TemplateError:
        return plainly_written(message)


class EngineEpisodePolicy(EpisodePolicy):
    """Policy whose answers an inference engine samples.

    The `max_tokens`, `seed` and stop tokens of `sampling` are set per turn.

    Args:
        engine: Samples the answers.
        renderer: Renderer of the engine's model.
        sampling: Sampling parameters of every turn, or a function that returns those of a turn that starts now.
        trains: True if sampled tokens are trained, so that no required format may constrain them.
    """

    adapter: str | None = None
    """Name of the engine's adapter that answers; ``None`` for the model without adapters."""
    adapter_versions: AdapterVersions | None = None
    """Versions of the adapter that answers."""

    def __init__(
        self,
        engine: PolicyEngine,
        renderer: Renderer,
        sampling: SamplingParams | Callable[[], SamplingParams],
        *,
        trains: bool = True,
    ) -> None:
        self.engine = engine
        self.trains = trains
        self.renderer = renderer
        self._sampling = sampling
        self._with_stops: tuple[SamplingParams, SamplingParams] | None = None
        """The latest sampling parameters, as they were given and with the stop tokens of the model."""

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of a turn that starts now, with the stop tokens of the model."""
        own = self._sampling if isinstance(self._sampling, SamplingParams) else self._sampling()
        if self._with_stops is None or self._with_stops[0] is not own:
            self._with_stops = own, replace(own, stop_token_ids=own.stop_token_ids | self.renderer.stop_token_ids)
        return self._with_stops[1]

    def with_sampling(self, sampling: SamplingParams, *, trains: bool) -> EngineEpisodePolicy:
        """Return the same policy with other sampling parameters."""
        other = copy.copy(self)
        other.trains = trains
        other._sampling = sampling
        return other

    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """Return a conversation on the token ledger."""
        schemas: list[ToolSchema] = [tool.schema for tool in tools]
        ledger = LedgerConversation(
            self.renderer,
            episode.turns.trajectory,
            messages,
            tools=schemas,
            repairs_calls=episode.loop.reads_repaired_calls,
        )
        return EngineConversation(self, ledger, episode.turns)

    @property
    def reads_images(self) -> bool:
        """True if the model and the engine accept images."""
        return self.renderer.images is not None and self.engine.capabilities.images

    def cut(self, text: str, max_tokens: int) -> str:
        """Cut by the model's own tokens."""
        return self.renderer.cut(text, max_tokens)

    def split(self, text: str, max_tokens: int) -> list[str]:
        """Split by the model's own tokens."""
        return self.renderer.split(text, max_tokens)

    def write_answer(self, message: Message) -> str:
        """Return an answer as the chat template writes it."""
        return write_answer(self.renderer, message)

    def count(self, messages: Sequence[Message], schemas: Sequence[ToolSchema]) -> int:
        """Count the tokens of the rendered prompt."""
        return len(self.renderer.prompt(messages, schemas).ids)

    async def end(self, episode: EpisodeView) -> None:
        """End the episode's sessions in the engine."""
        trajectory = episode.turns.trajectory
        for index in range(len(trajectory.sequences)):
            await self.engine.end_session(session_id(trajectory.id, index))


def _params_of_turn(
    sampling: SamplingParams, options: TurnOptions, *, room: int, seed: int, structure: str | None = None
) -> SamplingParams:
    """Return the run's sampling parameters with a turn's options, for at most `room` tokens."""
    return replace(
        sampling,
        first_token=sampling.first_token if structure is None and options.temperature is None else None,
        max_tokens=min(room, options.max_tokens or room),
        seed=seed if options.seed is None else options.seed,
        structure=structure,
        stop=tuple(dict.fromkeys((*sampling.stop, *options.stop))),
        temperature=sampling.temperature if options.temperature is None else options.temperature,
        top_p=sampling.top_p if options.top_p is None else options.top_p,
    )


class EngineConversation(Conversation):
    """Conversation on one sequence of the ledger, answered by an engine."""

    def __init__(self, policy: EngineEpisodePolicy, ledger: LedgerConversation, turns: TurnLog) -> None:
        self.ledger = ledger
        self._policy = policy
        self._turns = turns

    def add(self, *messages: Message) -> None:
        """Append messages; the next turn tokenizes them."""
        self.ledger.add(messages)

    def fork(self, messages: Sequence[Message]) -> Conversation:
        """Return a conversation with a rewritten history."""
        return EngineConversation(self._policy, self.ledger.fork(messages), self._turns)

    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        """Sample one turn."""
        structure = self._structure(options)
        seed = self._turns.begin_turn(is_counted=not options.for_environment)
        prompt_ids = await self._prepare(prefill)
        room = self._turns.budget.answer_tokens(len(prompt_ids), self._policy.engine.capabilities.max_context)
        params = _params_of_turn(self._policy.sampling, options, room=room, seed=seed, structure=structure)
        request = GenerateRequest(
            prompt_ids=prompt_ids,
            params=params,
            session_id=self._session_id(),
            request_id=f"{self._turns.trajectory.id}/turn-{self._turns.budget.requests - 1}",
            adapter=self._policy.adapter,
            images=self.ledger.sequence.images,
            on_tokens=self.ledger.progress(params.stop, options.on_progress) if options.on_progress else None,
            routed_experts_from=len(self.ledger.sequence.routes)
            if self._policy.engine.capabilities.routed_experts
            else None,
        )
        try:
            self._check_images(request)
            if options.form is None or structure is not None:
                generation = self._cut(await self._sample(request), params.stop)
            else:
                generation = await self._sample_structured(request, make_structure_check(options.form))
        except AgentRLError as error:
            if not options.for_environment:
                self._turns.budget.give_back_turn()
            self.ledger.withdraw()
            if structure is not None and isinstance(error, UsageError) and not isinstance(error, UnsupportedOption):
                raise UnsupportedOption("the engine rejects this format", option="form", got=str(error)) from error
            raise
        if self._turns.is_over:
            raise EpisodeEnd(Outcome.CANCELLED)
        self.ledger.verify(request.prompt_ids, request.images)
        answer = self.ledger.accept(generation, role=options.role, trained=options.trained)
        turn = self.ledger.sequence.turns[-1]
        turn.adapter = self._policy.adapter
        self._turns.record(
            turn, prompt_tokens=len(prompt_ids), answer_tokens=len(generation.token_ids), trained=options.trained
        )
        if self.ledger.tools and options.trained:
            self._turns.add_metric(REPAIRED_CALLS, turn.repaired_calls)
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
            logprobs=self._logprobs(generation, answer.text) if options.logprobs else (),
        )

    async def _prepare(self, prefill: str) -> array[int]:
        """Render the prompt; a thread tokenizes long texts, so that other episodes continue.

        Raises:
            EpisodeEnd: the text has too many characters to fit in the context under any tokenization.
        """
        characters = self.ledger.pending_characters
        if characters >= THREAD_ABOVE_CHARACTERS:
            max_context = self._policy.engine.capabilities.max_context
            room = min(self._turns.limits.max_tokens, max_context)
            if characters > room * self._policy.renderer.encoder.longest_token * MAX_NORMALIZATION:
                raise self._turns.budget.prompt_too_long(max_context)
            await run_in_own_thread(self.ledger.render_ahead)
        return self.ledger.prepare(prefill)

    def _check_images(self, request: GenerateRequest) -> None:
        if request.images and not self._policy.engine.capabilities.images:
            hint = "set engine=local, or give text observations"
            raise UnsupportedOption("the engine does not support images", option="images", hint=hint)

    def _structure(self, options: TurnOptions) -> str | None:
        """Check the turn's options, and return the structure that the engine enforces.

        ``None`` despite a required format means that the engine cannot enforce it; `make_structure_check` then checks
        answers.

        Raises:
            UnsupportedOption: the format cannot be checked either, or the answer is trained. The log-probabilities of a
                constrained answer are normalized over the allowed tokens, and the trainer cannot compute them.
        """
        if options.seed is not None and not self._policy.engine.capabilities.seeded:
            _warn_of_seed(type(self._policy.engine).__name__)
        if options.form is None:
            return None
        if self._policy.trains and options.trained:
            raise UnsupportedOption(
                "a trained answer cannot have a required format",
                option="form",
                expected="an unconstrained answer",
                hint="in training, set agent.options.forms=free",
            )
        is_either = options.form.or_calls or options.form.or_text
        if self._policy.engine.capabilities.structures and not is_either:
            try:
                return self._policy.renderer.structure(options.form, self.ledger.tools)
            except UnsupportedOption as error:
                _log.debug("%s", error)
        make_structure_check(options.form)
        return None

    def _logprobs(self, generation: Generation, content: str) -> tuple[TokenLogprob, ...]:
        """Return the tokens of an answer's content with their log-probabilities."""
        return content_logprobs(
            generation.token_ids, generation.logprobs, content, self._policy.renderer.encoder.decode
        )

    def _session_id(self) -> str:
        trajectory = self._turns.trajectory
        index = next(i for i, sequence in enumerate(trajectory.sequences) if sequence is self.ledger.sequence)
        return session_id(trajectory.id, index)

    def _cut(self, generation: Generation, stop: Sequence[str]) -> Generation:
        """Drop the tokens after the first stop string."""
        end = find_stop(generation.token_ids, stop, self._policy.renderer.encoder.decode) if stop else None
        return generation if end is None else generation.cut(end)

    async def _sample(self, request: GenerateRequest) -> Generation:
        """Sample until the answer is complete; if the episode's time runs out first, the stop reason is ABORT."""
        done: Generation | None = None
        for attempt in range(MAX_RESUBMISSIONS):
            part = await self._ask(
                replace(request, request_id=f"{request.request_id}/{attempt}") if attempt else request
            )
            done = part if done is None or request.params.structure is not None else done.followed_by(part)
            remaining_s = self._turns.budget.remaining_s
            time_is_over = remaining_s is not None and remaining_s <= 0
            if part.stop_reason is not StopReason.ABORT or time_is_over:
                return done
            if request.params.structure is not None:
                continue  # a structured answer cannot be continued, only sampled again
            request = _continue_request(request, part)
            if request.params.max_tokens == 0:
                return replace(done, stop_reason=StopReason.LENGTH)
        raise EngineError(
            f"the engine aborted request {request.request_id} repeatedly",
            got=f"{MAX_RESUBMISSIONS} partial answers",
            expected="a complete answer",
        )

    async def _sample_structured(self, request: GenerateRequest, check: StructureCheck) -> Generation:
        """Sample answers until one has the required format.

        Raises:
            FormMissed: no answer has it.
        """
        attempts = ATTEMPTS if request.params.temperature > 0 else 1
        problem: str | None = None
        for attempt in range(attempts):
            seed = request.params.seed
            params = replace(request.params, seed=None if seed is None else derive_seed(seed, attempt))
            name = f"{request.request_id}/form-{attempt}" if attempt else request.request_id
            part = await self._sample(replace(request, request_id=name, params=params, on_tokens=None))
            generation = self._cut(part, params.stop)
            if generation.stop_reason is StopReason.ABORT:
                return generation
            problem = check(
                self._policy.renderer.read(
                    generation.token_ids, stop_reason=generation.stop_reason, tools=self.ledger.tools
                )
            )
            if problem is None:
                return generation
        raise FormMissed(
            "no answer of the model has the requested format",
            option="form",
            got=f"{problem} (the last of {attempts})",
            hint="describe the format in the prompt, raise max_tokens, or set engine=vllm or engine=sglang",
        )

    async def _ask(self, request: GenerateRequest) -> Generation:
        waits, limits = self._turns.waits, self._turns.limits
        what, engine = f"answer to request {request.request_id}", self._policy.engine
        with waits.on(WaitKind.ENGINE, self._turns.trajectory.id, "an answer", limits.answer_timeout_s):
            async with async_boundary(EngineError, what, deadline_s=limits.answer_timeout_s):
                remaining_s = self._turns.budget.remaining_s
                if remaining_s is None:
                    answer = await engine.generate(request)
                else:
                    answer = await self._ask_within(request, remaining_s)
        versions, adapter = self._policy.adapter_versions, self._policy.adapter
        return answer if versions is None or adapter is None else versions.with_versions(answer, adapter)

    async def _ask_within(self, request: GenerateRequest, seconds: float) -> Generation:
        """Sample for at most `seconds`; then abort the request and return the tokens sampled so far."""
        engine = self._policy.engine
        loop = asyncio.get_running_loop()
        aborts: list[asyncio.Task[bool]] = []
        timer = loop.call_later(seconds, lambda: aborts.append(loop.create_task(engine.abort(request.request_id))))
        try:
            return await engine.generate(request)
        finally:
            timer.cancel()
            await asyncio.gather(*aborts)


@functools.cache
def _warn_of_seed(engine: str) -> None:
    """Warn once that the engine ignores seeds."""
    _log.warning("a client's seed is ignored: %s cannot reproduce samples", engine)


def session_id(trajectory_id: str, sequence: int) -> str:
    """Return the id of the engine's session for one sequence of an episode."""
    return f"{trajectory_id}/{sequence}"


def _continue_request(request: GenerateRequest, part: Generation) -> GenerateRequest:
    rest = request.params.max_tokens - len(part.token_ids)
    known = 0 if part.routed_experts is None else len(part.routed_experts)
    return replace(
        request,
        prompt_ids=[*request.prompt_ids, *part.token_ids],
        routed_experts_from=None if request.routed_experts_from is None else request.routed_experts_from + known,
        params=replace(
            request.params, max_tokens=rest, first_token=None if part.token_ids else request.params.first_token
        ),
    )


def cut_characters(text: str, max_tokens: int) -> str:
    """Truncate `text` to about `max_tokens` tokens and append a visible mark."""
    most = max_tokens * CHARACTERS_PER_TOKEN
    return text if len(text) <= most else text[:most] + CUT_MARK.format(len(text) - most)


def split_characters(text: str, max_tokens: int) -> list[str]:
    """Split `text` into parts of about `max_tokens` tokens, after a space or a newline if possible."""
    found, most = [], max_tokens * CHARACTERS_PER_TOKEN
    while len(text) > most:
        end = 1 + max(text.rfind(" ", 0, most), text.rfind("\n", 0, most)) or most
        found.append(text[:end])
        text = text[end:]
    return [*found, text]


def append_textual_turn(turns: TurnLog, stop_reason: str, role: str = SOLE_ROLE) -> Turn:
    """Record a turn without tokens, which can receive rewards, in the role's sequence without tokens."""
    trajectory = turns.trajectory
    textual = (s for s in trajectory.sequences if not len(s) and all(turn.role == role for turn in s.turns))
    sequence = next(textual, None)
    if sequence is None:
        trajectory.sequences.append(sequence := TokenSequence())
    turn = Turn(index=len(trajectory.turns), start=0, end=0, role=role, stop_reason=stop_reason)
    sequence.turns.append(turn)
    return turn


class ChatEpisodePolicy(EpisodePolicy):
    """Policy whose answers come from a chat service; `max_tokens` and `seed` of `sampling` are set per turn."""

    def __init__(self, service: ChatPolicy, sampling: SamplingParams) -> None:
        self.service = service
        self.sampling = sampling

    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """Return a conversation in text."""
        return ChatConversation(self, messages, tools, episode.turns, repairs_calls=episode.loop.reads_repaired_calls)

    def cut(self, text: str, max_tokens: int) -> str:
        """Cut by an estimate of the number of tokens."""
        return cut_characters(text, max_tokens)

    def split(self, text: str, max_tokens: int) -> list[str]:
        """Split by an estimate of the number of tokens."""
        return split_characters(text, max_tokens)


class ChatConversation(Conversation):
    """Conversation that is sent to the service as a whole in each turn."""

    def __init__(
        self,
        policy: ChatEpisodePolicy,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        turns: TurnLog,
        *,
        repairs_calls: bool,
    ) -> None:
        self._repairs_calls = repairs_calls
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
        return ChatConversation(self._policy, messages, self._tools, self._turns, repairs_calls=self._repairs_calls)

    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        """Request one answer."""
        if prefill:
            raise UsageError("a chat service cannot continue a prefill", got=f"prefill {prefill!r}", expected="none")
        if options.form is not None:
            hint = "describe the format in the prompt, or serve the model with engine=vllm or engine=sglang"
            raise UnsupportedOption("a chat service cannot enforce a format", option="form", hint=hint)
        if options.logprobs:
            raise UnsupportedOption("a chat service returns no log-probabilities", option="logprobs")
        seed = self._turns.begin_turn(is_counted=not options.for_environment)
        room = self._turns.budget.answer_tokens(self._prompt_tokens, self._policy.service.max_context)
        params = _params_of_turn(self._policy.sampling, options, room=room, seed=seed)
        trajectory_id = self._turns.trajectory.id
        request_id = f"{trajectory_id}/turn-{self._turns.budget.requests - 1}"
        deadline_s, service = self._turns.limits.answer_timeout_s, self._policy.service
        remedy = f"{service.section}.timeout_s"
        with self._turns.waits.on(WaitKind.ENGINE, trajectory_id, "an answer", deadline_s, remedy):
            async with async_boundary(EngineError, f"answer to request {request_id}", deadline_s=deadline_s):
                schemas = [tool.schema for tool in self._tools]
                chat = await service.chat(self.messages, schemas, params, request_id)
        read = self._read_calls(chat) if self._repairs_calls else None
        message = chat.message if read is None else replace(chat.message, content=read.content, tool_calls=read.calls)
        self.messages.append(message)
        self._prompt_tokens = chat.prompt_tokens + chat.answer_tokens
        turn = append_textual_turn(self._turns, chat.stop_reason.value, options.role)
        turn.repaired_calls = 0 if read is None else len(read.repairs)
        if self._tools and options.trained:
            self._turns.add_metric(REPAIRED_CALLS, turn.repaired_calls)
        turn.counted_tokens = chat.answer_tokens or None
        self._turns.record(
            turn, prompt_tokens=chat.prompt_tokens, answer_tokens=chat.answer_tokens, trained=options.trained
        )
        return Answer(
            message=message,
            raw_text=chat.message.text,
            problems=chat.problems if read is None else read.problems,
            repairs=() if read is None else read.repairs,
            stop_reason=chat.stop_reason,
            prompt_tokens=chat.prompt_tokens,
            answer_tokens=chat.answer_tokens,
            turn=turn.index,
        )

    def _read_calls(self, chat: ChatAnswer) -> ParsedCalls | None:
        """Return the tool calls that the service left in the text; ``None`` without any."""
        if chat.message.tool_calls or chat.problems or not self._tools:
            return None
        offered, is_whole = {tool.name: tool.schema for tool in self._tools}, chat.stop_reason is StopReason.STOP
        return read_untagged(chat.message.text, offered, "Call the tool as the prompt says.", is_whole=is_whole)
