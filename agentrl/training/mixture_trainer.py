"""Training on several environments with an algorithm for each (``environments.LABEL.algorithm``).

    episodes ─┬─► those of maze:   its estimator, shaping, loss ─► loss L_maze   ─┬─► sum_e w_e L_e ─► one update
              └─► those of search: …                             ─► loss L_search ─┘

The loss of an update is sum_e w_e L_e. L_e is the loss of environment e with its own algorithm, as if its episodes were
alone in the update, with denominators over its own tokens; w_e is its share of the update's episodes. Unlike in a run
with one algorithm and aggregation token-mean, an environment's share of the tokens has no effect. Gradients therefore
are the weighted sum of those of each environment alone. Models, optimizer and updates are common.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from agentrl.algorithms.aggregation import TokenOwners
from agentrl.algorithms.traits import needed_inputs
from agentrl.config.config import AlgorithmConfig, Config, TrainerConfig
from agentrl.config.derived import environment_algorithms
from agentrl.errors import ConfigError
from agentrl.observe.metrics import ENVIRONMENT_PREFIX
from agentrl.registry import Kind, lookup
from agentrl.training.adapters import combine_metric
from agentrl.training.algorithm_functions import PROVIDED
from agentrl.training.batch import NothingToTrain, StepExtras
from agentrl.training.compile import checkpoint_activations
from agentrl.training.diagnostics.watch import repeatable
from agentrl.training.dynamic_sampling import EpisodeSelection
from agentrl.training.gradients import Objective
from agentrl.training.optimizer import Update
from agentrl.training.report import StepReport
from agentrl.training.rewards import RewardShaping
from agentrl.training.signals.reference import reads_reference
from agentrl.training.trainer import PreparedStep, StepUpdates, Trainer
from agentrl.trajectory import Trajectory

COMMON_METRICS = ("train/learning_rate", "train/updates", "train/updates_skipped", "train/seconds", "train/grad_norm")
"""Prefixes of metrics of a step that are the same for all environments."""
PER_ENVIRONMENT = ("train/", "mismatch/")
"""Prefixes of metrics that are also reported for each environment."""
COMMON_SHAPING = ("kl", "distill", "ares")
"""Shapings that read models, which a run builds only for ``algorithm.shaping``."""


class WeightedObjective(Objective):
    """Objective of one environment, whose loss has a weight in each update."""

    weight = 1.0
    """w_e in the current update."""

    def weights(self, owners: TokenOwners) -> torch.Tensor:
        """Compute the weight of each token in the loss of an optimizer step: float64 [tokens]."""
        return super().weights(owners) * self.weight


class MixtureTrainer(Trainer):
    """Trainer of one model on several environments, each with its own algorithm.

    Args:
        model: Model to train; the other arguments of `Trainer` follow.
        algorithm: The run's algorithm, from which the signals are built.
        config: Optimizer and batches.
        algorithms: Algorithm of each environment by label. A step's `StepExtras.environments` names the environment of
            each group.
        max_tokens: Maximum number of tokens of a sequence.
        options: See `Trainer`.

    Raises:
        ConfigError: see `Trainer`.
        UnknownNameError: see `Trainer`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        algorithm: AlgorithmConfig,
        config: TrainerConfig,
        *,
        algorithms: Mapping[str, AlgorithmConfig],
        max_tokens: int,
        **options: Any,
    ) -> None:
        super().__init__(model, algorithm, config, max_tokens=max_tokens, **options)
        self._objectives = {label: WeightedObjective(own) for label, own in algorithms.items()}
        self._selections = {label: EpisodeSelection.of(own) for label, own in algorithms.items()}
        self._shapings = {label: RewardShaping(own.shaping, max_tokens=max_tokens) for label, own in algorithms.items()}

    @property
    def min_members(self) -> int:
        """Minimum number of trainable members of a group that provides a gradient in every environment."""
        return 2 if any(objective.compares_groups for objective in self._objectives.values()) else 1

    def write_dumps(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Do nothing: updates of several algorithms cannot be replayed."""

    def _configure(self, config: Config) -> None:
        super()._configure(config)
        for label, own in environment_algorithms(config).items():
            self._objectives[label] = WeightedObjective(own)
            self._selections[label] = EpisodeSelection.of(own)
            self._shapings[label].configure(own.shaping, max_tokens=config.agent.max_tokens)

    def _step(self, trajectories: Sequence[Trajectory], temperature: float, extras: StepExtras) -> StepReport:
        with repeatable(enabled=self._config.deterministic):
            started = time.perf_counter()
            steps = self._prepare_all(trajectories, temperature, extras)
            with checkpoint_activations(self.model, enabled=self._config.gradient_checkpointing):
                updates, losses, total = self._update(steps)
            self.steps += 1
            self._freed.release()
            seconds = time.perf_counter() - started
            reports = {
                label: self._report(step, StepUpdates(updates=updates, losses=losses[label]), seconds)
                for label, step in steps.items()
            }
            return self.watch.report(join_environments(reports, loss=total))

    def _prepare_all(
        self, trajectories: Sequence[Trajectory], temperature: float, extras: StepExtras
    ) -> dict[str, PreparedStep]:
        """Prepare the step of each environment that has episodes to train on, in the order of the config.

        Raises:
            NothingToTrain: no environment has any.
        """
        by_label: dict[str, list[Trajectory]] = {label: [] for label in self._objectives}
        for trajectory in trajectories:
            by_label[extras.environments[trajectory.group_id]].append(trajectory)
        found: dict[str, PreparedStep] = {}
        failure: NothingToTrain | None = None
        for label, own in by_label.items():
            try:
                found[label] = self._prepare(
                    own,
                    temperature,
                    extras,
                    objective=self._objectives[label],
                    shaping=self._shapings[label],
                    select_episodes=self._selections[label],
                )
            except NothingToTrain as error:
                failure = error
        if failure is not None and not found:
            raise failure
        return found

    def _update(self, steps: Mapping[str, PreparedStep]) -> tuple[list[Update], dict[str, list[float]], float]:
        """Make the updates of a step; return them, the losses L_e by environment, and the mean of sum_e w_e L_e."""
        updates, losses = list[Update](), {label: list[float]() for label in steps}
        totals: list[float] = []
        for parts in self._joint_parts(steps):
            own = {label: part for label, part in zip(steps, parts, strict=True) if part is not None}
            episodes = {label: steps[label].gradient.batch.episodes_in(part) for label, part in own.items()}
            totals.append(0.0)
            for label, part in own.items():
                weight = self._objectives[label].weight = episodes[label] / sum(episodes.values())
                value = steps[label].gradient.accumulate(part)
                losses[label].append(value / weight)
                totals[-1] += value
            last = steps[list(own)[-1]].gradient
            last.loss = totals[-1]
            updates.append(self.watch.apply(last, self._optimizer))
        return updates, losses, sum(totals) / len(totals)

    def _joint_parts(self, steps: Mapping[str, PreparedStep]) -> Iterator[tuple[list[int] | None, ...]]:
        """Yield the environments' parts of each update, epoch by epoch; ``None`` for one that has no more in an epoch.

        An environment with fewer trajectories than ``trainer.mini_batches`` has fewer parts.
        """
        epochs = self._config.epochs
        for epoch in range(epochs):
            yield from zip_longest(
                *(
                    parts[epoch * len(parts) // epochs : (epoch + 1) * len(parts) // epochs]
                    for parts in (step.gradient.batch.parts for step in steps.values())
                )
            )


def join_environments(reports: Mapping[str, StepReport], *, loss: float) -> StepReport:
    """Join the reports of a step: metrics of each environment under ``env/LABEL/``, and those of all episodes."""
    metrics = [report.metrics for report in reports.values()]
    joined: dict[str, float] = {}
    for key in dict.fromkeys(key for one in metrics for key in one):
        if key.startswith(COMMON_METRICS):
            joined[key] = metrics[0][key]
        elif key.startswith("trajectories/") or key == "train/tokens_per_s":  # all environments have the same seconds
            joined[key] = sum(one[key] for one in metrics)
        else:
            joined[key] = combine_metric(key, metrics)
    joined["train/loss"] = loss
    apart = {
        f"{ENVIRONMENT_PREFIX}{label}/{key}": value
        for label, report in reports.items()
        for key, value in report.metrics.items()
        if key.startswith(PER_ENVIRONMENT) and not key.startswith(COMMON_METRICS)
    }
    warnings = tuple(f"environment {label}: {text}" for label, report in reports.items() for text in report.warnings)
    tokens = tuple(tokens for report in reports.values() for tokens in report.tokens)
    return StepReport(metrics={**joined, **apart}, warnings=warnings, tokens=tokens)


def check_mixture(config: Config) -> None:
    """Check that environments with their own algorithms need only parts that they can share.

    Raises:
        ConfigError: an algorithm of an environment needs a model or a rollout that must be common, or a feature does
            not work with several algorithms.
        UnknownNameError: an estimator, loss, filter or shaping is not registered.
    """
    algorithms = environment_algorithms(config)
    if not algorithms:
        return
    _check_features(config)
    for label, own in algorithms.items():
        Objective(own)
        RewardShaping(own.shaping, max_tokens=config.agent.max_tokens)
        needed = needed_inputs(lookup(Kind.ADVANTAGE, own.advantage)) | needed_inputs(lookup(Kind.LOSS, own.loss))
        refused = [part.value for part in needed - PROVIDED]
        refused += [f"the shaping {name}" for name in COMMON_SHAPING if name in own.shaping]
        if own.observation_coef:
            refused.append("algorithm.observation_coef, whose pass runs with several algorithms do not have")
        if reads_reference(own) and not reads_reference(config.algorithm):
            refused.append("a reference policy, which algorithm does not have")
        common = config.algorithm.reference
        if own.reference and common and own.reference.refresh_every != common.refresh_every:
            refused.append("its own reference.refresh_every, although the environments share the reference policy")
        if refused:
            raise ConfigError(
                f"the algorithm of environment {label} needs a part that runs with several algorithms do not support",
                got=", ".join(sorted(refused)),
                expected="estimators, losses and shapings that read only episodes and log-probabilities",
                hint=f"change environments.{label}.algorithm, or remove the algorithms of single environments",
            )


def _check_features(config: Config) -> None:
    trainer, algorithm = config.trainer, config.algorithm
    excluded = {
        "trainer.critic": trainer.critic,
        "trainer.process_reward": trainer.process_reward,
        "trainer.moe": trainer.moe,
        "trainer.max_kl": trainer.max_kl,
        "trainer.mini_batch_rows": trainer.mini_batch_rows,
        "algorithm.teacher": algorithm.teacher,
        "algorithm.expert": algorithm.expert,
        "adapters": config.adapters,
    }
    for key, value in excluded.items():
        if value:
            raise ConfigError(
                f"{key} does not work with several algorithms",
                got=f"{key} with environments.{next(_with_own(config))}.algorithm",
                expected=f"no {key}, or one algorithm for all environments",
            )


def _with_own(config: Config) -> Iterator[str]:
    return (label for label, entry in config.environments.items() if entry.algorithm)
