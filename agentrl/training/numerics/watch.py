"""The watch over a trainer's numbers: it applies updates, leaves out those that are not finite, and reports."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.config.numerics import NumericsConfig
from agentrl.errors import TrainingError
from agentrl.training.gradient_pass import GradientPass
from agentrl.training.numerics.alarms import Alarms
from agentrl.training.numerics.dump import Found, write_dump
from agentrl.training.optimizer import PolicyOptimizer, Update
from agentrl.training.ranks import Ranks
from agentrl.training.step.report import StepReport
from agentrl.trajectory import Trajectory

NAMED_PARAMETERS = 5
"""Most parameters that a warning about gradients lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the updates of a step have in common."""

    number: int
    """From 1."""
    trajectories: Sequence[Trajectory]
    """Those that train."""
    generator: torch.Generator
    """Of the mini-batches."""
    experts: frozenset[str] = frozenset()
    """Ids of trajectories whose forced tokens train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """A gradient that was added up and is not applied yet."""

    part: list[int]
    """The sequences of the update."""
    before: Mapping[str, Any]
    """What repeats it: `GradientPass.snapshot`."""
    loss: float


class NumericsWatch:
    """Watches the updates of one trainer; every rank has one, and all of them decide alike.

    Args:
        config: Limits.
        ranks: Train together.
    """

    def __init__(self, config: NumericsConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._alarms = Alarms(config)
        self._folder: Path | None = None
        self._run: Mapping[str, Any] = {}
        self._in_a_row = self._dumps = 0
        self._skipped = ""
        self._hint: str | None = None

    def write_dumps(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Write what repeats an update that was left out; only rank 0 needs to know where.

        Args:
            folder: For the files; made when there is one.
            run: The run's config, as plain JSON types.
        """
        self._folder, self._run = folder, run

    def apply(self, gradient: GradientPass, optimizer: PolicyOptimizer, computed: Computed, step: Step) -> Update:
        """Apply a gradient if all of it is finite.

        Raises:
            TrainingError: too many updates in a row were left out.
            UsageError: the disk is full.
        """
        update = optimizer.update() if math.isfinite(computed.loss) else optimizer.discard()
        if not update.non_finite:
            self._in_a_row = 0
            return update
        self._in_a_row += 1
        self._skipped = f"gradients are not finite in {_listed(update.non_finite)}"
        found = Found(
            loss=computed.loss,
            grad_norm=update.grad_norm,
            group_norms=update.group_norms,
            non_finite=update.non_finite,
        )
        self._dump(gradient, computed.before, computed.part, step, found)
        if self._in_a_row >= self._config.most_skipped:
            raise TrainingError(
                f"{self._in_a_row} updates in a row were skipped",
                got=self._skipped,
                expected="a finite loss and finite gradients",
                hint=(f"{self._hint}; " if self._hint else "")
                + "try a smaller trainer.learning_rate, or model.dtype=float32, from an earlier checkpoint",
            )
        return update

    def _dump(
        self, gradient: GradientPass, before: Mapping[str, Any], part: list[int], step: Step, found: Found
    ) -> None:
        if self._dumps >= self._config.dumps or not any(self._ranks.collect([self._folder is not None])):
            return
        self._dumps += 1
        folder = self._folder
        file = None if folder is None else folder / f"step-{step.number:06d}-update-{before['updates'] + 1}.pt"
        write_dump(
            file,
            gradient,
            before,
            part=part,
            trajectories=step.trajectories,
            experts=step.experts,
            generator=step.generator,
            run=self._run,
            found=found,
        )
        self._hint = f"see where it begins: agentrl replay-step {file}"

    def report(self, report: StepReport) -> StepReport:
        """The report with the alarms in it."""
        judged = self._alarms.judge(report.metrics, skipped=self._skipped, hint=self._hint)
        return dataclasses.replace(
            report,
            metrics={**report.metrics, "train/updates_skipped_in_a_row": float(self._in_a_row), **judged.metrics},
            warnings=(*judged.messages, *report.warnings),
        )

    def state(self) -> torch.Tensor:
        """What a resumed run needs to go on alike: float64, always of the same length."""
        return torch.cat([torch.tensor([self._in_a_row, self._dumps], dtype=torch.float64), self._alarms.state()])

    def restore(self, state: torch.Tensor) -> None:
        """Take what `state` gave."""
        self._in_a_row, self._dumps = int(state[0]), int(state[1])
        self._alarms.restore(state[2:])


class WatchedUpdates:
    """The updates of one step under a watch: each gradient is added up, then applied or left alone.

    Args:
        watch: Of the trainer.
        gradient: Adds up.
        optimizer: Applies.
        step: What the updates have in common.
    """

    def __init__(self, watch: NumericsWatch, gradient: GradientPass, optimizer: PolicyOptimizer, step: Step) -> None:
        self._watch, self._gradient, self._optimizer, self._step = watch, gradient, optimizer, step
        self._computed: Computed | None = None

    @property
    def kl_old(self) -> float:
        """Of the policy to pi_old, over the tokens of the newest gradient."""
        return self._gradient.kl_old

    def accumulate(self, part: list[int]) -> float:
        """Add up the gradient of some sequences; gives the loss."""
        before = self._gradient.snapshot()
        self._computed = Computed(part=part, before=before, loss=self._gradient.accumulate(part))
        return self._computed.loss

    def apply(self) -> Update:
        """Apply the newest gradient; see `NumericsWatch.apply`.

        Raises:
            TrainingError: too many updates in a row were left out.
            UsageError: the disk is full.
        """
        assert self._computed is not None
        return self._watch.apply(self._gradient, self._optimizer, self._computed, self._step)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_PARAMETERS} more" if len(names) > NAMED_PARAMETERS else ""
    return ", ".join(names[:NAMED_PARAMETERS]) + more
