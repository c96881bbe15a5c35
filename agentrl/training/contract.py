"""Protocols of the trainer and the weights of a run, for one model or several adapters of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from agentrl.config.config import Config
from agentrl.render.images import ImageProcessor
from agentrl.training.batch import StepExtras
from agentrl.training.report import StepReport
from agentrl.trajectory import Trajectory


class TrainerFiles(Protocol):
    """Storage of a trainer's state."""

    def save(self, folder: Path) -> None:
        """Write the state to an existing folder."""

    def load(self, folder: Path) -> None:
        """Restore a state that `save` wrote; the weights must be loaded first."""

    def copy(self) -> Callable[[Path], None]:
        """Copy the state; return a function that writes the copy to a folder while training continues."""


class PolicyTrainer(Protocol):
    """Trainer of the weights that a run samples with: `Trainer`, or `AdapterTrainers` with one per adapter."""

    @property
    def checkpoint(self) -> TrainerFiles:
        """Storage of the state."""

    @property
    def min_members(self) -> int:
        """Minimum number of trainable members of a group that provides a gradient."""

    @property
    def versions(self) -> Mapping[str, int]:
        """Version of each adapter; empty for one model."""

    @property
    def sampled_versions(self) -> Mapping[str, int]:
        """Version of each adapter before the latest step; empty for one model."""

    def step(
        self, trajectories: Sequence[Trajectory], *, temperature: float, extras: StepExtras | None = None
    ) -> StepReport:
        """Train on the trajectories of one step.

        Raises:
            TrainingError: a reward or an advantage is not finite, or there is nothing to train on.
        """

    def configure(self, config: Config) -> None:
        """Use the settings of a config that differs only in keys that may change during training."""

    def write_dumps(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Dump skipped updates from now on."""


class PolicyWeights(Protocol):
    """Weights of a run's policy, for weight sync and checkpoints: `ModelWeights`, or `AdaptersWeights`."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return the current tensors by name; the next optimizer step may change them."""

    def token_logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
        """Compute the log-probability of each answer token after the prompt, at temperature 1."""

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None = None) -> None:
        """Write the policy with its tokenizer and image processor as a Hugging Face folder."""

    def copy(self, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None = None) -> Callable[[Path], None]:
        """Copy the policy to the CPU; return a function that writes the copy as `save` does, while training
        continues.
        """
