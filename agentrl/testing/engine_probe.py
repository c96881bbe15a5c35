"""What the checks of a policy engine share: the engine under test, and ways to use it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agentrl.errors import AgentRLError
from agentrl.policy import GenerateRequest, Generation, PolicyEngine, SamplingParams, StopReason

Reference: TypeAlias = Callable[[Sequence[int], float], Sequence[float]]
"""(ids, temperature) → log-probability of ``ids[1:]``, each given what stands before it, on the current weights."""
NewWeights: TypeAlias = Callable[[], Mapping[str, Any] | None]
"""Makes new weights and gives what `PolicyEngine.update_weights` takes."""

MOST_TICKS = 20_000


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
    """An engine under test."""

    engine: PolicyEngine
    reference: Reference | None
    new_weights: NewWeights
    tolerance: float
    """Largest difference of a log-probability from the reference."""
    settle_s: float
    """Seconds for a request to get going; 0 for engines of this process, which are watched instead."""
    names: Iterator[int] = field(default_factory=itertools.count)

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
        """A request that runs long enough to be met in flight."""
        prompt = self.prompt(8)
        return self.request(prompt, max_tokens=min(1000, self.engine.capabilities.max_context - 9), **params)

    async def submit(self, request: GenerateRequest) -> asyncio.Task[Generation]:
        """Start a request and wait until it has sampled something."""
        before = self.engine.metrics().sampled_tokens
        task = asyncio.ensure_future(self.engine.generate(request))
        if self.settle_s:
            await asyncio.sleep(self.settle_s)
            return task
        for _ in range(MOST_TICKS):
            await asyncio.sleep(0)
            if self.engine.metrics().sampled_tokens > before + 2 or task.done():
                return task
        raise CheckFailed("a request did not begin to sample")

    async def let_pass(self) -> None:
        """Let the engine do what it would do now."""
        if self.settle_s:
            await asyncio.sleep(self.settle_s)
        for _ in range(100):
            await asyncio.sleep(0)

    async def update(self) -> int:
        """Give the engine new weights; their version."""
        version = self.engine.version + 1
        await self.engine.update_weights(self.new_weights(), version)
        return version
