"""The protocol of signals, which add values to a step's sampled tokens before advantages are estimated."""

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
from agentrl.training.forward.runner import ModelRunner, SumsByName
from agentrl.training.optimizer import OptimizerSettings, Update
from agentrl.training.rewards import RewardShaping


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSetup:
    """Parts of a trainer from which its signals are built."""

    policy: ModelRunner
    algorithm: AlgorithmConfig
    config: TrainerConfig
    shaping: RewardShaping
    optimizer: OptimizerSettings
    models: Mapping[str, PreTrainedModel]
    """Models by signal name; signals without an entry copy the policy, except for a teacher."""


class SignalUpdates(Protocol):
    """Updates of a signal's model in one step, made together with the policy's."""

    joins_policy: bool
    """True if the loss is part of the policy's, so that both share one forward and backward pass (`JoinedUpdates`)."""

    def accumulate(self, part: list[int]) -> None:
        """Add the gradient of one update over the sequences `part`; a joined loss only prepares the policy's pass."""

    def update(self) -> None:
        """Apply the gradients of the last `accumulate`."""

    def leave_out(self) -> None:
        """Drop the gradients of the last `accumulate`."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step, by final name."""


class JoinedUpdates(SignalUpdates, Protocol):
    """Updates whose loss is part of the policy's, on values that a head computes from the policy's hidden states."""

    @property
    def head(self) -> ValueHead:
        """Value head on the policy's hidden states."""

    def joined_loss(self, values: torch.Tensor, where: torch.Tensor, tally: SumsByName) -> torch.Tensor:
        """Compute the term of the policy's loss for the tokens `where`, from the head's `values`: both [selected]."""


class TokenSignal:
    """Base class of signals, which annotate sampled tokens; its methods do nothing."""

    name: ClassVar[str]
    """Name of the signal in `Trainer`'s `signal_models`, and prefix of its state in checkpoints."""

    @classmethod
    def check(cls, algorithm: AlgorithmConfig, config: TrainerConfig, *, has_adapters: bool) -> None:
        """Check that the signal is configured if, and only if, the algorithm reads it.

        Raises:
            ConfigError: the signal is missing or unused.
        """

    @classmethod
    def build(cls, setup: SignalSetup) -> TokenSignal | None:
        """Build the signal; return ``None`` if the algorithm does not have it.

        Raises:
            UsageError: the signal's model is missing, or does not fit the policy.
        """
        raise NotImplementedError

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Add the signal's values to a step's tokens; those of earlier signals are present."""
        return batch

    def train(self, batch: StepBatch, estimate: Estimate, *, policy_learns: bool) -> SignalUpdates | None:
        """Return the updates of the signal's model to make with the policy's, or ``None``."""
        return None

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last `annotate`, by final name."""
        return {}

    def state(self) -> SignalState | None:
        """Return the signal's state for checkpoints, or ``None``."""
        return None

    def replay_routes(self, policy: ModelRunner) -> None:
        """Use the engine's routed experts in the signal's model, as the policy does."""


def update_metrics(prefix: str, updates: Sequence[Update]) -> dict[str, float]:
    """Compute the metrics of a signal model's optimizer steps; names start with `prefix`."""
    applied = [update for update in updates if not update.non_finite]
    found = {f"{prefix}/updates_skipped": float(len(updates) - len(applied))}
    if applied:
        found[f"{prefix}/learning_rate"] = applied[-1].learning_rate
        found[f"{prefix}/grad_norm"] = max(update.grad_norm for update in applied)
    return found


def check_vocabulary(own: PreTrainedModel, policy: PreTrainedModel, *, what: str) -> None:
    """Check that a signal's model has the policy's vocabulary."""
    found, expected = (model.config.get_text_config().vocab_size for model in (own, policy))
    if found != expected:
        raise UsageError(
            f"the vocabulary of {what}'s model differs from the policy's",
            got=f"{found} token ids ({own.config._name_or_path or 'no name'})",
            expected=f"{expected} token ids",
            hint="it reads the policy's tokens: use a model of the same family, or omit its path",
        )
