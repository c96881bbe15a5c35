"""Engine that plays a script with the semantics of a real engine, without a model: a few microseconds per token.

A script decides the answers and simulates delays, failures, hangs and drifting log-probabilities. Without delays, a
request takes one turn of the event loop per `TOKENS_PER_TICK` tokens, so that aborts, pauses and updates arrive while
requests run.
"""

from __future__ import annotations

import asyncio
import enum
import math
import random
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agentrl.config.engines import ScriptedEngineConfig
from agentrl.engine import Capabilities, EngineMetrics, GenerateRequest, Generation, PolicyEngine, StopReason
from agentrl.engine.answer_check import check_answer
from agentrl.errors import EngineError, UsageError
from agentrl.errors.deadlines import async_boundary
from agentrl.registry import load
from agentrl.serving.request import check_request, common_prefix, seed_of
from agentrl.trajectory import id_array

Script: TypeAlias = Callable[[GenerateRequest], "Sequence[int] | ScriptedAnswer"]
TOKENS_PER_TICK = 16


class Failure(enum.StrEnum):
    """Failure of a scripted answer after its last token."""

    NONE = "none"
    RAISE = "raise"
    """Raises `EngineError`, as if a server had died."""
    HANG = "hang"
    """Does not answer before the deadline, an abort, or `close`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedAnswer:
    """One answer of a script, with the engine's behavior while it is sampled."""

    token_ids: Sequence[int]
    """Tokens, truncated at the request's first stop token, at `max_tokens` and at the end of the context."""
    logprobs: Sequence[float] | None = None
    """Log-probability of each token; those of a uniform distribution by default."""
    drift: float = 0.0
    """Number added to every log-probability, to simulate an engine that disagrees with the trainer."""
    stop_reason: StopReason | None = None
    """Stop reason reported at the end of the tokens instead of the true one. If set, no stop token is appended."""
    version: int | None = None
    """Version stamped on every token instead of the true one, to simulate an engine that missed an update."""
    first_delay_s: float = 0.0
    """Seconds before the first token, in addition to the engine's delay per token."""
    failure: Failure = Failure.NONE
    """Failure after the last token."""


def random_script(vocab_size: int, *, shortest: int = 4, longest: int = 24) -> Script:
    """Return a script of uniformly random tokens that end with a stop token.

    The request's seed determines the tokens; at temperature 0 they are always the same. Without stop tokens, the number
    of tokens is `max_tokens`; `shortest` and `longest` are ignored.
    """

    def play(request: GenerateRequest) -> Sequence[int]:
        generator = random.Random(request.params.seed if request.params.temperature else 0)
        stops = request.params.stop_token_ids
        length = generator.randint(shortest, longest) - 1 if stops else request.params.max_tokens
        drawn = generator.choices(range(vocab_size), k=length)
        return [*(token for token in drawn if token not in stops), *sorted(stops)[:1]]

    return play


def cut_answer(answer: ScriptedAnswer, stops: frozenset[int], room: int) -> tuple[list[int], StopReason]:
    """Return the part of a scripted answer that an engine would have sampled, with its stop reason.

    Args:
        answer: Answer of the script. If it contains no stop token, the smallest of `stops` is appended.
        stops: Stop tokens of the request.
        room: Maximum number of tokens that `max_tokens` and the context allow.
    """
    token_ids = list(answer.token_ids)
    if answer.stop_reason is None and stops and not stops.intersection(token_ids):
        token_ids.append(min(stops))
    end = next((i + 1 for i, token in enumerate(token_ids) if token in stops), len(token_ids))
    token_ids = token_ids[: min(end, room)]
    if token_ids and token_ids[-1] in stops:
        return token_ids, StopReason.STOP
    reached_end = len(token_ids) == len(answer.token_ids) and len(token_ids) < room
    return token_ids, answer.stop_reason if reached_end and answer.stop_reason else StopReason.LENGTH


@dataclass(slots=True, kw_only=True)
class _Playback:
    request: GenerateRequest
    answer: ScriptedAnswer
    token_ids: list[int]
    stop_reason: StopReason
    cached_tokens: int
    submitted: float
    played: int = 0
    versions: list[int] = field(default_factory=list)
    aborted: bool = False
    waiting: bool = True
    queue_s: float = 0.0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine(PolicyEngine):
    """Engine that plays a script.

    `script` overrides the config's; without either, tokens are random. With `structures`, requests for structured
    answers are accepted, and the script must return matching answers.
    """

    def __init__(
        self,
        config: ScriptedEngineConfig | None = None,
        *,
        script: Script | None = None,
        vocab_size: int = 512,
        max_context: int = 16_384,
        seed: int = 0,
        version: int = 0,
        structures: bool = False,
    ) -> None:
        self.config = config or ScriptedEngineConfig()
        named: Script | None = load(self.config.script) if self.config.script else None
        self.script = script or named or random_script(vocab_size)
        self.capabilities = Capabilities(
            max_context=max_context, vocab_size=vocab_size, seeded=True, structures=structures
        )
        self._uniform = -math.log(vocab_size)
        self._seeds = random.Random(seed)
        self._version = version
        self._paused = False
        self._closed = False
        self._playbacks: dict[str, _Playback] = {}
        self._sessions: dict[str, array[int]] = {}
        """Token ids of each session, as a prefix cache would hold them."""
        self._totals = EngineMetrics()

    @property
    def version(self) -> int:
        """Version stamped on the next tokens."""
        return self._version

    async def start(self) -> None:
        """Do nothing."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Play the script's answer to the request; the caller sets the deadline."""
        check_request(request, self.capabilities, self._playbacks)
        self._check_open()
        request = seed_of(request, self._seeds)
        try:
            async with async_boundary(EngineError, f"request {request.request_id}", deadline_s=None):
                playback = self._prepare(request)
                self._playbacks[request.request_id] = playback
                answer = await self._play(playback)
                return check_answer(answer, request, self.capabilities, version=self._version, engine="the engine")
        finally:
            self._playbacks.pop(request.request_id, None)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the scripted engine is closed")

    def _prepare(self, request: GenerateRequest) -> _Playback:
        result = self.script(request)
        answer = result if isinstance(result, ScriptedAnswer) else ScriptedAnswer(token_ids=result)
        room = min(request.params.max_tokens, self.capabilities.max_context - len(request.prompt_ids))
        token_ids, reason = cut_answer(answer, request.params.stop_token_ids, room)
        if answer.logprobs is not None and len(answer.logprobs) < len(token_ids):
            raise UsageError(
                "a script returned too few log-probabilities", got=len(answer.logprobs), expected=len(token_ids)
            )
        known = self._sessions.get(request.session_id, array("i"))
        cached = min(common_prefix(known, id_array(request.prompt_ids)), len(request.prompt_ids) - 1)
        self._totals.prompt_tokens += len(request.prompt_ids)
        self._totals.cached_tokens += cached
        return _Playback(
            request=request,
            answer=answer,
            token_ids=token_ids,
            stop_reason=reason,
            cached_tokens=cached,
            submitted=time.perf_counter(),
        )

    async def _play(self, playback: _Playback) -> Generation:
        await self._wait(playback, playback.answer.first_delay_s)
        playback.queue_s = time.perf_counter() - playback.submitted
        per_tick = 1 if self.config.delay_s else TOKENS_PER_TICK
        while not playback.aborted and playback.played < len(playback.token_ids):
            self._advance(playback, per_tick)
            await self._wait(playback, self.config.delay_s)
        if not playback.aborted and playback.answer.failure is Failure.RAISE:
            raise EngineError(f"request {playback.request.request_id} failed", got="a failure set by the script")
        while not playback.aborted and playback.answer.failure is Failure.HANG:
            await self._sleep(playback, None)
        return self._finish(playback)

    def _advance(self, playback: _Playback, most: int) -> None:
        count = min(most, len(playback.token_ids) - playback.played)
        if playback.request.on_tokens is not None:
            playback.request.on_tokens(playback.token_ids[playback.played : playback.played + count])
        stamp = self._version if playback.answer.version is None else playback.answer.version
        playback.versions += [stamp] * count
        playback.played += count
        self._totals.sampled_tokens += count

    def _finish(self, playback: _Playback) -> Generation:
        token_ids = playback.token_ids[: playback.played]
        self._sessions[playback.request.session_id] = id_array(playback.request.prompt_ids) + array("i", token_ids)
        whole = playback.played == len(playback.token_ids) and playback.answer.failure is Failure.NONE
        given = playback.answer.logprobs
        logprobs = [self._uniform] * len(token_ids) if given is None else list(given[: len(token_ids)])
        return Generation(
            token_ids=token_ids,
            logprobs=[value + playback.answer.drift for value in logprobs],
            versions=playback.versions,
            stop_reason=playback.stop_reason if whole else StopReason.ABORT,
            cached_tokens=playback.cached_tokens,
            queue_s=playback.queue_s,
            decode_s=time.perf_counter() - playback.submitted - playback.queue_s,
        )

    async def _wait(self, playback: _Playback, delay_s: float) -> None:
        """Wait for the delay, or for one turn of the event loop without a delay; then until the engine is resumed."""
        if delay_s:
            await self._sleep(playback, delay_s)
        else:
            await asyncio.sleep(0)
        playback.waiting = True
        while self._paused and not playback.aborted:
            await self._sleep(playback, None)
        playback.waiting = False
        self._check_open()

    async def _sleep(self, playback: _Playback, seconds: float | None) -> None:
        self._check_open()
        playback.wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await playback.wake.wait()
        except TimeoutError:
            return
        self._check_open()

    def _wake_all(self) -> None:
        for playback in self._playbacks.values():
            playback.wake.set()

    async def abort(self, request_id: str) -> bool:
        """End a request at its next token; returns False if it is not running."""
        playback = self._playbacks.get(request_id)
        if playback is None:
            return False
        playback.aborted = True
        playback.wake.set()
        return True

    async def pause(self) -> None:
        """Hold all requests at their next token."""
        self._paused = True

    async def resume(self) -> None:
        """Resume all requests."""
        self._paused = False
        self._wake_all()

    async def update_weights(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Stamp the new version from the next token on, and clear the simulated caches."""
        if version <= self._version:
            raise EngineError("weight versions must increase", got=version, expected=f"more than {self._version}")
        self._version = version
        self._sessions.clear()

    async def end_session(self, session_id: str) -> None:
        """Clear a session's simulated cache."""
        self._sessions.pop(session_id, None)

    def metrics(self) -> EngineMetrics:
        """Return the counts since the start; `busy_s` is always 0."""
        waiting = sum(playback.waiting for playback in self._playbacks.values())
        return EngineMetrics(
            running=len(self._playbacks) - waiting,
            waiting=waiting,
            prompt_tokens=self._totals.prompt_tokens,
            cached_tokens=self._totals.cached_tokens,
            sampled_tokens=self._totals.sampled_tokens,
        )

    async def close(self) -> None:
        """Close the engine; running requests raise `EngineError`."""
        self._closed = True
        self._wake_all()
