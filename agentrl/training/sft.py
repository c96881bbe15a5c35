"""Supervised warm start: cross-entropy on demonstrations, through the same ledger, masks and batches as training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.config.schema import SFTConfig, TrainerConfig
from agentrl.errors import TrainingError
from agentrl.image import ImageReader
from agentrl.lanes import Lanes, check_lanes
from agentrl.training.compilation import compile_layers
from agentrl.training.gradient_mode import gradients_recomputed
from agentrl.training.layout import Layout, choose_layout
from agentrl.training.logprobs import score
from agentrl.training.lora import adapters_dropped_out
from agentrl.training.micro_batch_gradients import add_gradients, cut
from agentrl.training.optimizer import OptimizerSettings, PolicyOptimizer, Update
from agentrl.training.sequences import ScoredSequence, scored_sequence
from agentrl.trajectory import Source, Trajectory

SORTED_UPDATES = 16
"""Optimizer steps whose sequences are sorted by length together, so that little is padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTProgress:
    """Where a warm start is, after an optimizer step."""

    update: int
    """From 1."""
    updates: int
    """Of the whole warm start."""
    loss: float
    """Weighted mean cross-entropy of this step's tokens, in nats."""
    grad_norm: float
    learning_rate: float
    tokens: int
    """Tokens read so far, observations included, padding not."""
    seconds: float
    """Since the start."""
    non_finite: tuple[str, ...] = ()
    """Parameters whose gradient was not finite; the step changed nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A sequence to learn."""

    scored: ScoredSequence
    answers: torch.Tensor
    """Which targets the agent wrote: bool [targets]."""

    def __len__(self) -> int:
        return len(self.scored)

    def weights(self, observation_weight: float) -> torch.Tensor:
        """Weight of each target in the loss: float32 [targets]."""
        return torch.where(self.answers, 1.0, observation_weight)


def train_supervised(
    model: PreTrainedModel,
    demonstrations: Sequence[Trajectory],
    settings: SFTConfig,
    trainer: TrainerConfig,
    *,
    seed: int,
    pad_id: int,
    progress: Callable[[SFTProgress], None] = lambda _: None,
    enough: Callable[[SFTProgress], bool] = lambda _: False,
    reader: ImageReader | None = None,
) -> SFTProgress:
    """Train `model` in place on what somebody else, or a better policy, did.

    Args:
        model: As `agentrl.training.model.load_model` gives it.
        demonstrations: Their forced and sampled tokens are learnt; with `settings.observation_weight` all tokens
            after the first of each sequence, the others with a weight that falls linearly to 0.
        settings: Data, learning rate.
        trainer: Micro-batches, optimizer, clipping.
        seed: Seed of the order of sequences.
        pad_id: Any id of the vocabulary.
        progress: Called after every optimizer step.
        enough: Asked after every optimizer step whether to stop.
        reader: Prepares images; needed where demonstrations hold any.

    Returns:
        The state after the last step.

    Raises:
        TrainingError: no demonstration has a token to learn, or the loss is not finite.
    """
    lessons = list(_lessons(demonstrations, everything=settings.observation_weight > 0))
    batches = list(_batches(lessons, settings, seed))
    compile_layers(model, trainer)
    optimizer = PolicyOptimizer(model, _optimizer_settings(settings, trainer, updates=len(batches)))
    check_lanes("trainer.lanes", trainer.lanes, model)
    lanes, layout = Lanes(trainer.lanes), choose_layout(model, trainer)
    started, tokens, latest = time.perf_counter(), 0, None
    for number, batch in enumerate(batches, start=1):
        observation_weight = settings.observation_weight * (1 - (number - 1) / len(batches))
        with gradients_recomputed(model, enabled=trainer.gradient_checkpointing), adapters_dropped_out(model):
            loss = _backward(model, lanes, batch, layout, pad_id, observation_weight, reader)
        tokens += sum(len(sequence) for sequence in batch)
        latest = _report(optimizer.update(), number, len(batches), loss, tokens, started)
        progress(latest)
        if enough(latest):
            break
    if latest is None:
        raise TrainingError("there is nothing to learn", got=f"{len(demonstrations)} demonstrations without answers")
    return latest


def _lessons(demonstrations: Sequence[Trajectory], *, everything: bool) -> Iterator[Lesson]:
    for sequence in (sequence for demonstration in demonstrations for sequence in demonstration.sequences):
        answers = np.isin(sequence.sources, (Source.SAMPLED, Source.FORCED))
        answers[: max(sequence.shared, 1)] = False
        wanted = answers.copy()
        if everything:
            wanted[max(sequence.shared, 1) :] = True
            wanted &= sequence.sources != Source.MISTAKE
            for image in sequence.images:  # nobody can tell what stands for an image
                wanted[image.start : image.end] = False
        if answers.any():
            scored = scored_sequence(sequence.token_ids, wanted, sequence.images)
            yield Lesson(scored=scored, answers=torch.from_numpy(answers[wanted]))


def _batches(sequences: list[Lesson], settings: SFTConfig, seed: int) -> Iterator[list[Lesson]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.epochs):
        order = torch.randperm(len(sequences), generator=generator).tolist()
        for window in _fill([sequences[i] for i in order], SORTED_UPDATES * settings.tokens_per_update):
            batches = list(_fill(sorted(window, key=len, reverse=True), settings.tokens_per_update))
            for i in torch.randperm(len(batches), generator=generator).tolist():
                yield batches[i]


def _fill(sequences: Sequence[Lesson], budget: int) -> Iterator[list[Lesson]]:
    batch: list[Lesson] = []
    used = 0
    for sequence in sequences:
        if batch and used + len(sequence) > budget:
            yield batch
            batch, used = [], 0
        batch.append(sequence)
        used += len(sequence)
    if batch:
        yield batch


def _backward(
    model: PreTrainedModel,
    lanes: Lanes,
    batch: list[Lesson],
    layout: Layout,
    pad_id: int,
    observation_weight: float,
    reader: ImageReader | None,
) -> float:
    weight = float(sum(lesson.weights(observation_weight).sum() for lesson in batch))

    def loss(indices: list[int]) -> tuple[torch.Tensor, None]:
        part = [batch[i] for i in indices]
        own = [lesson.scored for lesson in part]
        scores = score(model, own, temperature=1.0, pad_id=pad_id, layout=layout, reader=reader)
        weights = torch.cat([lesson.weights(observation_weight) for lesson in part]).to(scores.logp.device)
        return -(weights * scores.logp).sum() / weight, None

    scored = [lesson.scored for lesson in batch]
    work = cut(range(len(batch)), scored, layout=layout, workers=lanes.count, learns=True)
    total = sum(value for value, _ in add_gradients(model, lanes, work, loss))
    if not math.isfinite(total):
        raise TrainingError("the warm start's loss is not finite", got=total, hint="try a smaller sft.learning_rate")
    return total


def _report(update: Update, number: int, updates: int, loss: float, tokens: int, started: float) -> SFTProgress:
    return SFTProgress(
        update=number,
        updates=updates,
        loss=loss,
        grad_norm=update.grad_norm,
        learning_rate=update.learning_rate,
        tokens=tokens,
        seconds=time.perf_counter() - started,
        non_finite=update.non_finite,
    )


def _optimizer_settings(settings: SFTConfig, trainer: TrainerConfig, *, updates: int) -> OptimizerSettings:
    return OptimizerSettings(
        learning_rate=settings.learning_rate,
        total_updates=updates,
        warmup_updates=settings.warmup_steps,
        schedule=settings.schedule,
        optimizer=trainer.optimizer,
        betas=trainer.betas,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
    )
