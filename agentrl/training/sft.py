"""Supervised warm start: cross-entropy on demonstrations, with the same ledger, masks and batches as RL training."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.config.config import TrainerConfig
from agentrl.config.trainer import SFTConfig
from agentrl.errors import TrainingError
from agentrl.message.image import ImageReader
from agentrl.models.lora import adapter_dropout
from agentrl.training.distributed import Ranks
from agentrl.training.forward.runner import SumsByName, make_runner
from agentrl.training.forward.sequences import ScoredSequence, scored_sequence
from agentrl.training.learner import Learner
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


class SupervisedLearner(Learner[list[SFTExample]]):
    """Trainer of a model in place on demonstrations of an expert or a better policy; every rank has one.

    Args:
        model: Model from `agentrl.models.load.load_model`, or a sharded one.
        demonstrations: Trajectories whose forced and sampled tokens are learned. With `settings.observation_weight`,
            the other tokens after the first of each sequence are learned as well, with a weight that falls linearly
            to 0.
        settings: Data and learning rate.
        trainer: Micro-batches, optimizer, clipping.
        seed: Seed of the order of sequences, and of the adapters' dropout.
        image_processor: Image processor; required if demonstrations contain images.
        ranks: Ranks that train together.

    Raises:
        TrainingError: no demonstration has a token to learn.
    """

    data, section = "demonstrations", "sft"

    def __init__(
        self,
        model: PreTrainedModel,
        demonstrations: Sequence[Trajectory],
        settings: SFTConfig,
        trainer: TrainerConfig,
        *,
        seed: int,
        image_processor: ImageReader | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        examples = list(_examples(demonstrations, everything=settings.observation_weight > 0))
        if not examples:
            raise TrainingError(
                "no tokens to learn from",
                got=f"{len(demonstrations)} demonstrations without answers",
                expected="at least one forced or sampled token",
            )
        super().__init__(model, list(_batches(examples, settings, seed)), settings, trainer, ranks or Ranks())
        self._observation_weight, self._seed = settings.observation_weight, seed
        self._runner = make_runner(model, trainer, ranks=self.ranks, image_processor=image_processor)
        self._tokens = 0
        """Number of tokens learned from so far, including observations but not padding."""

    def _backward(self, batch: list[SFTExample]) -> tuple[float, dict[str, float]]:
        observation_weight = self._observation_weight * (1 - self.done / self.updates)
        weight = float(sum(example.weights(observation_weight).sum() for example in batch))
        scored = [example.scored for example in batch]

        def loss(indices: list[int], _: SumsByName) -> torch.Tensor:
            scores = self._runner.score([scored[i] for i in indices], temperature=1.0)
            weights = torch.cat([batch[i].weights(observation_weight) for i in indices]).to(scores.logp.device)
            return -(weights * scores.logp).sum() / weight

        with adapter_dropout(self.model, seed=self._dropout_seed()):
            total = self._runner.forward_backward(scored, loss).loss
        self._check_finite(total)
        self._tokens += sum(len(example) for example in batch)
        return total, {"tokens": float(self._tokens)}

    def _dropout_seed(self) -> int:
        """Return a seed for this update; ranks that compute a micro-batch together drop the same inputs."""
        return random.Random(f"{self._seed}/{self.done}/{self.ranks.dp_rank}").getrandbits(63)

    def _progress(self) -> dict[str, Any]:
        return {**super()._progress(), "tokens": self._tokens}

    def _restore(self, progress: Mapping[str, Any]) -> None:
        super()._restore(progress)
        self._tokens = int(progress["tokens"])


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
