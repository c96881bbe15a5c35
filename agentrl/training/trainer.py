"""The trainer: trajectories in, new weights out.

One step, in order:

    trajectories ─► select ─► step_batch (shaped rewards) ─► [a critic's values] ─► advantages
                                  │
          pi_old and reference ◄──┤   (no gradient; pi_old only where the training forward cannot give it)
                                  ▼
          epochs x mini_batches: micro-batches ─► loss ─► backward, then one update (of the critic, too)
                                  │
                                  ▼
                              StepReport

pi_old is the policy at the start of the step. Until the first update the policy *is* pi_old, so the first mini-batch
takes it from its own forward pass; the others are scored before that update.

With several ranks (`agentrl.training.ranks`), each has a trainer of its own, and what rank 0 is asked for all of them
do: they agree on the batch, the advantages and the micro-batches, and each computes its share of these.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from agentrl.algorithms.mismatch import mismatch
from agentrl.config.numerics import NumericsConfig
from agentrl.config.schema import AlgorithmConfig, TrainerConfig
from agentrl.errors import UsageError
from agentrl.image import ImageReader
from agentrl.lanes import Lanes, check_lanes
from agentrl.training.checkpoint import load_trainer, save_trainer
from agentrl.training.critic.checks import check_critic
from agentrl.training.critic.making import critic_step, make_critic, with_values
from agentrl.training.critic.state import PolicyAndCritic
from agentrl.training.gradient_pass import GradientPass, TokenValues, sequences_to_read
from agentrl.training.models.compilation import compile_layers
from agentrl.training.models.gradient_mode import gradients_recomputed
from agentrl.training.models.lora import adapters_off, base_is_reference
from agentrl.training.models.router_balance import RouterBalance
from agentrl.training.numerics.deterministic import prepare_repeatable, repeatable
from agentrl.training.numerics.turn_mismatch import mismatch_by_turn
from agentrl.training.numerics.watch import NumericsWatch, Step, WatchedUpdates
from agentrl.training.objective import Objective
from agentrl.training.optimizer import OptimizerSettings, PolicyOptimizer
from agentrl.training.ranks import Ranks
from agentrl.training.scoring.head_scores import TokenScores
from agentrl.training.scoring.layout import Layout, choose_layout
from agentrl.training.scoring.logprobs import score_all
from agentrl.training.scoring.replaying import replaying
from agentrl.training.scoring.sequences import ScoredSequence, scored_sequence
from agentrl.training.state_copy import StateCopies
from agentrl.training.step.batch import StepBatch, step_batch
from agentrl.training.step.guides import (
    Guides,
    own_selection,
    told_by_teacher,
    with_greedy_returns,
    with_guides,
    with_teacher_reward,
)
from agentrl.training.step.mini_batches import mini_batches
from agentrl.training.step.report import StepReport, step_report
from agentrl.training.step.rewards import RewardShaping
from agentrl.training.step.selection import select
from agentrl.training.step.updates import pretrain_critic, take_updates
from agentrl.trajectory import TokenSequence, Trajectory


class Trainer:
    """Trains a model in place, so that an engine in this process can share its weights.

        trainer = Trainer(model, config.algorithm, config.trainer, seed=0, max_tokens=config.agent.max_tokens)
        report = trainer.step(trajectories, temperature=1.0, pad_id=tokenizer.pad_token_id)
        torch.save(trainer.state_dict(), path)

    Args:
        model: As `agentrl.training.models.loading.load_model` gives it.
        algorithm: Estimator, loss, corrections.
        config: Optimizer and batches.
        seed: Seed of the mini-batches.
        max_tokens: Most tokens of a sequence (``agent.max_tokens``), for the overlong penalty.
        reference: The policy that KL is measured from; when left out, `model` without its adapters where these are all
            that is trained, and else a frozen copy of `model` as it is now. Only used where the algorithm has a KL, or
            a loss that compares with it. It is not part of `state_dict`: a resumed run hands in the same reference.
        teacher: The model of ``algorithm.teacher``, frozen, unless it has servers; not part of `state_dict` either.
        reader: Prepares images; needed where trajectories hold any.
        ranks: Train together; a model and a reference that several ranks share are in shards.
        critic: The model of a critic of its own (``trainer.critic``); a copy of `model` as it is now when left out.

    Raises:
        ConfigError: the algorithm's options do not fit its functions, or a critic is missing or of no use.
        UnknownNameError: no such estimator or loss.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        algorithm: AlgorithmConfig,
        config: TrainerConfig,
        *,
        seed: int,
        max_tokens: int,
        reference: PreTrainedModel | None = None,
        teacher: PreTrainedModel | None = None,
        reader: ImageReader | None = None,
        ranks: Ranks | None = None,
        critic: PreTrainedModel | None = None,
    ) -> None:
        check_critic(algorithm, config)
        self.model = model
        self.ranks = ranks or Ranks()
        self.steps = 0
        self._config, self._reader = config, reader
        prepare_repeatable(enabled=config.deterministic)
        shared = config.critic is not None and config.critic.kind == "shared"
        self._objective = Objective(algorithm, shared_critic=shared)
        pretrained = 0 if config.critic is None else config.critic.pretrain_steps
        self._shaping = RewardShaping(algorithm.shaping, max_tokens=max_tokens)
        compile_layers(model, config)
        self._optimizer = PolicyOptimizer(model, _optimizer_settings(config, first_step=pretrained))
        self._balance = RouterBalance(model, config.router_balance) if config.router_balance else None
        check_lanes("trainer.lanes", config.lanes, model)
        self._lanes = Lanes(config.lanes)
        self.watch = NumericsWatch(config.numerics or NumericsConfig(), self.ranks)
        self._layout = self._reference_layout = choose_layout(model, config, self.ranks)
        self._generator = torch.Generator().manual_seed(seed)
        self._reference = (reference or _frozen(model)) if self._objective.uses_reference else None
        if reference is not None and self._reference is not None:
            self._reference_layout = choose_layout(reference, config, self.ranks)
        if algorithm.teacher is not None and not algorithm.teacher.servers and teacher is None:
            raise UsageError("algorithm.teacher is a model", got="no teacher", expected="Trainer(teacher=…)")
        self._teacher = teacher
        self._teacher_layout = None if teacher is None else choose_layout(teacher, config, self.ranks)
        self._critic = make_critic(
            model,
            critic,
            config,
            _optimizer_settings(config),
            layout=self._layout,
            lanes=self._lanes,
            ranks=self.ranks,
            reader=reader,
        )
        if config.router_replay:
            self._layout = replaying(model, self._layout)
            if self._reference is model:
                self._reference_layout = self._layout
            elif self._reference is not None:
                self._reference_layout = replaying(self._reference, self._reference_layout)
        self._copies = StateCopies(self._trained(), self._progress, self.ranks)

    @property
    def least_members(self) -> int:
        """Trainable members that a group needs to teach anything."""
        return 2 if self._objective.compares_groups else 1

    def step(
        self, trajectories: Sequence[Trajectory], *, temperature: float, pad_id: int, guides: Guides | None = None
    ) -> StepReport:
        """Train on the trajectories of one step: whole groups, finished.

        Args:
            trajectories: Failed and unscored ones may be among them; they are left out and counted.
            temperature: At which they were sampled.
            pad_id: Any id of the vocabulary.
            guides: What was played beside the groups, where the algorithm needs any.

        Raises:
            TrainingError: a reward or an advantage is not finite, no trajectory can train, or a rank was lost.
        """
        guides = guides or Guides()
        with self.ranks.led("step", trajectories, temperature, pad_id, guides):
            return self._step(trajectories, temperature, pad_id, guides)

    def _step(self, trajectories: Sequence[Trajectory], temperature: float, pad_id: int, guides: Guides) -> StepReport:
        with repeatable(enabled=self._config.deterministic):
            return self._one_step(trajectories, temperature, pad_id, guides)

    def _one_step(
        self, trajectories: Sequence[Trajectory], temperature: float, pad_id: int, guides: Guides
    ) -> StepReport:
        started = time.perf_counter()
        selection = select([*trajectories, *guides.experts], compare_groups=self._objective.compares_groups)
        routes = self._config.router_replay
        batch = step_batch(selection.trajectories, self._shaping, experts=guides.expert_ids, routes=routes)
        batch = with_greedy_returns(batch, selection.trajectories, guides.greedy, self._shaping)
        parts = self._parts(batch)
        reference = self._reference_logp(batch, temperature, pad_id)
        batch = self._with_reward_kl(batch, reference)
        teacher = self._teacher_logp(batch, selection.trajectories, guides, temperature, pad_id)
        batch = with_teacher_reward(batch, self._shaping, teacher)
        pretraining = self.pretraining
        batch = with_values(batch, self._critic, pad_id)
        estimate = self._objective.estimate(batch.episodes)
        advantage = estimate.advantage
        critic = critic_step(self._critic, batch, estimate, pad_id, policy_learns=not pretraining)
        reads = sequences_to_read(self._objective, batch, advantage)
        first = list(range(len(batch.sequences))) if pretraining else parts[0]
        tokens = self._token_values(batch, advantage, reference, reads, first, temperature, pad_id)
        tokens = with_guides(tokens, batch, teacher, uses_expert=self._objective.uses_expert)
        gradient = GradientPass(
            self.model,
            self._objective,
            self._layout,
            batch,
            tokens,
            reads=reads,
            temperature=temperature,
            pad_id=pad_id,
            lanes=self._lanes,
            ranks=self.ranks,
            every_time=self._config.fsdp.reduce,
            reader=self._reader,
            critic=critic if critic is not None and critic.joins_policy else None,
            learns=not pretraining,
            balance=self._balance,
        )
        if critic is not None and pretraining:
            taken = pretrain_critic(parts, gradient, critic)
        else:
            watched = WatchedUpdates(
                self.watch,
                gradient,
                self._optimizer,
                Step(
                    number=self.steps + 1,
                    trajectories=selection.trajectories,
                    generator=self._generator,
                    experts=guides.expert_ids,
                ),
            )
            with gradients_recomputed(self.model, enabled=self._config.gradient_checkpointing):
                taken = take_updates(parts, watched, self.model, critic=critic, max_kl=self._config.max_kl)
        self.steps += 1
        read = batch.sampled_index([i for i, reads_it in enumerate(reads) if reads_it]).to(self.model.device)
        report = step_report(
            selection=own_selection(selection, guides),
            batch=batch,
            updates=taken.updates,
            losses=taken.losses,
            means=gradient.means()
            | taken.metrics
            | mismatch_by_turn(batch, tokens.trainer_logp, tokens.behaviour_logp, read),
            advantage_abs_mean=float(tokens.advantage.abs().mean()),
            distance=mismatch(tokens.trainer_logp[read], tokens.behaviour_logp[read]),
            reads=reads,
            seconds=time.perf_counter() - started,
        )
        return self.watch.report(report)

    def compute_logprobs(
        self, sequences: Sequence[TokenSequence], *, temperature: float, pad_id: int
    ) -> list[torch.Tensor]:
        """Log-probabilities of the sampled tokens of each sequence under the current weights: float32 [sampled].

        A fork's list holds its own tokens only; each sequence has one or more.
        """
        with self.ranks.led("compute_logprobs", sequences, temperature, pad_id):
            return self._compute_logprobs(sequences, temperature, pad_id)

    def _compute_logprobs(
        self, sequences: Sequence[TokenSequence], temperature: float, pad_id: int
    ) -> list[torch.Tensor]:
        routes = self._config.router_replay
        scored = [scored_sequence(s.token_ids, s.loss_mask, s.images, s.routes if routes else None) for s in sequences]
        flat = self._score(self.model, self._layout, scored, temperature, pad_id)
        return list(torch.split(flat.logp, [sequence.targets.numel() for sequence in scored]))

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """What rank 0 asks of the trainers of other ranks, by name."""
        return {
            "step": self._step,
            "compute_logprobs": self._compute_logprobs,
            "save": self._save,
            "load": self._load,
            **self._copies.calls(),
        }

    def copy_state(self) -> Callable[[Path], None]:
        """Copy what `save` writes; gives what writes the copy, from a thread while training goes on."""
        return self._copies.take()

    def save(self, folder: Path) -> None:
        """Write, into an existing folder, what a resumed run needs beside the weights to go on bit for bit.

        Raises:
            OSError: it cannot be written.
            TrainingError: a rank was lost.
        """
        with self.ranks.led("save", folder):
            self._save(folder)

    def _save(self, folder: Path) -> None:
        save_trainer(self._trained(), self._progress(), folder, self.ranks)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote with any number of ranks, after the weights were loaded.

        Raises:
            UsageError: the state is of another optimizer.
            TrainingError: a rank was lost.
        """
        with self.ranks.led("load", folder):
            self._load(folder)

    def _load(self, folder: Path) -> None:
        self._restore_progress(load_trainer(self._trained(), self._progress(), folder, self.ranks))

    def _trained(self) -> PolicyAndCritic:
        return PolicyAndCritic(self._optimizer, self._critic)

    def _progress(self) -> dict[str, Any]:
        kl = self._shaping.kl
        coefficient = {} if kl is None else {"reward_kl_coef": torch.tensor(kl.coef, dtype=torch.float64)}
        plain = {"generator": self._generator.get_state(), "steps": self.steps, "numerics": self.watch.state()}
        return {**plain, **coefficient}

    def _restore_progress(self, progress: Mapping[str, Any]) -> None:
        self._generator.set_state(progress["generator"])
        self.steps = int(progress["steps"])
        if "numerics" in progress:  # older checkpoints have none
            self.watch.restore(progress["numerics"])
        if self._shaping.kl is not None:
            self._shaping.kl.coef = float(progress.get("reward_kl_coef", self._shaping.kl.coef))

    def state_dict(self) -> dict[str, Any]:
        """Everything that a trainer without other ranks needs to go on: weights, optimizer, schedule, generator.

        Tensors are the live ones, not copies: save them before the next step.
        """
        return {
            "model": self.model.state_dict(),
            "optimizer": self._trained().state_dict(),
            **self._progress(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; the model's tensors are overwritten in place."""
        self.model.load_state_dict(state["model"])
        self._trained().load_state_dict(state["optimizer"])
        self._restore_progress(state)

    @property
    def pretraining(self) -> bool:
        """Whether the next step trains a critic only."""
        return self._config.critic is not None and self.steps < self._config.critic.pretrain_steps

    def _parts(self, batch: StepBatch) -> list[list[int]]:
        """The sequences of every update of the step."""
        epochs = range(self._config.epochs)
        return [part for _ in epochs for part in mini_batches(batch, self._config.mini_batches, self._generator)]

    def _reference_logp(self, batch: StepBatch, temperature: float, pad_id: int) -> torch.Tensor | None:
        if self._reference is None:
            return None
        with adapters_off(self._reference) if self._reference is self.model else nullcontext():
            return self._score(self._reference, self._reference_layout, batch.sequences, temperature, pad_id).logp

    def _teacher_logp(
        self,
        batch: StepBatch,
        trajectories: Sequence[Trajectory],
        guides: Guides,
        temperature: float,
        pad_id: int,
    ) -> torch.Tensor | None:
        if not self._objective.uses_teacher:
            return None
        if self._teacher is None or self._teacher_layout is None:
            return told_by_teacher(batch, trajectories, guides, self.model.device)
        return self._score(self._teacher, self._teacher_layout, batch.sequences, temperature, pad_id).logp

    def _with_reward_kl(self, batch: StepBatch, reference_logp: torch.Tensor | None) -> StepBatch:
        """The batch with KL to the reference in its rewards, if the algorithm wants that."""
        kl = self._shaping.kl
        if kl is None or reference_logp is None:
            return batch
        reference = reference_logp.cpu()
        episodes = batch.episodes.with_token_reward(kl.penalty(batch.behaviour_logp, reference))
        kl.adapt(float(kl.divergence(batch.behaviour_logp, reference).mean()), episodes.returns.numel())
        return dataclasses.replace(batch, episodes=episodes)

    def _token_values(
        self,
        batch: StepBatch,
        advantage: torch.Tensor,
        reference_logp: torch.Tensor | None,
        reads: Sequence[bool],
        first: list[int],
        temperature: float,
        pad_id: int,
    ) -> TokenValues:
        """What losses read; pi_old only where the first update's forward pass cannot give it."""
        device, episodes = self.model.device, batch.episodes
        trainer_logp = torch.full((batch.tokens,), math.nan, device=device)
        entropy = torch.full_like(trainer_logp, math.nan) if self._objective.looks_ahead else None
        if needed := self._scored_before(batch, reads, first):
            sequences = [batch.sequences[i] for i in needed]
            scores = self._score(self.model, self._layout, sequences, temperature, pad_id)
            where = batch.token_index(needed).to(device)
            trainer_logp[where] = scores.logp
            if entropy is not None:
                entropy[where] = scores.entropy
        return TokenValues(
            advantage=advantage.to(device),
            episode_return=episodes.to_tokens(episodes.returns).float().to(device),
            behaviour_logp=batch.behaviour_logp.to(device),
            trainer_logp=trainer_logp,
            version=batch.version.to(device),
            step_version=self.steps,
            reference_logp=reference_logp,
            entropy=entropy,
            draws=self._draws(episodes.returns),
        )

    def _scored_before(self, batch: StepBatch, reads: Sequence[bool], first: list[int]) -> list[int]:
        """The sequences whose log-probabilities must be known before the first update."""
        if not self._objective.looks_ahead and self._objective.proximal != "trainer":
            return []
        free = set() if self._objective.looks_ahead else set(first)
        return [i for i in range(len(batch.sequences)) if reads[i] and i not in free]

    def _draws(self, returns: torch.Tensor) -> torch.Tensor | None:
        """How often each trajectory counts: int64 [trajectories], where the algorithm resamples them."""
        if self._shaping.resample is None:
            return None
        return torch.bincount(self._shaping.resample(returns, self.steps), minlength=returns.numel())

    def _score(
        self,
        model: PreTrainedModel,
        layout: Layout,
        sequences: Sequence[ScoredSequence],
        temperature: float,
        pad_id: int,
    ) -> TokenScores:
        return score_all(
            model,
            sequences,
            temperature=temperature,
            pad_id=pad_id,
            layout=layout,
            lanes=self._lanes,
            ranks=self.ranks,
            reader=self._reader,
        )


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    return model if base_is_reference(model) else copy.deepcopy(model).requires_grad_(False).eval()


def _optimizer_settings(config: TrainerConfig, *, first_step: int = 0) -> OptimizerSettings:
    """Of a model that is trained from a step on."""
    return OptimizerSettings(
        learning_rate=config.learning_rate,
        total_updates=(config.steps - first_step) * config.epochs * config.mini_batches,
        warmup_updates=config.warmup_steps,
        schedule=config.schedule,
        min_lr_ratio=config.min_lr_ratio,
        optimizer=config.optimizer,
        betas=config.betas,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )
