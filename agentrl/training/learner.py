"""Training of a model on fixed data: the updates that SFT, losses on pairs, and reward models share, with their state.

A learner has the data of all updates from its start, so its state is its optimizer and the number of updates. A learner
with the same data that loads this state and the weights makes the remaining updates bit for bit.
"""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from transformers import PreTrainedModel

from agentrl.config.config import TrainerConfig
from agentrl.errors import TrainingError
from agentrl.training.checkpoint import TrainerCheckpoint, TrainerState
from agentrl.training.compile import checkpoint_activations, compile_layers
from agentrl.training.distributed import Ranks
from agentrl.training.optimizer import LearningProgress, OptimizerSettings, PolicyOptimizer, Schedule

Batch = TypeVar("Batch")
LEARN = "learn"
"""Name of rank 0's call that makes an update on every rank."""


class Learner(abc.ABC, Generic[Batch]):
    """Trainer of a model in place, one update after another; every rank has one.

    Args:
        model: The model, whole or sharded.
        batches: Data of each update.
        settings: Learning rate and its schedule.
        trainer: Optimizer and clipping.
        ranks: Ranks that train together.

    Attributes:
        model: The model.
        done: Number of updates made.
        checkpoint: Storage of the state.
    """

    data: ClassVar[str]
    """Name of the data in error messages."""
    section: ClassVar[str]
    """Config section of the learning rate."""

    def __init__(
        self, model: PreTrainedModel, batches: Sequence[Batch], settings: Schedule, trainer: TrainerConfig, ranks: Ranks
    ) -> None:
        self.done, self.ranks = 0, ranks
        self.model, self._batches, self._trainer = model, batches, trainer
        compile_layers(model, trainer)
        self._optimizer = PolicyOptimizer(model, OptimizerSettings.of(trainer, settings, total_updates=len(batches)))
        self._started = time.perf_counter()
        state = TrainerState(self._optimizer, {})
        self.checkpoint = TrainerCheckpoint(state, self._progress, self._restore, ranks)

    @property
    def updates(self) -> int:
        """Number of updates of the whole training."""
        return len(self._batches)

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """Return the calls that rank 0 makes on the learners of other ranks, by name."""
        return {LEARN: self._learn, **self.checkpoint.calls()}

    def learn(self) -> LearningProgress:
        """Make the next update, on all ranks.

        Raises:
            TrainingError: the loss is not finite, or a rank was lost.
        """
        with self.ranks.broadcast_call(LEARN):
            return self._learn()

    def _learn(self) -> LearningProgress:
        with checkpoint_activations(self.model, enabled=self._trainer.gradient_checkpointing):
            loss, extra = self._backward(self._batches[self.done])
        update = self._optimizer.update()
        self.done += 1
        return LearningProgress.after(
            update, number=self.done, updates=self.updates, loss=loss, started=self._started, **extra
        )

    @abc.abstractmethod
    def _backward(self, batch: Batch) -> tuple[float, dict[str, float]]:
        """Add the gradient of an update's mean loss; return that loss, and further metrics."""

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss on {self.data} is not finite",
                got=loss,
                hint=f"try a smaller {self.section}.learning_rate",
            )

    def _progress(self) -> dict[str, Any]:
        """Return numbers and tensors that a checkpoint holds in addition to the optimizer's state."""
        return {"done": self.done, "seconds": time.perf_counter() - self._started}

    def _restore(self, progress: Mapping[str, Any]) -> None:
        """Restore the values of `_progress`, which may have become tensors."""
        self.done = int(progress["done"])
        self._started = time.perf_counter() - float(progress["seconds"])
