"""Supervised warm start: cross-entropy on demonstrations, with the same ledger, masks and batches as RL training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.config.config import TrainerConfig
from agentrl.config.trainer import SFTConfig
from agentrl.errors import TrainingError
from agentrl.message.image import ImageReader
from agentrl.models.lora import adapter_dropout
from agentrl.training.compile import checkpoint_activations, compile_layers
from agentrl.training.distributed import Ranks
from agentrl.training.forward.runner import SumsByName, make_runner
from agentrl.training.forward.sequences import ScoredSequence, scored_sequence
from agentrl.training.optimizer import LearningProgress, OptimizerSettings, PolicyOptimizer
from agentrl.trajectory import Source, Trajectory

SORTED_UPDATES = 16
"""Number of optimizer steps whose sequences are sorted by length together, to reduce padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTExample:
    """A sequence of a demonstration."""

    scored: ScoredSequence
    answers: torch.Tensor
    """Mask of targets that the agent wrote: bool [targets]."""

    def __len__(self) -> int:
        return len(self.scored)

    def weights(self, observation_weight: float) -> torch.Tensor:
        """Compute the weight of each target in the loss: float32 [targets]."""
        return torch.where(self.answers, 1.0, observation_weight)


class SupervisedLearner:
    """Trainer of a model in place on demonstrations of an expert or a better policy; every rank has one.

    Args:
        model: Model from `agentrl.models.load.load_model`, or a sharded one.
        demonstrations: Trajectories whose forced and sampled tokens are learned. With `settings.observation_weight`,
            the other tokens after the first of each sequence are learned as well, with a weight that falls linearly
            to 0.
        settings: Data and learning rate.
        trainer: Micro-batches, optimizer, clipping.
        seed: Seed of the order of sequences.
        pad_id: Any id of the vocabulary.
        image_processor: Image processor; required if demonstrations contain images.
        ranks: Ranks that train together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        demonstrations: Sequence[Trajectory],
        settings: SFTConfig,
        trainer: TrainerConfig,
        *,
        seed: int,
        pad_id: int,
        image_processor: ImageReader | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model, self.ranks, self.demonstrations = model, ranks or Ranks(), len(demonstrations)
        self._settings, self._trainer, self._pad_id = settings, trainer, pad_id
        examples = list(_examples(demonstrations, everything=settings.observation_weight > 0))
        self._batches = list(_batches(examples, settings, seed))
        compile_layers(model, trainer)
        self._optimizer = PolicyOptimizer(
            model, OptimizerSettings.of(trainer, settings, total_updates=len(self._batches))
        )
        self._runner = make_runner(model, trainer, ranks=self.ranks, image_processor=image_processor)
        self._started, self._tokens, self._done = time.perf_counter(), 0, 0

    @property
    def updates(self) -> int:
        """Number of updates of the whole training."""
        return len(self._batches)

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """Return the calls that rank 0 makes on the learners of other ranks, by name."""
        return {"learn": self._learn}

    def learn(self) -> LearningProgress:
        """Make the next update.

        Raises:
            TrainingError: the loss is not finite, or a rank was lost.
        """
        with self.ranks.broadcast_call("learn"):
            return self._learn()

    def _learn(self) -> LearningProgress:
        batch = self._batches[self._done]
        observation_weight = self._settings.observation_weight * (1 - self._done / self.updates)
        recomputed = checkpoint_activations(self.model, enabled=self._trainer.gradient_checkpointing)
        with recomputed, adapter_dropout(self.model):
            loss = self._backward(batch, observation_weight)
        update = self._optimizer.update()
        self._done += 1
        self._tokens += sum(len(sequence) for sequence in batch)
        return LearningProgress.after(
            update,
            number=self._done,
            updates=self.updates,
            loss=loss,
            started=self._started,
            tokens=float(self._tokens),  # processed so far, including observations but not padding
        )

    def _backward(self, batch: list[SFTExample], observation_weight: float) -> float:
        weight = float(sum(example.weights(observation_weight).sum() for example in batch))
        scored = [example.scored for example in batch]

        def loss(indices: list[int], _: SumsByName) -> torch.Tensor:
            scores = self._runner.score([scored[i] for i in indices], temperature=1.0, pad_id=self._pad_id)
            weights = torch.cat([batch[i].weights(observation_weight) for i in indices]).to(scores.logp.device)
            return -(weights * scores.logp).sum() / weight

        total = self._runner.forward_backward(scored, loss).loss
        if not math.isfinite(total):
            raise TrainingError(
                "the warm start's loss is not finite", got=total, hint="try a smaller sft.learning_rate"
            )
        return total


def train_supervised(
    learner: SupervisedLearner,
    *,
    progress: Callable[[LearningProgress], None] = lambda _: None,
    enough: Callable[[LearningProgress], bool] = lambda _: False,
) -> LearningProgress:
    """Train until all updates are made or `enough` returns True; both callbacks run after every optimizer step.

    Returns:
        The state after the last step.

    Raises:
        TrainingError: no demonstration has a token to learn, the loss is not finite, or a rank was lost.
    """
    latest = None
    for _ in range(learner.updates):
        latest = learner.learn()
        progress(latest)
        if enough(latest):
            break
    if latest is None:
        raise TrainingError(
            "no tokens to learn from",
            got=f"{learner.demonstrations} demonstrations without answers",
            expected="at least one forced or sampled token",
        )
    return latest


def _examples(demonstrations: Sequence[Trajectory], *, everything: bool) -> Iterator[SFTExample]:
    for sequence in (sequence for demonstration in demonstrations for sequence in demonstration.sequences):
        answers = np.isin(sequence.sources, (Source.SAMPLED, Source.FORCED))
        answers[: max(sequence.shared, 1)] = False
        wanted = answers.copy()
        if everything:
            wanted[max(sequence.shared, 1) :] = True
            wanted &= sequence.sources != Source.MISTAKE
            for image in sequence.images:  # the model cannot predict image tokens
                wanted[image.start : image.end] = False
        if answers.any():
            scored = scored_sequence(sequence.token_ids, wanted, sequence.images)
            yield SFTExample(scored=scored, answers=torch.from_numpy(answers[wanted]))


def _batches(sequences: list[SFTExample], settings: SFTConfig, seed: int) -> Iterator[list[SFTExample]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.epochs):
        order = torch.randperm(len(sequences), generator=generator).tolist()
        for window in _fill([sequences[i] for i in order], SORTED_UPDATES * settings.tokens_per_update):
            batches = list(_fill(sorted(window, key=len, reverse=True), settings.tokens_per_update))
            for i in torch.randperm(len(batches), generator=generator).tolist():
                yield batches[i]


def _fill(sequences: Sequence[SFTExample], budget: int) -> Iterator[list[SFTExample]]:
    batch: list[SFTExample] = []
    used = 0
    for sequence in sequences:
        if batch and used + len(sequence) > budget:
            yield batch
            batch, used = [], 0
        batch.append(sequence)
        used += len(sequence)
    if batch:
        yield batch
