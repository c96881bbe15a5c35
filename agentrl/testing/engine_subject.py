"""Subject of the engine check: the engine under test, and an engine with one inference server.

report = await check_engine(lambda: ServerEngine(VLLMServer(...)), sampling=ServerEngine.sampling)
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.engine import (
    EngineMetrics,
    GenerateRequest,
    Generation,
    InferenceServer,
    PolicyEngine,
    SamplingParams,
    StopReason,
)
from agentrl.errors import AgentRLError, UsageError
from agentrl.testing.report import RuleFailed, require

Reference: TypeAlias = Callable[[Sequence[int], float], Sequence[float]]
"""Function (ids, temperature) → log-probabilities of ``ids[1:]`` given their prefixes, on the current weights."""
NewWeights: TypeAlias = Callable[[], Mapping[str, Any] | None]
"""Function that makes new weights and returns the argument of `PolicyEngine.update_weights`."""
Sampling: TypeAlias = Callable[[Any], Awaitable[int]]
"""Function that returns how many of an engine's requests have their first token but not their last."""

CONDITION_S = 60.0
"""Maximum number of seconds to wait for a condition."""
QUICK_TURNS = 1000
"""Number of event loop iterations in which a condition is polled without a pause, for engines in this process."""
REST_S = 0.01
"""Seconds between later polls."""
LOOKS = 20
"""Number of polls of an engine that must not make progress."""
LONG = 1000
"""Maximum number of tokens of a request that must be observed in flight."""
MEETINGS = 8
"""Maximum number of attempts to observe a request in flight: a busy server's metrics may be late."""


@contextmanager
def refusal(kind: type[AgentRLError], what: str) -> Iterator[None]:
    """Fail the check unless the enclosed code raises `kind`."""
    try:
        yield
    except kind:
        return
    except Exception as error:
        raise RuleFailed(f"{what} raised {type(error).__name__} instead of {kind.__name__}: {error}") from error
    raise RuleFailed(f"{what} did not raise {kind.__name__}")


@dataclass(slots=True, kw_only=True)
class EngineProbe:
    """Engine under test; the fields are arguments of `check_engine`, except the engine, which `start` makes."""

    factory: Callable[[], PolicyEngine]
    engine: PolicyEngine = field(init=False)
    reference: Reference | None
    new_weights: NewWeights
    tolerance: float
    sampling: Sampling | None = None
    kill: Callable[[], object] | None = None
    names: Iterator[int] = field(default_factory=itertools.count)
    _submitted: list[asyncio.Task[Generation]] = field(default_factory=list)

    async def start(self) -> None:
        """Make an engine and start it."""
        self.engine = self.factory()
        await self.engine.start()

    async def count_sampled(self) -> int:
        """Return a number that increases when a request gets its first token."""
        if self.sampling is not None:
            return await self.sampling(self.engine)
        return self.engine.metrics().sampled_tokens

    def prompt(self, length: int, start: int = 1) -> list[int]:
        """Return a prompt whose ids are spread over the vocabulary."""
        return [(start + 7 * i) % self.engine.capabilities.vocab_size for i in range(length)]

    def request(self, prompt: Sequence[int], *, session: str | None = None, **params: Any) -> GenerateRequest:
        """Return a request with a unique id."""
        name = f"check-{next(self.names)}"
        settings = SamplingParams(**params)
        return GenerateRequest(prompt_ids=prompt, params=settings, session_id=session or name, request_id=name)

    async def generate(self, prompt: Sequence[int], *, session: str | None = None, **params: Any) -> Generation:
        """Sample one answer and check it."""
        request = self.request(prompt, session=session, **params)
        answer = await self.engine.generate(request)
        self.check_form(request, answer)
        return answer

    def check_form(self, request: GenerateRequest, answer: Generation) -> None:
        """Check the conditions that every answer must meet."""
        count, size = len(answer.token_ids), self.engine.capabilities.vocab_size
        require(all(0 <= token < size for token in answer.token_ids), f"ids out of the vocabulary: {answer.token_ids}")
        require(len(answer.versions) == count, f"{len(answer.versions)} versions for {count} tokens")
        if self.engine.capabilities.logprobs:
            require(len(answer.logprobs) == count, f"{len(answer.logprobs)} log-probabilities for {count} tokens")
            require(all(value <= 1e-6 for value in answer.logprobs), f"log-probabilities above 0: {answer.logprobs}")
        stops = request.params.stop_token_ids
        require(not stops.intersection(answer.token_ids[:-1]), "sampling continued after a stop token")
        if answer.stop_reason is StopReason.STOP:
            require(bool(answer.token_ids) and answer.token_ids[-1] in stops, "stopped without a stop token")
        require(count <= request.params.max_tokens, f"{count} tokens for max_tokens {request.params.max_tokens}")
        require(0 <= answer.cached_tokens < len(request.prompt_ids), f"{answer.cached_tokens} cached tokens")

    def check_logprobs(self, prompt: Sequence[int], answer: Generation, temperature: float, first: int = 0) -> float:
        """Compare log-probabilities from token `first` on with the reference, if any; return the largest difference."""
        if self.reference is None:
            return 0.0
        expected = self.reference([*prompt, *answer.token_ids], temperature or 1.0)[len(prompt) - 1 :]
        differences = [abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)][first:]
        worst = max(differences, default=0.0)
        require(worst <= self.tolerance, f"log-probabilities differ from the reference by {worst:.2e}")
        return worst

    def long_request(self, **params: Any) -> GenerateRequest:
        """Return a request long enough to be observed in flight: it fills the context, up to `LONG` tokens."""
        prompt = self.prompt(8)
        return self.request(prompt, max_tokens=min(LONG, self.engine.capabilities.max_context - 9), **params)

    async def submit(self, request: GenerateRequest) -> asyncio.Task[Generation]:
        """Start a request, and return its task once it has sampled tokens and still runs."""
        for _ in range(MEETINGS):
            task = await self._start_request(request)
            if not task.done():
                return task
            answer = await task
        raise RuleFailed(
            f"no request could be observed in flight: it ended with {len(answer.token_ids)} tokens before its first "
            "one was reported; serve a model with a longer context, or check the `sampling` function"
        )

    async def _start_request(self, request: GenerateRequest) -> asyncio.Task[Generation]:
        """Start a request and wait until its first token is reported or it has ended."""
        if all(task.done() for task in self._submitted):
            await self.until_idle()
        before = await self.count_sampled()
        task = asyncio.ensure_future(self.engine.generate(request))
        self._submitted.append(task)

        async def has_begun() -> bool:
            return task.done() or await self.count_sampled() > before

        await self.until(has_begun, "a request that begins to sample")
        return task

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        """Wait until a condition holds; fail after `CONDITION_S`."""
        end = time.monotonic() + CONDITION_S
        for turn in itertools.count():
            if await condition():
                return
            require(time.monotonic() < end, f"waited {CONDITION_S:g} s for {what}")
            await asyncio.sleep(0 if turn < QUICK_TURNS else REST_S)

    async def until_idle(self) -> None:
        """Wait until the engine has no request; servers need seconds to detect that a caller has disconnected."""

        async def is_idle() -> bool:
            await self.count_sampled()
            load = self.engine.metrics()
            return load.running + load.waiting == 0

        await self.until(is_idle, "an engine without requests")

    async def makes_no_progress(self) -> bool:
        """Return True if no token is sampled during `LOOKS` polls."""
        before = await self.count_sampled(), self.engine.metrics().sampled_tokens
        for _ in range(LOOKS):
            await asyncio.sleep(REST_S)
            if (await self.count_sampled(), self.engine.metrics().sampled_tokens) != before:
                return False
        return True

    async def update(self) -> int:
        """Give the engine new weights, and return their version."""
        version = self.engine.version + 1
        await self.engine.update_weights(self.new_weights(), version)
        return version


class ServerEngine(PolicyEngine):
    """Policy engine over a single server, for `check_engine` and for tests of one server.

    Args:
        server: Server, which `start` connects and `close` closes.
        connect_timeout_s: Deadline of the server's first answer.
    """

    def __init__(self, server: InferenceServer, *, connect_timeout_s: float = 600.0) -> None:
        self.server = server
        self._connect_timeout_s = connect_timeout_s
        self._version = 0
        self._is_paused = False
        self._metrics = EngineMetrics()

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._version

    async def start(self) -> None:
        """Connect to the server."""
        await self.server.connect(deadline_s=self._connect_timeout_s)
        self.capabilities = self.server.capabilities
        self._version = await self.server.weight_version()

    async def sampling(self) -> int:
        """Count the running requests, which have their first token, and update `metrics`."""
        load = await self.server.load()
        self._metrics = EngineMetrics(
            running=load.running,
            waiting=load.waiting,
            prompt_tokens=load.prompt_tokens,
            cached_tokens=load.cached_tokens,
            sampled_tokens=load.sampled_tokens,
        )
        return load.running

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn."""
        return await self.server.generate(request)

    async def abort(self, request_id: str) -> bool:
        """End a request early."""
        return await self.server.abort(request_id)

    async def pause(self) -> None:
        """Hold all requests."""
        await self.server.pause()
        self._is_paused = True

    async def resume(self) -> None:
        """Continue all requests."""
        await self.server.resume()
        self._is_paused = False

    async def update_weights(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Load the weights in the folder ``weights["folder"]`` while the server is paused."""
        if weights is None:
            raise UsageError("a server cannot share weights", got=None, expected='{"folder": path}')
        was_paused = self._is_paused
        if not was_paused:
            await self.pause()
        await self.server.load_weights(Path(weights["folder"]), version)
        self._version = version
        if not was_paused:
            await self.resume()

    async def end_session(self, session_id: str) -> None:
        """Do nothing: servers have no sessions."""

    def metrics(self) -> EngineMetrics:
        """Return the metrics that `sampling` read last."""
        return self._metrics

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        await self.server.close()
