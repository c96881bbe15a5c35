"""The protocol of signals: what is added to a step's sampled tokens before their advantages are estimated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from transformers import PreTrainedModel

from agentrl.algorithms.types import Estimate
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import UsageError
from agentrl.training.batch import StepBatch
from agentrl.training.checkpoint import SignalState
from agentrl.training.forward.logprobs import ValueHead
from agentrl.training.forward.micro_batches import SumsByName
from agentrl.training.forward.runner import ModelRunner
from agentrl.training.optimizer import OptimizerSettings, Update
from agentrl.training.rewards import RewardShaping


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSetup:
    """Setup of a trainer, from which its signals are made."""

    policy: ModelRunner
    algorithm: AlgorithmConfig
    config: TrainerConfig
    shaping: RewardShaping
    optimizer: OptimizerSettings
    models: Mapping[str, PreTrainedModel]
    """By the name of their signal; copies of the policy stand in for those left out."""


class SignalUpdates(Protocol):
    """Training of a signal's model in one step, update by update together with the policy's."""

    joins_policy: bool
    """The loss is a part of the policy's, so that one forward and backward pass serves both."""

    @property
    def head(self) -> ValueHead:
        """Give the output that reads the policy's hidden states, where the loss joins the policy's."""

    def joined_loss(self, values: torch.Tensor, where: torch.Tensor, tally: SumsByName) -> torch.Tensor:
        """Compute the addition to the policy's loss at tokens `where`, from the head's `values`: both [selected]."""

    def accumulate(self, part: list[int]) -> None:
        """Add the gradient of some sequences, which are one update, or prepare to join the policy's pass."""

    def update(self) -> None:
        """Apply the gradients of the last `accumulate`."""

    def leave_out(self) -> None:
        """Drop the gradients of the last `accumulate`."""

    def metrics(self) -> dict[str, float]:
        """Give the metrics of the step, under their final names."""


class TokenSignal:
    """A part of the algorithm that annotates sampled tokens; this base class does nothing."""

    name: ClassVar[str]
    """Of the signal: in `Trainer`'s `signal_models`, and before its state in checkpoints."""

    @classmethod
    def check(cls, algorithm: AlgorithmConfig, config: TrainerConfig, *, has_adapters: bool) -> None:
        """Check that the signal is there where the algorithm reads it, and only there.

        Raises:
            ConfigError: it is missing, or of no use.
        """

    @classmethod
    def build(cls, setup: SignalSetup) -> TokenSignal | None:
        """Make the signal, if the algorithm has it.

        Raises:
            UsageError: its model is missing, or is not of the policy's kind.
        """
        raise NotImplementedError

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Add the signal's values to a step's tokens, which have those of earlier signals."""
        return batch

    def train(self, batch: StepBatch, estimate: Estimate, *, policy_learns: bool) -> SignalUpdates | None:
        """Make what trains the signal's model together with the policy, if anything does."""
        return None

    def metrics(self) -> dict[str, float]:
        """Give the metrics of the last `annotate`, under their final names."""
        return {}

    def state(self) -> SignalState | None:
        """Give what a checkpoint holds of the signal."""
        return None

    def replay_routes(self, policy: ModelRunner) -> None:
        """Use the engine's routed experts in the signal's model, as the policy does."""


def update_metrics(prefix: str, updates: Sequence[Update]) -> dict[str, float]:
    """Give the metrics of the optimizer steps of a signal's own model, under names that begin with `prefix`."""
    applied = [update for update in updates if not update.non_finite]
    found = {f"{prefix}/updates_skipped": float(len(updates) - len(applied))}
    if applied:
        found[f"{prefix}/learning_rate"] = applied[-1].learning_rate
        found[f"{prefix}/grad_norm"] = max(update.grad_norm for update in applied)
    return found


def check_vocabulary(own: PreTrainedModel, policy: PreTrainedModel, *, what: str) -> None:
    """Check that a signal's model reads what the policy writes."""
    found, expected = (model.config.get_text_config().vocab_size for model in (own, policy))
    if found != expected:
        raise UsageError(
            f"{what}'s model has another vocabulary than the policy's",
            got=f"{found} token ids ({own.config._name_or_path or 'no name'})",
            expected=f"{expected}",
            hint="it reads the policy's tokens: take a model of the same family, or leave its path out",
        )
