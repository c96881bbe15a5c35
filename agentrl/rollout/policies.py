"""Policies that answer in episodes: the contract, an inference engine that samples tokens into the ledger, and a text
service, which has no tokens and can only be evaluated. Scripted ones are in `agentrl.rollout.scripted_policies`.
"""

from __future__ import annotations

import asyncio
import bisect
import copy
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentrl.agent_loop import (
    PLAIN_TURN,
    AgentLoop,
    Answer,
    Conversation,
    EpisodeEnd,
    TokenLogprob,
    TurnOptions,
    UnsupportedOption,
)
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
from agentrl.message import Content, Message, plainly_written
from agentrl.render.content_guard import unbroken
from agentrl.render.conversation import LedgerConversation
from agentrl.render.progress import REPLACEMENT
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

    @abstractmethod
    def split(self, text: str, max_tokens: int) -> list[str]:
        """`text` in parts of at most so many tokens."""

    def written(self, message: Message) -> str:
        """Return an answer as the policy's model writes it; as JSON where that is not known."""
        return plainly_written(message)

    def of_role(self, role: str) -> EpisodePolicy:
        """Return the policy of a role; the same for all roles where they have no adapters of their own."""
        return self

    def of_environment_role(self, role: str) -> EpisodePolicy:
        """Return the policy that plays a role of the environment's, such as its user, where the config names none."""
        return self.of_role(role)

    def count(self, messages: Sequence[Message], schemas: Sequence[ToolSchema]) -> int:
        """Return how many tokens a conversation would begin with; a `UsageError` where the policy has no tokens."""
        raise UsageError(f"{type(self).__name__} cannot count tokens", expected="a policy that samples tokens")

    async def end(self, episode: EpisodeView) -> None:
        """An episode is over: release what was kept for it."""
        return

    async def close(self) -> None:
        """Release what the policy of a role holds for the whole run."""
        return


MUCH_TEXT = 1 << 17
"""Characters from which on a prompt is tokenized in a thread."""
NORMALIZED = 4
"""More characters than this become one when a tokenizer normalizes them in no language."""
MAX_RESUBMISSIONS = 8
"""Maximum number of requests for an answer that the engine aborts by itself."""


def written_by(renderer: Renderer, message: Message) -> str:
    """Return an answer as the model of `renderer` writes it; as JSON where its template has no way to."""
    try:
        return unbroken(renderer.answer_text(message)).strip()
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
        engine: Samples the answers.
        renderer: Of the engine's model.
        sampling: Settings of every turn.
        trains: What is sampled is trained: then nothing but the policy itself decides an answer.
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
        trains: bool = True,
        adapters: RoleAdapters | None = None,
    ) -> None:
        self.engine = engine
        self.trains = trains
        self.renderer = renderer
        self.sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids | renderer.stop_token_ids)
        self.adapters = adapters

    def with_sampling(self, sampling: SamplingParams, *, trains: bool) -> EngineEpisodePolicy:
        """Return the same policy with other settings."""
        return EngineEpisodePolicy(self.engine, self.renderer, sampling, trains=trains, adapters=self.adapters)

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

    def split(self, text: str, max_tokens: int) -> list[str]:
        """Split by the model's own tokens."""
        return self.renderer.split(text, max_tokens)

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


def _params_of_turn(
    sampling: SamplingParams, options: TurnOptions, *, room: int, seed: int, structure: str | None = None
) -> SamplingParams:
    """Return the run's sampling parameters with what a turn says, within the tokens that are left."""
    return replace(
        sampling,
        max_tokens=min(room, options.max_tokens or room),
        seed=seed if options.seed is None else options.seed,
        structure=structure,
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
        structure = self._structure(options)
        seed = self._turns.begin(is_counted=not options.for_environment)
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
            routed_experts_from=self.ledger.sequence.routed
            if self._policy.engine.capabilities.routed_experts
            else None,
        )
        if request.images and not self._policy.engine.capabilities.images:
            raise UsageError("the engine does not take images", hint="set engine=local, or give text observations")
        try:
            generation = self._cut(await self._sample(request), params.stop)
            check_logprobs(generation, request.request_id)
        except AgentRLError as error:
            if not options.for_environment:
                self._turns.budget.give_back_turn()
            self.ledger.withdraw()
            if structure is not None and isinstance(error, UsageError):
                raise UnsupportedOption("the engine does not take this form", option="form", got=str(error)) from error
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
            logprobs=self._logprobs(generation, answer.text) if options.logprobs else (),
        )

    async def _prepare(self, prefill: str) -> list[int]:
        """Write the prompt; where there is much to tokenize, a thread does that, so that other episodes go on.

        Raises:
            EpisodeEnd: it is too long, whatever its tokens are.
        """
        characters = self.ledger.pending_characters
        if characters >= MUCH_TEXT:
            room = min(self._turns.limits.max_tokens, self._policy.engine.capabilities.max_context)
            if characters > room * self._policy.renderer.encoder.longest_token * NORMALIZED:
                raise EpisodeEnd(Outcome.TRUNCATED_TOKENS)
            await asyncio.to_thread(self.ledger.render_ahead)
        return self.ledger.prepare(prefill)

    def _structure(self, options: TurnOptions) -> str | None:
        """Return what the engine holds the answer to, once all options are known to be possible.

        Raises:
            UnsupportedOption: it cannot, or the answer is trained: its log-probabilities are those of the tokens that
                the form allows, which the trainer cannot compute.
        """
        if options.seed is not None and not self._policy.engine.capabilities.seeded:
            raise UnsupportedOption("the engine's samples do not repeat themselves with a seed", option="seed")
        if options.form is None:
            return None
        if self._policy.trains and options.trained:
            raise UnsupportedOption(
                "an answer that is trained cannot be held to a form",
                option="form",
                expected="an answer that the policy is free to give",
                hint="in training, set agent.options.forms=free",
            )
        if not self._policy.engine.capabilities.structures:
            name = type(self._policy.engine).__name__
            raise UnsupportedOption(
                "the engine cannot hold answers to a form", option="form", got=name, expected="vllm or sglang"
            )
        return self._policy.renderer.structure(options.form, self.ledger.tools)

    def _logprobs(self, generation: Generation, content: str) -> tuple[TokenLogprob, ...]:
        """Return the tokens of an answer's content."""
        return content_logprobs(
            generation.token_ids, generation.logprobs, content, self._policy.renderer.encoder.decode
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
            done = part if done is None or request.params.structure is not None else done.followed_by(part)
            remaining_s = self._turns.budget.remaining_s
            time_is_over = remaining_s is not None and remaining_s <= 0
            if part.stop_reason is not StopReason.ABORT or time_is_over:
                return done
            if request.params.structure is not None:
                continue  # it has one beginning
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


ROUNDING = 1e-3
"""Log-probabilities above 0 by at most this are rounded ones."""


def check_logprobs(generation: Generation, request_id: str) -> None:
    """Refuse log-probabilities that no token can have been sampled with.

    Raises:
        EngineError: one is not a number, infinite, or above 0.
    """
    for token, logprob in zip(generation.token_ids, generation.logprobs, strict=False):
        if not -math.inf < logprob <= ROUNDING:
            raise EngineError(
                f"the engine's answer to request {request_id} cannot be trained on",
                got=f"log-probability {logprob} of token {token}",
                expected="a number of 0 at most",
            )


RECENT = 8
"""Tokens that are decoded with a token to find its own text: some tokenizers begin a text in another way."""


def content_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], content: str, decode: Callable[[Sequence[int]], str]
) -> tuple[TokenLogprob, ...]:
    """Return the sampled tokens that an answer's content consists of, without thinking, calls and stop tokens.

    Args:
        ids: The whole answer.
        logprobs: Of its tokens.
        content: A piece of its text; the last one counts, if there are several.
        decode: Gives the text of tokens.
    """
    pieces = []
    for end in range(1, len(ids) + 1):
        recent = ids[max(0, end - RECENT) : end]
        before, after = (decode(part).rstrip(REPLACEMENT) for part in (recent[:-1], recent))
        pieces.append(after[len(before) :])
    start = "".join(pieces).rfind(content) if content else -1
    if start < 0:
        return ()
    ends = list(itertools.accumulate(map(len, pieces)))
    last = bisect.bisect_left(ends, start + len(content))
    rows = zip(ends[: last + 1], pieces, logprobs, strict=False)
    return tuple(TokenLogprob(text=piece, logprob=logprob) for end, piece, logprob in rows if end + (not piece) > start)


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


def split_characters(text: str, max_tokens: int) -> list[str]:
    """`text` in parts of about so many tokens, after a blank or a line's end where there is one."""
    found, most = [], max_tokens * CHARACTERS_PER_TOKEN
    while len(text) > most:
        end = 1 + max(text.rfind(" ", 0, most), text.rfind("\n", 0, most)) or most
        found.append(text[:end])
        text = text[end:]
    return [*found, text]


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

    def split(self, text: str, max_tokens: int) -> list[str]:
        """Split by an estimate of the number of tokens."""
        return split_characters(text, max_tokens)


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
        if options.form is not None:
            raise UnsupportedOption("a text service is not asked for a form", option="form")
        if options.logprobs:
            raise UnsupportedOption("a text service gives no log-probabilities", option="logprobs")
        if options.seed is not None:
            raise UnsupportedOption("a text service is not asked for a seed", option="seed")
        seed = self._turns.begin(is_counted=not options.for_environment)
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
        turn.counted_tokens = chat.answer_tokens or None
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
