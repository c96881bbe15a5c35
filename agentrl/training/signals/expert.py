"""The expert of ``algorithm.expert``: group members whose tokens the policy did not sample.

The expert's episodes come with the step (`agentrl.training.batch.StepExtras`); `step_batch` lays out their forced
tokens.
"""

from __future__ import annotations

import dataclasses

import torch

from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import ConfigError
from agentrl.registry import Kind, lookup
from agentrl.training.batch import StepBatch
from agentrl.training.signals.base import SignalSetup, TokenSignal


class ExpertSignal(TokenSignal):
    """Mask of the tokens that an expert wrote, for a loss that treats them differently."""

    name = "expert"

    @classmethod
    def check(cls, algorithm: AlgorithmConfig, config: TrainerConfig, *, has_adapters: bool) -> None:
        """Check that there is an expert if, and only if, the loss can train on its tokens."""
        expert = algorithm.expert
        if expert is None:
            if reads_expert(algorithm):
                raise ConfigError(
                    f"the loss {algorithm.loss} needs {Input.EXPERT}",
                    got="no algorithm.expert",
                    expected="algorithm.expert={members: 1}",
                )
            return
        if not reads_expert(algorithm):
            raise ConfigError(
                f"the loss {algorithm.loss} cannot train on the tokens of algorithm.expert, which the policy did not "
                "sample",
                expected="algorithm.loss=luffy, or no algorithm.expert",
            )
        if expert.members >= algorithm.group_size:
            raise ConfigError(
                "algorithm.expert plays all episodes of a group",
                got=f"algorithm.expert.members {expert.members} of algorithm.group_size {algorithm.group_size}",
                expected=f"at most {algorithm.group_size - 1}",
            )
        if algorithm.correction.proximal != "trainer":
            raise ConfigError(
                "an expert's tokens have no sampling probability mu",
                got=f"algorithm.correction.proximal {algorithm.correction.proximal}",
                expected="algorithm.correction.proximal=trainer",
            )
        if "kl" in algorithm.shaping:
            raise ConfigError(
                "the shaping kl needs sampled tokens, and an expert's tokens were not sampled",
                got="algorithm.expert and the shaping kl",
                expected="algorithm.kl_coef, which adds the KL to the loss",
            )

    @classmethod
    def build(cls, setup: SignalSetup) -> ExpertSignal | None:
        """Build the signal, if the loss reads it."""
        return cls() if reads_expert(setup.algorithm) else None

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Fill `batch.expert` with False if the step has no expert's episode."""
        if batch.expert is not None:
            return batch
        return dataclasses.replace(batch, expert=torch.zeros(batch.tokens, dtype=torch.bool))


def reads_expert(algorithm: AlgorithmConfig) -> bool:
    """Return True if the loss treats an expert's tokens differently from the policy's."""
    return Input.EXPERT in needed_inputs(lookup(Kind.LOSS, algorithm.loss))
