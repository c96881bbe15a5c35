"""What the checks of a policy engine share: the engine under test, and ways to use it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agentrl.errors import AgentRLError
from agentrl.policy import GenerateRequest, Generation, PolicyEngine, SamplingParams, StopReason

Reference: TypeAlias = Callable[[Sequence[int], float], Sequence[float]]
"""(ids, temperature) → log-probability of ``ids[1:]``, each given what stands before it, on the current weights."""
NewWeights: TypeAlias = Callable[[], Mapping[str, Any] | None]
"""Makes new weights and gives what `PolicyEngine.update_weights` takes."""
Sampling: TypeAlias = Callable[[Any], Awaitable[int]]
"""Asks an engine how many of its requests have their first token and not their last."""

LONGEST_WAIT_S = 60.0
"""What should happen and has not happened after so long never will."""
QUICK_TURNS = 1000
"""Turns of the event loop in which a condition is looked at without a rest: engines of this process need one each."""
REST_S = 0.01
LOOKS = 20
"""Looks at an engine that must not move."""
LONG = 1000
"""Most tokens of a request that is met in flight."""
MEETINGS = 8
"""Requests that are started to meet one in flight: what a busy server tells of itself may come too late."""


class CheckFailed(Exception):
    """What the check found."""


class CheckSkipped(Exception):
    """Why the check does not apply."""


def expect(condition: bool, found: str) -> None:
    """Fail the check with what was found unless the condition holds."""
    if not condition:
        raise CheckFailed(found)


@contextmanager
def refusal(kind: type[AgentRLError], what: str) -> Iterator[None]:
    """Fail the check unless the enclosed code raises `kind`."""
    try:
        yield
    except kind:
        return
    except Exception as error:
        raise CheckFailed(f"{what} raised {type(error).__name__} instead of {kind.__name__}: {error}") from error
    raise CheckFailed(f"{what} did not raise {kind.__name__}")


@dataclass(slots=True, kw_only=True)
class EngineProbe:
    """An engine under test.

    Attributes:
        factory: Makes it.
        engine: The one that runs; made by `start`.
        sampling: How its requests are watched; through `engine.metrics` when left out.
        kill: Ends the process that samples.
    """

    factory: Callable[[], PolicyEngine]
    engine: PolicyEngine = field(init=False)
    reference: Reference | None
    new_weights: NewWeights
    tolerance: float
    """Largest difference of a log-probability from the reference."""
    sampling: Sampling | None = None
    kill: Callable[[], object] | None = None
    names: Iterator[int] = field(default_factory=itertools.count)
    _submitted: list[asyncio.Task[Generation]] = field(default_factory=list)

    async def start(self) -> None:
        """Make an engine and start it."""
        self.engine = self.factory()
        await self.engine.start()

    async def look(self) -> int:
        """A number that grows when a request gets its first token."""
        if self.sampling is not None:
            return await self.sampling(self.engine)
        return self.engine.metrics().sampled_tokens

    def prompt(self, length: int, start: int = 1) -> list[int]:
        """Ids that walk through the vocabulary."""
        return [(start + 7 * i) % self.engine.capabilities.vocab_size for i in range(length)]

    def request(self, prompt: Sequence[int], *, session: str | None = None, **params: Any) -> GenerateRequest:
        """A request with names of its own."""
        name = f"check-{next(self.names)}"
        settings = SamplingParams(**params)
        return GenerateRequest(prompt_ids=prompt, params=settings, session_id=session or name, request_id=name)

    async def generate(self, prompt: Sequence[int], *, session: str | None = None, **params: Any) -> Generation:
        """Sample one turn and check its form."""
        request = self.request(prompt, session=session, **params)
        answer = await self.engine.generate(request)
        self.check_form(request, answer)
        return answer

    def check_form(self, request: GenerateRequest, answer: Generation) -> None:
        """Check what holds for every answer."""
        count, size = len(answer.token_ids), self.engine.capabilities.vocab_size
        expect(all(0 <= token < size for token in answer.token_ids), f"ids out of the vocabulary: {answer.token_ids}")
        expect(len(answer.versions) == count, f"{len(answer.versions)} versions for {count} tokens")
        if self.engine.capabilities.logprobs:
            expect(len(answer.logprobs) == count, f"{len(answer.logprobs)} log-probabilities for {count} tokens")
            expect(all(value <= 1e-6 for value in answer.logprobs), f"log-probabilities above 0: {answer.logprobs}")
        stops = request.params.stop_token_ids
        expect(not stops.intersection(answer.token_ids[:-1]), "sampling went on after a stop token")
        if answer.stop_reason is StopReason.STOP:
            expect(bool(answer.token_ids) and answer.token_ids[-1] in stops, "stopped without a stop token")
        expect(count <= request.params.max_tokens, f"{count} tokens for max_tokens {request.params.max_tokens}")
        expect(0 <= answer.cached_tokens < len(request.prompt_ids), f"{answer.cached_tokens} cached tokens")

    def check_logprobs(self, prompt: Sequence[int], answer: Generation, temperature: float, first: int = 0) -> float:
        """Compare with the reference, from token `first` of the answer on; the largest difference."""
        if self.reference is None:
            raise CheckSkipped("no reference was given")
        expected = self.reference([*prompt, *answer.token_ids], temperature or 1.0)[len(prompt) - 1 :]
        differences = [abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)][first:]
        worst = max(differences, default=0.0)
        expect(worst <= self.tolerance, f"log-probabilities differ from the reference by {worst:.2e}")
        return worst

    def long_request(self, **params: Any) -> GenerateRequest:
        """A request that runs long enough to be met in flight: it fills the context, up to `LONG` tokens."""
        prompt = self.prompt(8)
        return self.request(prompt, max_tokens=min(LONG, self.engine.capabilities.max_context - 9), **params)

    async def submit(self, request: GenerateRequest) -> asyncio.Task[Generation]:
        """Start a request and wait until it has sampled something; it is far from its end then."""
        for _ in range(MEETINGS):
            task = await self._begun(request)
            if not task.done():
                return task
            answer = await task
        raise CheckFailed(
            f"a request could not be met in flight: it ended with {len(answer.token_ids)} tokens before its first "
            "one was seen; serve a model with a longer context, or look at how it is watched"
        )

    async def _begun(self, request: GenerateRequest) -> asyncio.Task[Generation]:
        """A request whose first token was seen, or that has ended before."""
        if all(task.done() for task in self._submitted):
            await self.until_idle()
        before = await self.look()
        task = asyncio.ensure_future(self.engine.generate(request))
        self._submitted.append(task)

        async def has_begun() -> bool:
            return task.done() or await self.look() > before

        await self.until(has_begun, "a request that begins to sample")
        return task

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        """Wait until something is so, and fail when it never is."""
        end = time.monotonic() + LONGEST_WAIT_S
        for turn in itertools.count():
            if await condition():
                return
            expect(time.monotonic() < end, f"waited {LONGEST_WAIT_S:g} s in vain for {what}")
            await asyncio.sleep(0 if turn < QUICK_TURNS else REST_S)

    async def until_idle(self) -> None:
        """Wait until the engine has no request; servers notice within seconds that a caller has gone."""

        async def is_idle() -> bool:
            await self.look()
            load = self.engine.metrics()
            return load.running + load.waiting == 0

        await self.until(is_idle, "an engine without requests")

    async def stands_still(self) -> bool:
        """Whether nothing is sampled, however often one looks."""
        before = await self.look(), self.engine.metrics().sampled_tokens
        for _ in range(LOOKS):
            await asyncio.sleep(REST_S)
            if (await self.look(), self.engine.metrics().sampled_tokens) != before:
                return False
        return True

    async def update(self) -> int:
        """Give the engine new weights; their version."""
        version = self.engine.version + 1
        await self.engine.update_weights(self.new_weights(), version)
        return version
