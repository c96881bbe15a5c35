"""The probe: fixed prompts on which the engine's log-probabilities must be the trainer's.

A server can accept an update and keep serving old tensors. Only its numbers tell: it answers a few fixed prompts, and
the trainer scores exactly the tokens that it sampled.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import TrainingError
from agentrl.policy import GenerateRequest, Generation, PolicyEngine, SamplingParams
from agentrl.weights.sync import WeightSource

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest difference of a log-probability that rounding explains, by the weights' number format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Prompts, and how far the two sides may be apart.

    Args:
        prompts: Token ids, at least one prompt of at least one token.
        answer_tokens: Tokens sampled for each prompt.
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

    async def compare(self, engine: PolicyEngine, trainer: WeightSource) -> float:
        """Ask the engine, score with the trainer; the largest difference of a log-probability.

        Raises:
            TrainingError: a difference above the tolerance, or an engine that samples with an old version.
        """
        answers = await asyncio.gather(*(self._ask(engine, number) for number in range(len(self.prompts))))
        differences = [
            self._difference(prompt, answer, trainer, engine.version)
            for prompt, answer in zip(self.prompts, answers, strict=True)
        ]
        return max(differences)

    async def _ask(self, engine: PolicyEngine, number: int) -> Generation:
        name = f"probe-{engine.version}-{number}"
        params = SamplingParams(max_tokens=self.answer_tokens, seed=number)
        try:
            return await engine.generate(
                GenerateRequest(prompt_ids=self.prompts[number], params=params, session_id=name, request_id=name)
            )
        finally:
            await engine.end_session(name)

    def _difference(self, prompt: Sequence[int], answer: Generation, trainer: WeightSource, version: int) -> float:
        if set(answer.versions) != {version}:
            raise TrainingError(
                "the engine samples with weights of another version after a sync",
                got=sorted(set(answer.versions)),
                expected=version,
            )
        expected = trainer.token_logprobs(prompt, answer.token_ids)
        pairs = list(zip(answer.logprobs, expected, strict=True))
        worst = max(range(len(pairs)), key=lambda index: abs(pairs[index][0] - pairs[index][1]))
        difference = abs(pairs[worst][0] - pairs[worst][1])
        if not difference <= self.tolerance:
            raise TrainingError(
                f"the engine does not serve the trainer's weights of version {version}: log-probability of token "
                f"{answer.token_ids[worst]} after {len(prompt) + worst} tokens",
                got=f"{pairs[worst][0]:.6g} from the engine",
                expected=f"{pairs[worst][1]:.6g} within {self.tolerance:g}, the trainer's",
                hint="the update did not reach every tensor, or the two sides compute the model differently",
            )
        return difference
