"""Learning from pairs of episodes (DPO and related losses), with the same ledger, masks and batches as other training.

A loss on pairs reads sums of log-probabilities over whole episodes, so its gradient needs all tokens of a pair at once.
Two passes allow any division of a pair into micro-batches: the first, without gradients, computes the sums and the
derivative of the loss with respect to each sum; the second backpropagates these derivatives.

The reference is the initial model, whose sums are computed once, so there is no second model.
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
from agentrl.message.image import ImageReader
from agentrl.registry import Kind, lookup
from agentrl.reward import rewards_differ
from agentrl.training.algorithm_functions import bind
from agentrl.training.compile import checkpoint_activations, compile_layers
from agentrl.training.distributed import Ranks
from agentrl.training.forward.runner import ModelRunner, make_runner
from agentrl.training.forward.sequences import ScoredSequence, scored_sequence
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
    """Pair the episodes of each task and seed; each episode is in at most one pair.

    Episodes without a valid outcome are skipped, as are those without a reward if `by` is ``rewards``.

    Args:
        trajectories: Trajectories of any tasks, in any order.
        by: ``rewards`` pairs the best with the worst, the second best with the second worst, and so on while their
            rewards differ. ``demonstrations`` pairs a demonstration with a sampled episode, whatever their rewards.
        per_task: Maximum number of pairs of a task.

    Raises:
        UsageError: no pair was found.
    """
    tasks: dict[tuple[str, str, int], list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.outcome is not None and trajectory.outcome.is_trainable and answer_sequences(trajectory):
            tasks.setdefault((trajectory.environment, trajectory.task_id, trajectory.seed), []).append(trajectory)
    make = _by_reward if by == "rewards" else _by_demonstration
    pairs = [pair for members in tasks.values() for pair in make(members)[:per_task]]
    if not pairs:
        raise UsageError(
            "no pairs of episodes to learn from",
            got=f"{sum(map(len, tasks.values()))} episodes of {len(tasks)} tasks",
            expected="two episodes of one task whose rewards differ"
            if by == "rewards"
            else "a demonstration and a sampled episode of one task",
            hint="use the trajectories of a run that trains on groups"
            if by == "rewards"
            else "pass both sources, of the same tasks and seed: --from RUN_OF_SFT --from RUN_OF_TRAIN",
        )
    return pairs


def _by_reward(members: Sequence[Trajectory]) -> list[Pair]:
    ranked = sorted((t for t in members if t.reward is not None), key=lambda t: -_reward(t))
    half = len(ranked) // 2
    both = zip(ranked[:half], reversed(ranked[-half:] if half else []), strict=True)
    return [Pair(better=good, worse=bad) for good, bad in both if rewards_differ([_reward(good), _reward(bad)])]


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None
    return trajectory.reward


def _by_demonstration(members: Sequence[Trajectory]) -> list[Pair]:
    demonstrations = [t for t in members if not t.sampled_tokens]
    sampled = [t for t in members if t.sampled_tokens]
    return [Pair(better=good, worse=bad) for good, bad in zip(demonstrations, sampled, strict=False)]


def answer_sequences(trajectory: Trajectory) -> list[ScoredSequence]:
    """Return an episode's sequences with their own answers: sampled tokens, or forced ones if nothing was sampled."""
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
    """Return the configured loss on pairs, with its options bound.

    Raises:
        ConfigError: the loss is not a loss on pairs, or does not take the options.
        UnknownNameError: the loss is not registered.
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
    """Train `model` in place; its initial state is the reference. All ranks must call this with the same arguments.

    `progress` is called after every optimizer step; `seed` determines the order of the pairs.

    Returns:
        The state after the last step.
    """
    if not pairs:
        raise TrainingError("no pairs to learn from", expected="at least one pair of episodes")
    compile_layers(model, trainer)
    loss = preference_loss(settings)
    sides = _Sides(
        make_runner(model, trainer, ranks=ranks, image_processor=image_processor),
        [answer_sequences(side) for pair in pairs for side in (pair.better, pair.worse)],
        {"temperature": 1.0, "pad_id": pad_id},
    )
    batches = list(pair_batches(len(pairs), settings, seed))
    optimizer = PolicyOptimizer(model, OptimizerSettings.of(trainer, settings, total_updates=len(batches)))
    started = time.perf_counter()
    reference = sides.sums(range(len(pairs)))
    for number, batch in enumerate(batches, start=1):
        with checkpoint_activations(model, enabled=trainer.gradient_checkpointing):
            value, gain = sides.backward(batch, reference[batch], loss)
        latest = LearningProgress.after(
            optimizer.update(),
            number=number,
            updates=len(batches),
            loss=value,
            started=started,
            # from log pi / pi_ref of each episode, in nats, before the step
            accuracy=float((gain[:, 0] > gain[:, 1]).double().mean()),
            better_gain=float(gain[:, 0].mean()),
            worse_gain=float(gain[:, 1].mean()),
        )
        progress(latest)
    return latest


def pair_batches(count: int, settings: PreferencesConfig, seed: int) -> Iterator[list[int]]:
    """Yield the indices of the pairs of each update, in random order."""
    generator, size = torch.Generator().manual_seed(seed), settings.pairs_per_update
    for _ in range(settings.epochs):
        order = torch.randperm(count, generator=generator).tolist()
        yield from (order[first : first + size] for first in range(0, len(order), size))


@dataclass(frozen=True, slots=True)
class _Sides:
    """Episodes of pairs, as sequences that a model scores."""

    runner: ModelRunner
    episodes: list[list[ScoredSequence]]
    """Sequences of each pair's better episode, at index 2 p for pair p, and of its worse one, at 2 p + 1."""
    reading: dict[str, Any]

    def backward(
        self, batch: list[int], reference: torch.Tensor, loss: Callable[[PreferencePairs], torch.Tensor]
    ) -> tuple[float, torch.Tensor]:
        """Add the gradient of the mean loss; return the loss and the episodes' log pi / pi_ref: float64 [pairs, 2]."""
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
        sequences, owner = self._lay_out(batch)
        lengths = torch.tensor([sequence.targets.numel() for sequence in sequences])
        by_logp = by_sum.flatten()[owner].float().repeat_interleave(lengths)
        self.runner.backward_logprobs(sequences, by_logp, **self.reading)
        return float(value.detach()), (sums - reference).detach()

    def _lay_out(self, batch: Sequence[int]) -> tuple[list[ScoredSequence], torch.Tensor]:
        """Return the sequences of some pairs, and their indices in the flattened sums [pairs, 2]: int64 [sequences]."""
        sides = [self.episodes[2 * pair + side] for pair in batch for side in (0, 1)]
        owner = [index for index, side in enumerate(sides) for _ in side]
        return [sequence for side in sides for sequence in side], torch.tensor(owner)

    def sums(self, batch: Sequence[int]) -> torch.Tensor:
        """Compute log-probabilities of the better and the worse episode of some pairs: float64 [pairs, 2]."""
        sequences, owner = self._lay_out(batch)
        scores = self.runner.logprobs(sequences, **self.reading)
        lengths = torch.tensor([sequence.targets.numel() for sequence in sequences])
        sums = torch.zeros(2 * len(batch), dtype=torch.float64)
        return sums.index_add(0, owner.repeat_interleave(lengths), scores.logp.double().cpu()).view(-1, 2)
