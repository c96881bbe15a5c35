"""The numbers of an optimizer, and its learning rate over time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from agentrl.config.adam import AdamConfig
from agentrl.config.preferences import PreferencesConfig
from agentrl.config.schema import SFTConfig, TrainerConfig

Schedule = TrainerConfig | SFTConfig | PreferencesConfig
"""A section of a config with ``learning_rate``, ``warmup_steps`` and ``schedule``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Numbers of `PolicyOptimizer`; see `agentrl.config.schema.TrainerConfig` for each."""

    learning_rate: float
    total_updates: int
    """Optimizer steps over which the schedule runs."""
    warmup_updates: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: float = 0.1
    optimizer: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    """On matrices; vectors (norms, biases) have none."""
    max_grad_norm: float = 1.0

    @classmethod
    def of(
        cls, trainer: TrainerConfig, schedule: Schedule, *, total_updates: int, min_lr_ratio: float = 0.1
    ) -> OptimizerSettings:
        """Those of a training whose learning rate has a section of its own.

        Args:
            trainer: Has the rest.
            schedule: The section.
            total_updates: Optimizer steps over which the schedule runs.
            min_lr_ratio: Where cosine ends, as a share of the learning rate.
        """
        adam = trainer.adam or AdamConfig()
        return cls(
            learning_rate=schedule.learning_rate,
            total_updates=total_updates,
            warmup_updates=schedule.warmup_steps,
            schedule=schedule.schedule,
            min_lr_ratio=min_lr_ratio,
            optimizer=trainer.optimizer,
            betas=adam.betas,
            weight_decay=adam.weight_decay,
            max_grad_norm=trainer.max_grad_norm,
        )

    def learning_rate_at(self, update: int) -> float:
        """Learning rate of optimizer step `update`, from 0: linear warm-up, then constant or half a cosine."""
        if update < self.warmup_updates:
            return self.learning_rate * (update + 1) / self.warmup_updates
        if self.schedule == "constant":
            return self.learning_rate
        span = max(self.total_updates - self.warmup_updates, 1)
        progress = min((update - self.warmup_updates) / span, 1.0)
        share = self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * share
