"""Norms of the policy's score: how much a token's gradient varies, for an estimator with optimal baselines."""

from __future__ import annotations

import dataclasses

from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.registry import Kind, lookup
from agentrl.training.batch import StepBatch
from agentrl.training.forward.runner import ModelRunner
from agentrl.training.signals.base import SignalSetup, TokenSignal

PROBABLE_TOKENS = 64
"""Number of most probable tokens whose squared probabilities are summed; the rest adds at most 1/64 of its mass."""


class ScoreNorm(TokenSignal):
    """Squared norm of the gradient of log pi by the logits at each token, in one forward pass of the policy."""

    name = "score_norm"

    def __init__(self, policy: ModelRunner) -> None:
        self._policy = policy

    @classmethod
    def build(cls, setup: SignalSetup) -> ScoreNorm | None:
        """Build the signal, if the estimator reads it."""
        estimator = lookup(Kind.ADVANTAGE, setup.algorithm.advantage)
        return cls(setup.policy) if Input.SCORE_NORM in needed_inputs(estimator) else None

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Add 1 - 2 pi + sum pi^2 of each token, where the sum is over the most probable tokens.

        Raises:
            UsageError: ranks share rows.
        """
        vocabulary = self._policy.model.get_output_embeddings().weight.shape[0]
        found = self._policy.top_logprobs(
            batch.sequences,
            top_k=min(PROBABLE_TOKENS, vocabulary),
            temperature=batch.temperature,
            pad_id=batch.pad_id,
        )
        assert found.top_logp is not None
        norm = 1 - 2 * found.logp.exp() + (2 * found.top_logp).exp().sum(-1)
        return dataclasses.replace(batch, episodes=dataclasses.replace(batch.episodes, score_norm=norm.double().cpu()))
