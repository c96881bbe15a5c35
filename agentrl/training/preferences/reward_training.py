"""Training a reward model on pairs of texts: the better one is to get the greater reward."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from agentrl.config.preferences import PreferencesConfig
from agentrl.config.schema import TrainerConfig
from agentrl.errors import TrainingError
from agentrl.lanes import Lanes
from agentrl.training.micro_batch_gradients import MicroBatch, add_gradients
from agentrl.training.models.gradient_mode import gradients_recomputed
from agentrl.training.optimizer import PolicyOptimizer
from agentrl.training.optimizer_settings import OptimizerSettings
from agentrl.training.preferences.reward_model import RewardModel
from agentrl.training.ranks.sharding import reshard
from agentrl.training.ranks.shares import share_of

CHARACTERS_PER_TOKEN = 3
"""Fewer than English has: texts are put together by an estimate of their tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPair:
    """Two texts about one task."""

    better: str
    worse: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardProgress:
    """Where the training is, after an optimizer step; rewards are those before it."""

    update: int
    """From 1."""
    updates: int
    loss: float
    accuracy: float
    """Share of pairs whose better text has the greater reward."""
    margin: float
    """Mean of the better rewards minus the worse ones."""
    grad_norm: float
    learning_rate: float
    non_finite: tuple[str, ...]
    """Parameters whose gradient was not finite; the step changed nothing."""
    seconds: float
    """Since the start."""


def bradley_terry(better: torch.Tensor, worse: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(r_better - r_worse): [pairs] from rewards [pairs] (InstructGPT, arXiv 2203.02155, equation 1)."""
    return -functional.logsigmoid(better - worse)


def train_reward_model(
    model: RewardModel,
    pairs: Sequence[TextPair],
    settings: PreferencesConfig,
    trainer: TrainerConfig,
    *,
    seed: int,
    progress: Callable[[RewardProgress], None] = lambda _: None,
) -> RewardProgress:
    """Train a reward model in place. All ranks that share it must, with the same arguments.

    Args:
        model: With an output.
        pairs: One or more.
        settings: Batches, learning rate.
        trainer: Micro-batches, optimizer, clipping.
        seed: Seed of the order of pairs.
        progress: Called after every optimizer step.

    Returns:
        The state after the last step.

    Raises:
        TrainingError: there are no pairs, or the loss is not finite.
    """
    if not pairs:
        raise TrainingError("there is nothing to learn", got="no pairs")
    size = settings.pairs_per_update
    updates = math.ceil(len(pairs) / size) * settings.epochs
    optimizer = PolicyOptimizer(model.model, OptimizerSettings.of(trainer, settings, total_updates=updates))
    generator, started, number = torch.Generator().manual_seed(seed), time.perf_counter(), 0
    latest: RewardProgress | None = None
    for _ in range(settings.epochs):
        order = torch.randperm(len(pairs), generator=generator).tolist()
        for first in range(0, len(order), size):
            number += 1
            with gradients_recomputed(model.model, enabled=trainer.gradient_checkpointing):
                scored = _backward(model, [pairs[i] for i in order[first : first + size]], trainer)
            update = optimizer.update()
            latest = RewardProgress(
                update=number,
                updates=updates,
                loss=float(scored.losses.mean()),
                accuracy=float((scored.margins > 0).double().mean()),
                margin=float(scored.margins.mean()),
                grad_norm=update.grad_norm,
                learning_rate=update.learning_rate,
                non_finite=update.non_finite,
                seconds=time.perf_counter() - started,
            )
            progress(latest)
    assert latest is not None
    return latest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """What a reward model said of some pairs; float32 [pairs] each."""

    losses: torch.Tensor
    margins: torch.Tensor


def _backward(model: RewardModel, batch: Sequence[TextPair], trainer: TrainerConfig) -> _Scored:
    """Add the gradient of the mean loss of some pairs."""

    def loss(pairs: list[int]) -> tuple[torch.Tensor, list[tuple[float, float]]]:
        texts = [text for pair in pairs for text in (batch[pair].better, batch[pair].worse)]
        rewards = model.rewards(texts).view(-1, 2)
        losses = bradley_terry(rewards[:, 0], rewards[:, 1])
        margins = (rewards[:, 0] - rewards[:, 1]).detach()
        return losses.sum() / len(batch), list(zip(losses.tolist(), margins.tolist(), strict=True))

    ranks = model.ranks
    own = share_of(_micro_batches(batch, trainer.tokens_per_micro_batch), rank=ranks.rank, ranks=ranks.count)
    found = add_gradients(model.model, Lanes(1), own, loss, every_time=trainer.fsdp.reduce)
    reshard(model.model)
    losses, margins = zip(
        *(pair for part in ranks.collect([pairs for _, pairs in found]) for pair in part), strict=True
    )
    if not all(map(math.isfinite, losses)):
        raise TrainingError("the reward model's loss is not finite", hint="try a smaller preferences.learning_rate")
    return _Scored(losses=torch.tensor(losses), margins=torch.tensor(margins))


def _micro_batches(batch: Sequence[TextPair], budget: int) -> list[MicroBatch]:
    """Pairs of similar length together, within a budget of tokens, padding included."""
    sizes = [max(len(pair.better), len(pair.worse)) for pair in batch]
    parts: list[MicroBatch] = []
    room = 0
    for place in sorted(range(len(batch)), key=lambda place: -sizes[place]):
        tokens = 2 * max(1, sizes[place] // CHARACTERS_PER_TOKEN)
        if room == 0:
            parts.append(MicroBatch([], learns=True, tokens=0, cost=0))
            room = max(1, budget // tokens)
        last = parts[-1]
        parts[-1] = replace(
            last, sequences=[*last.sequences, place], tokens=last.tokens + tokens, cost=last.cost + tokens
        )
        room -= 1
    return parts
