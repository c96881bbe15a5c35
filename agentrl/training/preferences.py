"""Learning from pairs of episodes: DPO and its kin, through the same ledger, masks and batches as other training.

A loss on pairs reads sums of log-probabilities over whole episodes, so that its gradient needs all tokens of a pair at
once. It is computed in two passes, and a pair may be cut into any micro-batches: a first one without gradient gives the
sums, and from them the derivative of the loss by each sum; the second one propagates these derivatives.

The reference is the model at the start, whose sums are computed once: there is no second model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.algorithms.off_policy_losses import PreferencePairs
from agentrl.algorithms.traits import other_input
from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.config import TrainerConfig
from agentrl.errors import ConfigError, TrainingError, UsageError
from agentrl.image import ImageReader
from agentrl.registry import Kind, lookup
from agentrl.training.compile import compile_layers, gradients_recomputed
from agentrl.training.distributed import Ranks
from agentrl.training.forward.runner import ModelRunner, make_runner
from agentrl.training.forward.sequences import ScoredSequence, scored_sequence
from agentrl.training.objective import bind
from agentrl.training.optimizer import LearningProgress, OptimizerSettings, PolicyOptimizer
from agentrl.trajectory import Source, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two episodes of one task."""

    better: Trajectory
    worse: Trajectory


def make_pairs(
    trajectories: Iterable[Trajectory], *, by: Literal["rewards", "demonstrations"], per_task: int
) -> list[Pair]:
    """Pair the episodes of each task and seed; infrastructure failures and episodes without a reward are left out.

    An episode is in one pair at most.

    Args:
        trajectories: Of any tasks, in any order.
        by: ``rewards``: the best with the worst, the second best with the second worst, while their rewards differ.
            ``demonstrations``: a demonstration with a sampled episode, whatever the rewards.
        per_task: Most pairs of a task.

    Raises:
        UsageError: there is no pair.
    """
    tasks: dict[tuple[str, str, int], list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.outcome is not None and trajectory.outcome.is_trainable and answered(trajectory):
            tasks.setdefault((trajectory.environment, trajectory.task_id, trajectory.seed), []).append(trajectory)
    make = _by_reward if by == "rewards" else _by_demonstration
    pairs = [pair for members in tasks.values() for pair in make(members)[:per_task]]
    if not pairs:
        raise UsageError(
            "there is no pair of episodes to learn from",
            got=f"{sum(map(len, tasks.values()))} episodes of {len(tasks)} tasks",
            expected="two episodes of one task whose rewards differ"
            if by == "rewards"
            else "a demonstration and a sampled episode of one task",
            hint="take the trajectories of a run that trains groups"
            if by == "rewards"
            else "give both sources: --from RUN_OF_SFT --from RUN_OF_TRAIN, of the same tasks and seed",
        )
    return pairs


def _by_reward(members: Sequence[Trajectory]) -> list[Pair]:
    ranked = sorted((t for t in members if t.reward is not None), key=lambda t: -_reward(t))
    half = len(ranked) // 2
    both = zip(ranked[:half], reversed(ranked[-half:] if half else []), strict=True)
    return [Pair(better=good, worse=bad) for good, bad in both if _reward(good) > _reward(bad)]


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None
    return trajectory.reward


def _by_demonstration(members: Sequence[Trajectory]) -> list[Pair]:
    shown = [t for t in members if not t.sampled_tokens]
    sampled = [t for t in members if t.sampled_tokens]
    return [Pair(better=good, worse=bad) for good, bad in zip(shown, sampled, strict=False)]


def answered(trajectory: Trajectory) -> list[ScoredSequence]:
    """The sequences of an episode with answers of their own: what was sampled, or demonstrated where nothing was."""
    source = Source.SAMPLED if trajectory.sampled_tokens else Source.FORCED
    found = []
    for sequence in trajectory.sequences:
        wanted = np.equal(sequence.sources, source)
        wanted[: max(sequence.shared, 1)] = False
        if wanted.any():
            found.append(scored_sequence(sequence.token_ids, wanted, sequence.images))
    return found


ON_PAIRS = "(PreferencePairs)"


def preference_loss(settings: PreferencesConfig) -> Callable[[PreferencePairs], torch.Tensor]:
    """The loss of a config.

    Raises:
        ConfigError: it is no loss on pairs, or does not take the options.
        UnknownNameError: there is none of that name.
    """
    loss = lookup(Kind.LOSS, settings.loss)
    takes = other_input(loss) or "episodes"
    if not takes.endswith(ON_PAIRS):
        raise ConfigError(
            f"the loss {settings.loss} does not learn from pairs of episodes",
            got=f"a loss on {takes}",
            expected="preferences.loss=dpo, spin, or a function marked with takes('… (PreferencePairs)')",
        )
    bound: Callable[[PreferencePairs], torch.Tensor] = bind("loss", settings.loss, loss, settings.loss_options)
    return bound


def train_preferences(
    model: PreTrainedModel,
    pairs: Sequence[Pair],
    settings: PreferencesConfig,
    trainer: TrainerConfig,
    *,
    seed: int,
    pad_id: int,
    progress: Callable[[LearningProgress], None] = lambda _: None,
    image_processor: ImageReader | None = None,
    ranks: Ranks | None = None,
) -> LearningProgress:
    """Train `model` in place; as it is now, it is the reference. All ranks must, with the same arguments.

    `progress` is called after every optimizer step; the order of the pairs depends on `seed`.

    Returns:
        The state after the last step.
    """
    if not pairs:
        raise TrainingError("there is nothing to learn", got="no pairs")
    compile_layers(model, trainer)
    loss = preference_loss(settings)
    sides = _Sides(
        make_runner(model, trainer, ranks=ranks, image_processor=image_processor),
        [answered(side) for pair in pairs for side in (pair.better, pair.worse)],
        {"temperature": 1.0, "pad_id": pad_id},
    )
    batches = list(pair_batches(len(pairs), settings, seed))
    optimizer = PolicyOptimizer(model, OptimizerSettings.of(trainer, settings, total_updates=len(batches)))
    started = time.perf_counter()
    reference = sides.sums(range(len(pairs)))
    for number, batch in enumerate(batches, start=1):
        with gradients_recomputed(model, enabled=trainer.gradient_checkpointing):
            value, gain = sides.backward(batch, reference[batch], loss)
        latest = LearningProgress.after(
            optimizer.update(),
            number=number,
            updates=len(batches),
            loss=value,
            started=started,
            # of log pi / pi_ref of each episode, in nats, before the step
            accuracy=float((gain[:, 0] > gain[:, 1]).double().mean()),
            better_gain=float(gain[:, 0].mean()),
            worse_gain=float(gain[:, 1].mean()),
        )
        progress(latest)
    return latest


def pair_batches(count: int, settings: PreferencesConfig, seed: int) -> Iterator[list[int]]:
    """Give the numbers of the pairs of each update, in random order."""
    generator, size = torch.Generator().manual_seed(seed), settings.pairs_per_update
    for _ in range(settings.epochs):
        order = torch.randperm(count, generator=generator).tolist()
        yield from (order[first : first + size] for first in range(0, len(order), size))


@dataclass(frozen=True, slots=True)
class _Sides:
    """The episodes of pairs, as a model reads them."""

    runner: ModelRunner
    episodes: list[list[ScoredSequence]]
    """The sequences of each pair's better episode, then of its worse one: pair p is at 2 p and 2 p + 1."""
    reading: dict[str, Any]

    def backward(
        self, batch: list[int], reference: torch.Tensor, loss: Callable[[PreferencePairs], torch.Tensor]
    ) -> tuple[float, torch.Tensor]:
        """Add the gradient of the mean loss; gives it, and log pi / pi_ref of the episodes: float64 [pairs, 2]."""
        sums = self.sums(batch).requires_grad_()
        value = loss(
            PreferencePairs(
                chosen_logp=sums[:, 0],
                rejected_logp=sums[:, 1],
                chosen_reference_logp=reference[:, 0],
                rejected_reference_logp=reference[:, 1],
            )
        ).mean()
        if not bool(value.isfinite()):
            raise TrainingError(
                "the loss on pairs is not finite", got=float(value), hint="try a smaller preferences.learning_rate"
            )
        (by_sum,) = torch.autograd.grad(value, sums)
        sequences, owner = self._laid_out(batch)
        lengths = torch.tensor([sequence.targets.numel() for sequence in sequences])
        by_logp = by_sum.flatten()[owner].float().repeat_interleave(lengths)
        self.runner.backward_logprobs(sequences, by_logp, **self.reading)
        return float(value.detach()), (sums - reference).detach()

    def _laid_out(self, batch: Sequence[int]) -> tuple[list[ScoredSequence], torch.Tensor]:
        """The sequences of some pairs, and the place of each in the flattened sums [pairs, 2]: int64 [sequences]."""
        sides = [self.episodes[2 * pair + side] for pair in batch for side in (0, 1)]
        owner = [place for place, side in enumerate(sides) for _ in side]
        return [sequence for side in sides for sequence in side], torch.tensor(owner)

    def sums(self, batch: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of the better and the worse episodes of some pairs: float64 [pairs, 2]."""
        sequences, owner = self._laid_out(batch)
        scores = self.runner.logprobs(sequences, **self.reading)
        lengths = torch.tensor([sequence.targets.numel() for sequence in sequences])
        sums = torch.zeros(2 * len(batch), dtype=torch.float64)
        return sums.index_add(0, owner.repeat_interleave(lengths), scores.logp.double().cpu()).view(-1, 2)
