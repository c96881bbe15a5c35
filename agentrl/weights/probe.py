"""The probe: fixed prompts on which the engine's log-probabilities must be the trainer's.

A server can accept an update and keep serving old tensors. Only its numbers tell: it answers a few fixed prompts
greedily, and the trainer scores exactly the tokens that it gave.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.errors import TrainingError
from agentrl.policy import GenerateRequest, Generation, SamplingParams
from agentrl.weights.sync import WeightSource

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest difference of a log-probability that rounding explains, by the weights' number format."""


class ProbedEngine(Protocol):
    """What is asked; a `agentrl.policy.PolicyEngine` is one."""

    @property
    def version(self) -> int:
        """Version of the weights that it should sample with."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn."""

    async def end_session(self, session_id: str) -> None:
        """Forget what is kept for a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """An answer of an engine that served the right weights, and what the trainer said of it."""

    prompt: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """The trainer's, at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An engine that serves the trainer's weights."""

    difference: float
    """Largest difference of a log-probability."""
    answers: Sequence[RecordedAnswer]
    """For `Probe.compare_recorded`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Prompts, and how far the two sides may be apart.

    Args:
        prompts: Token ids, at least one prompt of at least one token.
        answer_tokens: Tokens of each answer.
        tolerance: Largest difference of a log-probability.
    """

    prompts: Sequence[Sequence[int]]
    answer_tokens: int = 4
    tolerance: float = TOLERANCE["float32"]

    @classmethod
    def random(cls, vocab_size: int, *, tolerance: float, prompts: int = 4, length: int = 24) -> Probe:
        """A probe over random tokens of a vocabulary, the same ones every time."""
        draw = random.Random("probe")
        return cls(
            prompts=[[draw.randrange(vocab_size) for _ in range(length)] for _ in range(prompts)], tolerance=tolerance
        )

    async def compare(self, engine: ProbedEngine, trainer: WeightSource, *, name: str = "the engine") -> Comparison:
        """Ask the engine, score with the trainer.

        Args:
            engine: Is asked.
            trainer: Scores; its weights are those that the engine should have.
            name: Of the engine, for messages.

        Raises:
            TrainingError: a difference above the tolerance, or an engine that samples with another version.
        """
        answers = await self._ask_all(engine)
        for answer in answers:
            _check_version(name, answer, engine.version)
        recorded = [
            RecordedAnswer(
                prompt=prompt, token_ids=answer.token_ids, logprobs=trainer.token_logprobs(prompt, answer.token_ids)
            )
            for prompt, answer in zip(self.prompts, answers, strict=True)
        ]
        differences = [
            self._difference(name, engine.version, right.prompt, answer, right.logprobs)
            for right, answer in zip(recorded, answers, strict=True)
        ]
        return Comparison(difference=max(differences), answers=recorded)

    async def compare_recorded(
        self, engine: ProbedEngine, recorded: Sequence[RecordedAnswer], *, name: str = "the engine"
    ) -> float:
        """`compare`, without the trainer: answers, as far as they are those that were recorded.

        Where the engine takes another first token, it must give it a log-probability within the tolerance of the
        recorded one's: two tokens may be equally likely.

        Raises:
            TrainingError: as `compare`.
        """
        answers = await self._ask_all(engine)
        differences = []
        for right, answer in zip(recorded, answers, strict=True):
            _check_version(name, answer, engine.version)
            pairs = zip(right.token_ids, answer.token_ids, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(answer.token_ids))
            compared = max(same, 1)
            differences.append(self._difference(name, engine.version, right.prompt, answer, right.logprobs[:compared]))
        return max(differences)

    async def _ask_all(self, engine: ProbedEngine) -> list[Generation]:
        return await asyncio.gather(*(self._ask(engine, number) for number in range(len(self.prompts))))

    async def _ask(self, engine: ProbedEngine, number: int) -> Generation:
        name = f"probe-{engine.version}-{number}"
        params = SamplingParams(max_tokens=self.answer_tokens, temperature=0.0)
        try:
            return await engine.generate(
                GenerateRequest(prompt_ids=self.prompts[number], params=params, session_id=name, request_id=name)
            )
        finally:
            await engine.end_session(name)

    def _difference(
        self, name: str, version: int, prompt: Sequence[int], answer: Generation, expected: Sequence[float]
    ) -> float:
        pairs = list(zip(answer.logprobs, expected, strict=False))
        worst = max(range(len(pairs)), key=lambda index: _distance(*pairs[index]))
        difference = _distance(*pairs[worst])
        if not difference <= self.tolerance:
            raise TrainingError(
                f"{name} does not serve the trainer's weights of version {version}: log-probability of token "
                f"{answer.token_ids[worst]} after {len(prompt) + worst} tokens",
                got=f"{pairs[worst][0]:.6g} from the engine",
                expected=f"{pairs[worst][1]:.6g} within {self.tolerance:g}, the trainer's",
                hint="the engine serves another model; or, after an update, that did not reach every tensor; or the "
                "two sides compute the model differently",
            )
        return difference


def _distance(first: float, second: float) -> float:
    distance = abs(first - second)
    return math.inf if math.isnan(distance) else distance


def _check_version(name: str, answer: Generation, version: int) -> None:
    if set(answer.versions) != {version}:
        raise TrainingError(
            f"{name} samples with weights of another version after a sync",
            got=sorted(set(answer.versions)),
            expected=version,
        )
