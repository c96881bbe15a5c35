"""The protocol of signals: what is added to a step's sampled tokens before their advantages are estimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from transformers import PreTrainedModel

from agentrl.algorithms.types import Estimate
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import UsageError
from agentrl.training.batch import StepBatch, StepInput
from agentrl.training.checkpoint import Companion
from agentrl.training.forward.logprobs import ValueHead
from agentrl.training.forward.micro_batches import SumsByName
from agentrl.training.forward.runner import ModelRunner
from agentrl.training.optimizer import OptimizerSettings
from agentrl.training.rewards import RewardShaping


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSetup:
    """Setup of a trainer, from which its signals are made."""

    policy: ModelRunner
    algorithm: AlgorithmConfig
    config: TrainerConfig
    shaping: RewardShaping
    optimizer: OptimizerSettings
    """For a signal's own models; the learning rate is the signal's."""
    models: Mapping[str, PreTrainedModel]
    """By the name of their signal; copies of the policy stand in for those left out."""


class JointLoss(Protocol):
    """A loss that is a part of the policy's, so that one forward and backward pass serves both."""

    @property
    def head(self) -> ValueHead:
        """Give the output that reads the policy's hidden states."""

    def joined_loss(self, values: torch.Tensor, where: torch.Tensor, tally: SumsByName) -> torch.Tensor:
        """Give what the policy's loss of some tokens gets on top.

        Args:
            values: What the head says of the tokens: [selected]; carries the gradient.
            where: Which tokens they are: int64 [selected].
            tally: Takes in what is measured.
        """


class SignalUpdates(Protocol):
    """Training of a signal's model in one step, update by update beside the policy's."""

    @property
    def joint(self) -> JointLoss | None:
        """Give the loss that is a part of the policy's, if it is one."""

    def accumulate(self, part: list[int]) -> None:
        """Add the gradient of some sequences, which are one update, or prepare to join the policy's pass."""

    def update(self) -> None:
        """Apply the gradients of the last `accumulate`."""

    def leave_out(self) -> None:
        """Forget the gradients of the last `accumulate`."""

    def metrics(self) -> dict[str, float]:
        """Give the metrics of the step, under their final names."""


class TokenSignal:
    """A part of the algorithm that knows something about sampled tokens; by itself, one that does nothing."""

    name: ClassVar[str]
    """Of the signal: in `Trainer`'s `signal_models`, and before its state in checkpoints."""

    @classmethod
    def check(cls, algorithm: AlgorithmConfig, config: TrainerConfig, *, has_adapters: bool) -> None:
        """Check that the signal is there where it is needed, and only there.

        Args:
            algorithm: Says what is read.
            config: Says what there is.
            has_adapters: Adapters are all that is trained of the policy.

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

    def annotate(self, batch: StepBatch, step: StepInput) -> StepBatch:
        """Add to the tokens of a step what the signal knows of them.

        Args:
            batch: Of the step, with what earlier signals know.
            step: What the batch was made of.

        Raises:
            TrainingError: the step lacks something.
        """
        return batch

    def train(
        self, batch: StepBatch, estimate: Estimate, step: StepInput, *, policy_learns: bool
    ) -> SignalUpdates | None:
        """Make what trains the signal's model beside the policy, if anything does.

        Args:
            batch: With what all signals know.
            estimate: Of the advantages.
            step: What the batch was made of.
            policy_learns: The policy trains in this step, too.

        Raises:
            TrainingError: there is nothing to learn.
        """
        return None

    def metrics(self) -> dict[str, float]:
        """Give the metrics of the last `annotate`, under their final names."""
        return {}

    def state(self) -> Companion | None:
        """Give what a checkpoint holds of the signal."""
        return None

    def replay_routes(self, policy: ModelRunner) -> None:
        """Route as the engine did, where tokens are compared with the policy's, which does so already."""


def check_vocabulary(own: PreTrainedModel, policy: PreTrainedModel, *, what: str) -> None:
    """Check that a signal's model reads what the policy writes.

    Raises:
        UsageError: it has another number of token ids.
    """
    found, expected = (model.config.get_text_config().vocab_size for model in (own, policy))
    if found != expected:
        raise UsageError(
            f"{what}'s model has another vocabulary than the policy's",
            got=f"{found} token ids ({own.config._name_or_path or 'no name'})",
            expected=f"{expected}",
            hint="it reads the policy's tokens: take a model of the same family, or leave its path out",
        )
