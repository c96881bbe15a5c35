"""Trainer whose model runs at a Tinker-compatible service; selection, rewards and advantages are computed here.

    trajectories ─► select, shape, estimate ─► pi_old from the service ─► correction and aggregation here
                                                                       └► ppo and AdamW at the service

The service's loss is a sum over tokens of ``-min(r A, clip(r) A)``. The weight of a token in the loss (aggregation) and
its correction are positive, so they are multiplied into A, and the sum is agentrl's own loss.
"""

from __future__ import annotations

import json
import math
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from agentrl.algorithms.correction import mismatch
from agentrl.algorithms.options import clip_range
from agentrl.algorithms.policy_losses import PPO_CLIP
from agentrl.config.config import Config
from agentrl.errors import TrainingError
from agentrl.models.model_files import save_config, save_tokenizer
from agentrl.remote.tinker import TinkerClient
from agentrl.render.images import ImageProcessor
from agentrl.training.batch import StepBatch, StepExtras, mini_batches, select, skipped_metrics, step_batch
from agentrl.training.gradients import Objective, token_shares
from agentrl.training.optimizer import OptimizerSettings
from agentrl.training.report import StepReport, mismatch_by_turn
from agentrl.training.rewards import RewardShaping
from agentrl.training.roles import role_members, role_metrics
from agentrl.trajectory import Trajectory

STATE = "tinker.json"


class TinkerTrainer:
    """Trainer of adapters at a service.

    Args:
        client: Client of the run at the service.
        config: Config of the run.
    """

    def __init__(self, client: TinkerClient, config: Config) -> None:
        self.client = client
        self.steps = self.updates = 0
        self._generator = torch.Generator().manual_seed(config.run.seed)
        self._shaping = RewardShaping(config.algorithm.shaping, max_tokens=config.agent.max_tokens)
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Use the settings of another config from now on."""
        self._config = config
        self._objective = Objective(config.algorithm)
        self._shaping.configure(config.algorithm.shaping, max_tokens=config.agent.max_tokens)
        options = config.algorithm.loss_options
        bounds = clip_range(options.get("clip"), options.get("clip_low"), options.get("clip_high"), default=PPO_CLIP)
        self._clip = 1 - bounds.low, 1 + bounds.high
        trainer = config.trainer
        total = trainer.steps * trainer.epochs * trainer.mini_batches
        self._settings = OptimizerSettings.of(trainer, trainer, total_updates=total, min_lr_ratio=trainer.min_lr_ratio)

    @property
    def checkpoint(self) -> TinkerTrainer:
        """Storage of the state: this object."""
        return self

    @property
    def min_members(self) -> int:
        """Minimum number of trainable members of a group that provides a gradient."""
        return 2 if self._objective.compares_groups else 1

    @property
    def versions(self) -> Mapping[str, int]:
        """Empty: one policy."""
        return {}

    @property
    def sampled_versions(self) -> Mapping[str, int]:
        """Empty: one policy."""
        return {}

    def write_dumps(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Do nothing: the service has the gradients, and skips an update if they are not finite."""

    def step(
        self, trajectories: Sequence[Trajectory], *, temperature: float, extras: StepExtras | None = None
    ) -> StepReport:
        """Train on the trajectories of one step; see `agentrl.training.trainer.Trainer.step`."""
        began = time.perf_counter()
        members = role_members(trajectories)
        batch = step_batch(select(members, compare_groups=self._objective.compares_groups), self._shaping)
        batch = replace(batch, step_version=self.steps, temperature=temperature)
        batch = replace(batch, advantage=self._objective.estimate(batch.episodes).advantage)
        old_logp = self._score(batch)
        corrected = self._objective.correction(old_logp, batch.behaviour_logp, batch.owners.sequence)
        parts = [
            part
            for _ in range(self._config.trainer.epochs)
            for part in mini_batches(batch, self._config.trainer.mini_batches, self._generator)
        ]
        weighted = batch.advantage * corrected.weights
        losses, rate = [], 0.0
        norms: list[float | None] = []
        for part in parts:
            losses.append(self._add_gradients(batch, part, old_logp, weighted))
            rate = self._settings.learning_rate_at(self.updates)
            norms.append(self._update(rate))
        self.steps += 1
        everything = torch.arange(batch.tokens)
        distance = mismatch(old_logp, batch.behaviour_logp)
        rewards = [trajectory.reward for trajectory in batch.trajectories if trajectory.reward is not None]
        known = [norm for norm in norms if norm is not None]
        applied = [norm for norm in known if math.isfinite(norm)]
        skipped = len(known) - len(applied)
        metrics = {
            "train/loss": math.fsum(losses) / len(losses),
            "train/learning_rate": rate,
            "train/updates": float(len(parts) - skipped),
            "train/updates_skipped": float(skipped),
            "train/tokens": float(batch.tokens),
            "train/seconds": time.perf_counter() - began,
            "train/advantage_abs_mean": float(batch.advantage.abs().mean()),
            **({"train/grad_norm": max(applied)} if applied else {}),
            **mismatch_by_turn(batch, old_logp, batch.behaviour_logp, everything),
            **{f"mismatch/{name}": value for name, value in asdict(distance).items()},
            "reward/mean": math.fsum(rewards) / len(rewards),
            "reward/shaped_mean": float(batch.episodes.returns.mean()),
            "groups/trained": float(int(batch.episodes.group.max()) + 1),
            "groups/zero_variance": float((~self._objective.differing_groups(batch.episodes)).sum()),
            "trajectories/trained": float(len(batch.trajectories)),
            **skipped_metrics(members, batch.trajectories),
            **role_metrics(batch),
        }
        return StepReport(metrics=metrics)

    def _score(self, batch: StepBatch) -> Tensor:
        """Compute the log-probabilities of the sampled tokens under the current weights: float32 [tokens]."""
        found = self.client.logprobs([_ids(sequence) for sequence in batch.sequences])
        columns = [
            torch.tensor(values)[sequence.positions] for values, sequence in zip(found, batch.sequences, strict=True)
        ]
        scored = torch.cat(columns).float()
        if not bool(scored.isfinite().all()):
            raise TrainingError("the Tinker service computed a log-probability that is not finite")
        return scored

    def _add_gradients(self, batch: StepBatch, part: list[int], old_logp: Tensor, weighted: Tensor) -> float:
        index = batch.token_index(part)
        values = weighted * token_shares(self._objective, batch.owners, index, batch.sample_counts)
        ids: list[list[int]] = []
        old: list[list[float]] = []
        advantages: list[list[float]] = []
        own = {number: slice(batch.starts[number], batch.starts[number + 1]) for number in part}
        learning = [number for number in part if bool(values[own[number]].any())]  # the others have no gradient
        for number in learning or part:
            sequence = batch.sequences[number]
            ids.append(_ids(sequence))
            for column, of_tokens in ((old, old_logp), (advantages, values)):
                filled = torch.zeros(len(sequence))
                filled[sequence.positions] = of_tokens[own[number]]
                column.append(filled.tolist())
        return self.client.add_gradients(ids, old, advantages, self._clip)

    def _update(self, rate: float) -> float | None:
        settings = self._settings
        self.updates += 1
        return self.client.update(
            learning_rate=rate, betas=settings.betas, weight_decay=settings.weight_decay, clip=settings.max_grad_norm
        )

    def save(self, folder: Path) -> None:
        """Save the state at the service, and its path in the folder."""
        self.copy()(folder)

    def copy(self) -> Callable[[Path], None]:
        """Begin to save the state at the service; return a function that writes its path to a folder."""
        saved = self.client.save(f"step-{self.steps:06d}-{uuid.uuid4().hex[:8]}")
        generator = self._generator.get_state().tolist()
        state = {"steps": self.steps, "updates": self.updates, "generator": generator}

        def write(folder: Path) -> None:
            (folder / STATE).write_text(json.dumps({**state, "path": saved()}))

        return write

    def load(self, folder: Path) -> None:
        """Restore the state whose path is in the folder."""
        state = json.loads((folder / STATE).read_text())
        self.client.resume_from(state["path"])
        self.steps, self.updates = int(state["steps"]), int(state["updates"])
        self._generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


class TinkerWeights:
    """Weights at a service, which a run can compare with others but not read.

    Args:
        client: Client of the run at the service.
        base_path: Model whose config and tokenizer are written next to checkpoints.
    """

    def __init__(self, client: TinkerClient, base_path: str) -> None:
        self._client, self._base_path = client, base_path

    def weights(self) -> Mapping[str, Tensor]:
        """Raise an error: the weights are at the service.

        Raises:
            TrainingError: always.
        """
        raise TrainingError(
            "the weights are on the Tinker service", hint="save them on the service: see docs/tinker.md"
        )

    def token_logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
        """Compute the log-probability of each answer token after the prompt, at temperature 1."""
        (found,) = self._client.logprobs([[*prompt_ids, *answer_ids]])
        return found[len(prompt_ids) - 1 :]

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None = None) -> None:
        """Write the config and the tokenizer, which a resumed run reads; the weights are at the service."""
        self.copy(tokenizer, images)(folder)

    def copy(self, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None = None) -> Callable[[Path], None]:
        """Return a function that writes what `save` does."""

        def write(folder: Path) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            save_config(AutoConfig.from_pretrained(self._base_path), folder)
            save_tokenizer(tokenizer, folder)

        return write


def _ids(sequence: Any) -> list[int]:
    """Return the tokens of a sequence up to its last target, which the model does not read."""
    return [*sequence.input_ids.tolist(), int(sequence.targets[-1])]
