"""The trainer: trajectories in, new weights out.

One step, in order:

    trajectories ─► select ─► step_batch (shaped rewards) ─► signals annotate the batch ─► advantages
                                  │
                       pi_old ◄───┤   (no gradient; only if the training forward pass cannot provide it)
                                  ▼
          epochs x mini_batches: micro-batches ─► loss ─► backward, then one update (of signals' models, too)
                                  │
                                  ▼
                              StepReport

pi_old is the policy at the start of the step. Before the first update, the policy *is* pi_old, so the first mini-batch
takes log pi_old from its own forward pass. The other mini-batches are scored before that update.

With several ranks (`agentrl.training.distributed`), each rank has its own trainer and computes its share of the
micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from agentrl.config.config import AlgorithmConfig, Config, TrainerConfig
from agentrl.config.trainer import NumericsConfig
from agentrl.errors import UsageError
from agentrl.message.image import ImageReader
from agentrl.models.memory import FREED_SHARE, FreedMemory, memory_limit
from agentrl.training.algorithm_functions import check_mini_batch_rows
from agentrl.training.batch import (
    StepBatch,
    StepExtras,
    mini_batches,
    row_batches,
    select,
    skipped_metrics,
    step_batch,
)
from agentrl.training.checkpoint import TrainerCheckpoint, TrainerState
from agentrl.training.compile import checkpoint_activations, compile_layers
from agentrl.training.diagnostics.watch import NumericsWatch, prepare_repeatable, repeatable
from agentrl.training.distributed import Ranks
from agentrl.training.dynamic_sampling import EpisodeSelection, check_selection
from agentrl.training.forward.runner import make_runner
from agentrl.training.gradients import GradientPass, Objective, needs_forward_pass, score_ahead
from agentrl.training.moe import moe_hooks
from agentrl.training.optimizer import OptimizerSettings, PolicyOptimizer, Update
from agentrl.training.report import StepReport, step_report
from agentrl.training.rewards import RewardShaping
from agentrl.training.roles import has_roles, role_extras, role_members, role_metrics, weigh_by_role
from agentrl.training.signals import (
    JoinedUpdates,
    SignalSetup,
    SignalUpdates,
    build_signals,
    check_signals,
)
from agentrl.training.signals.critic import joins_policy, pretrain_steps
from agentrl.training.token_record import reasons_not_trained, token_columns
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """Passes of a step's updates, before the first one."""

    gradient: GradientPass
    signals: Sequence[SignalUpdates]
    """Updates of signals' models, made together with the policy's."""
    left_out: Mapping[str, float]
    """Metrics of the groups and episodes that do not train."""


@dataclass(slots=True)
class StepUpdates:
    """Updates of a step, with their losses and metrics."""

    updates: list[Update] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Policy loss before each update, including an update that ``trainer.max_kl`` prevented."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of ``trainer.max_kl``, by final name."""


def take_updates(
    gradient: GradientPass,
    optimizer: PolicyOptimizer,
    watch: NumericsWatch,
    *,
    signals: Sequence[SignalUpdates],
    max_kl: float | None,
) -> StepUpdates:
    """Train the policy and the signals' models; stop the policy when its KL to pi_old exceeds `max_kl`."""
    taken, stopped, parts = StepUpdates(), False, gradient.batch.parts
    for part in parts:
        for signal in signals:
            if not (signal.joins_policy and stopped):
                signal.accumulate(part)
        if not stopped:
            taken.losses.append(gradient.accumulate(part))
            stopped = max_kl is not None and gradient.kl_old > max_kl
            if not stopped:
                taken.updates.append(watch.apply(gradient, optimizer))
            else:
                gradient.model.zero_grad(set_to_none=True)
                taken.metrics["train/kl_stop"] = gradient.kl_old
        for signal in signals:
            if signal.joins_policy and stopped:
                signal.leave_out()
            else:
                signal.update()
    if max_kl is not None:
        taken.metrics["train/updates_left_out"] = float(len(parts) - len(taken.updates))
    return taken


def pretrain_signals(gradient: GradientPass, signals: Sequence[SignalUpdates]) -> StepUpdates:
    """Train the signals' models only; the policy's metrics are computed, but it is not updated."""
    parts = gradient.batch.parts
    taken = StepUpdates(losses=[gradient.accumulate(sorted({sequence for part in parts for sequence in part}))])
    for part in parts:
        for signal in signals:
            signal.accumulate(part)
            signal.update()
    return taken


class Trainer:
    """Trainer of a model in place, so that an engine in the same process can share its weights.

        trainer = Trainer(model, config.algorithm, config.trainer, seed=0, max_tokens=config.agent.max_tokens)
        report = trainer.step(trajectories, temperature=1.0)
        trainer.checkpoint.save(folder)

    Args:
        model: Model from `agentrl.models.load.load_model`.
        algorithm: Estimator, loss, corrections.
        config: Optimizer and batches.
        seed: Seed of the mini-batches and of a loss's random choices.
        max_tokens: Maximum number of tokens of a sequence (``agent.max_tokens``), for the overlong penalty.
        signal_models: Models of signals by name (``reference``, ``teacher``, ``critic``, ``process_reward`` and
            ``process_reward_start``). Except for a teacher, a missing model is replaced by a copy of `model`. Frozen
            models are not saved in checkpoints (unless a reference is refreshed), so a resumed run must pass the same
            ones.
        image_processor: Image processor; required if trajectories contain images.
        ranks: Ranks that train together; models that several ranks share are sharded.
        roles: Roles whose tokens train; ``None`` trains on all roles.

    Raises:
        ConfigError: the algorithm's options do not fit its functions, or a signal is missing or unused.
        UnknownNameError: an estimator or loss is not registered.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        algorithm: AlgorithmConfig,
        config: TrainerConfig,
        *,
        seed: int,
        max_tokens: int,
        signal_models: Mapping[str, PreTrainedModel] | None = None,
        image_processor: ImageReader | None = None,
        ranks: Ranks | None = None,
        roles: Set[str] | None = None,
    ) -> None:
        check_signals(algorithm, config)
        self.model = model
        self.ranks = ranks or Ranks()
        self.steps = 0
        self._config, self._seed, self._role_weights = config, seed, algorithm.role_weights
        self._roles = roles
        prepare_repeatable(enabled=config.deterministic)
        self._objective = Objective(algorithm, joint_loss=joins_policy(config))
        self._shaping = RewardShaping(algorithm.shaping, max_tokens=max_tokens)
        self._select_episodes = EpisodeSelection.of(algorithm)
        compile_layers(model, config)
        settings = _optimizer_settings(config, first_step=pretrain_steps(config))
        self._optimizer = PolicyOptimizer(model, settings)
        self._generator = torch.Generator().manual_seed(seed)
        self._freed = FreedMemory(memory_limit() // FREED_SHARE // self.ranks.count)
        self.watch = NumericsWatch(config.numerics or NumericsConfig(), self.ranks, self._generator)
        self._policy = make_runner(model, config, ranks=self.ranks, image_processor=image_processor)
        setup = SignalSetup(
            policy=self._policy,
            algorithm=algorithm,
            config=config,
            shaping=self._shaping,
            optimizer=_optimizer_settings(config),
            models=signal_models or {},
        )
        self.signals = build_signals(setup)
        """Signals by name, in the order in which they annotate a batch."""
        self._hooks = moe_hooks(self._policy, config, signals=self.signals.values())
        state = TrainerState(self._optimizer, {name: signal.state() for name, signal in self.signals.items()})
        self.checkpoint = TrainerCheckpoint(state, self._progress, self._restore_progress, self.ranks)

    @property
    def min_members(self) -> int:
        """Minimum number of trainable members of a group that provides a gradient."""
        return 2 if self._objective.compares_groups else 1

    def step(
        self, trajectories: Sequence[Trajectory], *, temperature: float, extras: StepExtras | None = None
    ) -> StepReport:
        """Train on the trajectories of one step: complete groups of finished episodes.

        Args:
            trajectories: Trajectories of the step; failed and unscored ones are counted and skipped.
            temperature: Sampling temperature of the trajectories.
            extras: Extra rollouts of the groups, if the algorithm needs any.

        Raises:
            TrainingError: a reward or an advantage is not finite, no trajectory can train, or a rank was lost.
            UsageError: other code in this process changed PyTorch's default dtype, in which losses are computed.
        """
        if (dtype := torch.get_default_dtype()) is not torch.float32:
            raise UsageError(
                "the default dtype of PyTorch was changed",
                got=str(dtype),
                expected="torch.float32",
                hint="an environment, tool or reward function calls torch.set_default_dtype: give its tensors a dtype, "
                "or run the environment in worker processes: environment.isolation=process",
            )
        arguments = trajectories, temperature, extras or StepExtras()
        with self.ranks.broadcast_call("step", *arguments):
            return self._step(*arguments)

    def _step(self, trajectories: Sequence[Trajectory], temperature: float, extras: StepExtras) -> StepReport:
        with repeatable(enabled=self._config.deterministic):
            started = time.perf_counter()
            step = self._prepare(
                trajectories,
                temperature,
                extras,
                objective=self._objective,
                shaping=self._shaping,
                select_episodes=self._select_episodes,
            )
            pretrain = self.pretraining
            taken = pretrain_signals(step.gradient, step.signals) if pretrain else self._take_updates(step)
            self.steps += 1
            self._freed.release()
            return self.watch.report(self._report(step, taken, time.perf_counter() - started))

    def _prepare(
        self,
        trajectories: Sequence[Trajectory],
        temperature: float,
        extras: StepExtras,
        *,
        objective: Objective,
        shaping: RewardShaping,
        select_episodes: EpisodeSelection | None,
    ) -> PreparedStep:
        """Estimate the advantages of a step's episodes, and prepare the passes of its updates."""
        learns = not self.pretraining
        if any(map(has_roles, trajectories)):  # each role's part of an episode trains separately
            extras, trajectories = role_extras(extras, trajectories), role_members(trajectories, self._roles)
        members, left_out = [*trajectories, *extras.experts], dict[str, float]()
        if select_episodes is not None:
            members, left_out = select_episodes(members, extras)
        selected = select(members, compare_groups=objective.compares_groups)
        batch = self._batch(selected, shaping, temperature, extras, whole_groups=objective.couples_episodes)
        for signal in self.signals.values():
            batch = signal.annotate(batch)
        estimate = objective.estimate(batch.episodes)
        batch = replace(batch, advantage=weigh_by_role(estimate.advantage, batch, self._role_weights))
        estimate = replace(estimate, advantage=batch.advantage)
        trained = [signal.train(batch, estimate, policy_learns=learns) for signal in self.signals.values()]
        signals = [updates for updates in trained if updates is not None]
        batch = replace(
            batch,
            needs_forward=needs_forward_pass(objective, batch),
            sample_counts=shaping.sample_counts(batch.episodes.returns, seed=batch.step_version),
        )
        ahead = score_ahead(batch, objective, self._policy, policy_learns=learns)
        joint = next((cast("JoinedUpdates", signal) for signal in signals if signal.joins_policy), None)
        gradient = GradientPass(self._policy, objective, batch, ahead, joint=joint, learns=learns, hooks=self._hooks())
        return PreparedStep(gradient=gradient, signals=signals, left_out=left_out | skipped_metrics(members, selected))

    def _batch(
        self,
        selected: Sequence[Trajectory],
        shaping: RewardShaping,
        temperature: float,
        extras: StepExtras,
        *,
        whole_groups: bool,
    ) -> StepBatch:
        """Lay out the tokens of a step and assign its sequences to updates."""
        routes = self._policy.replays_routes
        batch = step_batch(selected, shaping, experts=extras.expert_ids, routes=routes)
        batch = replace(batch, step_version=self.steps, seed=self._seed, temperature=temperature, extras=extras)
        config, generator = self._config, self._generator
        if config.mini_batch_rows is None:
            divide = partial(mini_batches, batch, config.mini_batches, generator, whole_groups=whole_groups)
        else:
            divide = partial(row_batches, batch, config.mini_batch_rows, generator)
        return replace(batch, parts=[part for _ in range(config.epochs) for part in divide()])

    def _report(self, step: PreparedStep, taken: StepUpdates, seconds: float) -> StepReport:
        """Report the metrics of a step after its updates."""
        batch, record, objective = step.gradient.batch, step.gradient.record, step.gradient.objective
        metrics = {**taken.metrics, **step.left_out, **role_metrics(batch)}
        for found in (*(each.metrics() for each in step.signals), *(each.metrics() for each in self.signals.values())):
            metrics |= found
        differing = objective.differing_groups(batch.episodes)
        masked_by, reasons = reasons_not_trained(
            batch,
            record,
            differing=differing,
            rejecters=objective.rejecters,
            updates=taken.updates,
            zero_is_idle=objective.zero_advantage_is_idle,
            pretraining=not step.gradient.learns,
        )
        return step_report(
            batch,
            record.trainer_logp,
            differing=differing,
            updates=taken.updates,
            losses=taken.losses,
            means=step.gradient.means() | metrics,
            seconds=seconds,
            columns=token_columns(batch, record, masked_by, reasons),
        )

    def configure(self, config: Config) -> None:
        """Use the options of the algorithm, the learning rate and the limits of another config from now on.

        The config differs from the one before only in keys that may change during training; see
        `agentrl.config.step_settings`.
        """
        with self.ranks.broadcast_call("configure", config):
            self._configure(config)

    def _configure(self, config: Config) -> None:
        algorithm, self._config = config.algorithm, config.trainer
        self._objective = Objective(algorithm, joint_loss=joins_policy(config.trainer))
        self._select_episodes = EpisodeSelection.of(algorithm)
        self._shaping.configure(algorithm.shaping, max_tokens=config.agent.max_tokens)
        self._role_weights = algorithm.role_weights
        self._optimizer.settings = replace(
            self._optimizer.settings,
            learning_rate=config.trainer.learning_rate,
            max_grad_norm=config.trainer.max_grad_norm,
        )

    def _take_updates(self, step: PreparedStep) -> StepUpdates:
        with checkpoint_activations(self.model, enabled=self._config.gradient_checkpointing):
            return take_updates(
                step.gradient, self._optimizer, self.watch, signals=step.signals, max_kl=self._config.max_kl
            )

    @property
    def versions(self) -> Mapping[str, int]:
        """Weight versions by adapter; empty here, because a single policy has the run's version."""
        return {}

    @property
    def sampled_versions(self) -> Mapping[str, int]:
        """Weight versions by adapter before the latest step; empty here."""
        return {}

    def write_dumps(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Dump skipped updates, with the run's config, to a folder from now on."""
        self.watch.write_dumps(folder, run)

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """Return the calls that rank 0 makes on the trainers of other ranks, by name."""
        return {"step": self._step, "configure": self._configure, **self.checkpoint.calls()}

    def _progress(self) -> dict[str, Any]:
        kl = self._shaping.kl
        coefficient = {} if kl is None else {"reward_kl_coef": torch.tensor(kl.coef, dtype=torch.float64)}
        plain = {"generator": self._generator.get_state(), "steps": self.steps, "numerics": self.watch.state()}
        return {**plain, **coefficient}

    def _restore_progress(self, progress: Mapping[str, Any]) -> None:
        self._generator.set_state(progress["generator"])
        self.steps = int(progress["steps"])
        self.watch.restore(progress["numerics"])
        if self._shaping.kl is not None:
            self._shaping.kl.coef = float(progress.get("reward_kl_coef", self._shaping.kl.coef))

    @property
    def pretraining(self) -> bool:
        """True if the next step trains only the signals' models."""
        return self.steps < pretrain_steps(self._config)


def _optimizer_settings(config: TrainerConfig, *, first_step: int = 0) -> OptimizerSettings:
    """Make the optimizer settings of a model whose training starts at `first_step`."""
    updates = (config.steps - first_step) * config.epochs * config.mini_batches
    return OptimizerSettings.of(config, config, total_updates=updates, min_lr_ratio=config.min_lr_ratio)


def check_algorithm(config: Config) -> None:
    """Check that the estimator, the loss, and their inputs and options are compatible.

    Raises:
        ConfigError: they are not, or a signal is missing or unused.
        UnknownNameError: an estimator, loss, filter or shaping is not registered.
    """
    Objective(config.algorithm)
    check_mini_batch_rows(config.algorithm, config.trainer)
    check_selection(config)
    check_signals(config.algorithm, config.trainer, has_adapters=config.model.lora is not None)
    RewardShaping(config.algorithm.shaping, max_tokens=config.agent.max_tokens)
