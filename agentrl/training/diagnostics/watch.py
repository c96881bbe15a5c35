"""Numerical safety of training: updates with non-finite gradients are skipped, and unusual metrics raise alarms.

Each cause of an alarm is reported once, and again only after some steps within the limit. A skipped update is dumped to
a file, from which it can be repeated.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self

import torch
from torch import nn

from agentrl.config.trainer import NumericsConfig
from agentrl.errors import AgentRLError, TrainingError, UsageError
from agentrl.observe.files import writing
from agentrl.observe.trajectory_record import trajectory_record
from agentrl.training.checkpoint import load_state, save_state
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.fsdp import computing_dtype, whole
from agentrl.training.gradients import GradientPass
from agentrl.training.optimizer import PolicyOptimizer, Update
from agentrl.training.report import StepReport

PREFIX = "alarms/"
"""Prefix of the alarm metrics: 1 at steps whose metric is beyond the limit, else 0."""
CAUSES = ("skipped", "mismatch", "kl", "kl_reference", "entropy", "grad_norm")
CALM = 10
"""Number of steps within the limit before a cause is reported again."""
FIRST_STEPS = 5
"""Number of first steps whose mean entropy is the baseline for later steps."""
HISTORY, MIN_HISTORY = 32, 8
"""Maximum and minimum number of steps whose median gradient norm is the baseline."""
LIMITED = {
    "mismatch": (
        "mismatch/prob_abs_mean",
        "trainer and engine disagree: mean |pi_old - mu|",
        "check that both have the same weights, data type and chat template; stale episodes "
        "(staleness/mean above 0) also differ by the steps in between",
    ),
    "kl": (
        "train/kl_old",
        "the policy changes too much within a step: train/kl_old",
        "lower trainer.learning_rate, trainer.epochs or trainer.mini_batches",
    ),
    "kl_reference": (
        "train/kl_reference",
        "the policy is too far from its reference: train/kl_reference",
        "raise algorithm.kl_coef, or lower trainer.learning_rate",
    ),
}
"""Causes with their own limit in the config: metric, message, hint."""


class Alarms:
    """Comparison of each step's metrics with limits."""

    def __init__(self, config: NumericsConfig) -> None:
        self._config = config
        self._calm = dict.fromkeys(CAUSES, float(CALM))
        self._entropies: list[float] = []
        self._norms: list[float] = []

    def judge(self, metrics: Mapping[str, float], *, skipped: str = "", hint: str | None = None) -> StepReport:
        """Compare a step's metrics with the limits; return alarm metrics and warnings.

        `skipped` describes the skipped updates, and `hint` how to inspect one.
        """
        found = {cause: str(error) for cause, error in self._beyond(metrics, skipped, hint)}
        warnings = tuple(message for cause, message in found.items() if self._calm[cause] >= CALM)
        self._calm = {cause: 0.0 if cause in found else min(calm + 1, CALM) for cause, calm in self._calm.items()}
        self._remember(metrics)
        return StepReport(metrics={PREFIX + cause: float(cause in found) for cause in CAUSES}, warnings=warnings)

    def _beyond(
        self, metrics: Mapping[str, float], skipped: str, hint: str | None
    ) -> Iterator[tuple[str, AgentRLError]]:
        config = self._config
        if count := metrics.get("train/updates_skipped", 0.0):
            of = f"{count:.0f} of {count + metrics.get('train/updates', 0.0):.0f} updates skipped"
            yield "skipped", AgentRLError(f"{of}, so the weights did not change: {skipped}", hint=hint)
        for cause, (name, what, remedy) in LIMITED.items():
            limit = getattr(config, cause)
            if (value := metrics.get(name, -math.inf)) > limit:
                yield cause, AgentRLError(what, got=f"{value:.4g}", expected=f"at most {limit:g}", hint=remedy)
        entropy, norm = metrics.get("train/entropy", math.inf), metrics.get("train/grad_norm", -math.inf)
        known = len(self._entropies) == FIRST_STEPS
        if known and entropy < (least := config.entropy_share * fmean(self._entropies)):
            yield (
                "entropy",
                AgentRLError(
                    "the policy's entropy has collapsed",
                    got=f"train/entropy {entropy:.4g}",
                    expected=f"at least {least:.4g}, which is {config.entropy_share:g} of the mean of the first "
                    f"{FIRST_STEPS} steps",
                    hint="lower trainer.learning_rate, or set algorithm.entropy_coef or loss_options.clip_high; "
                    "the entropy is also low if the policy has solved its task",
                ),
            )
        usual = median(self._norms) if len(self._norms) >= MIN_HISTORY else 0.0
        if norm > config.grad_norm_ratio * usual > 0:
            yield (
                "grad_norm",
                AgentRLError(
                    "the gradient is much larger than usual",
                    got=f"train/grad_norm {norm:.4g}",
                    expected=f"at most {config.grad_norm_ratio:g} times {usual:.4g}, the median of the last steps",
                    hint="train/grad_norm/* shows which parameters it comes from; "
                    "lower trainer.max_grad_norm or trainer.learning_rate",
                ),
            )

    def _remember(self, metrics: Mapping[str, float]) -> None:
        entropy, norm = metrics.get("train/entropy", math.nan), metrics.get("train/grad_norm", math.nan)
        if math.isfinite(entropy) and len(self._entropies) < FIRST_STEPS:
            self._entropies.append(entropy)
        if math.isfinite(norm):
            self._norms = [*self._norms, norm][-HISTORY:]

    def state(self) -> torch.Tensor:
        """Return the state for a checkpoint: float64 [causes + first steps + history], NaN where unknown."""
        entropies = self._entropies + [math.nan] * (FIRST_STEPS - len(self._entropies))
        norms = self._norms + [math.nan] * (HISTORY - len(self._norms))
        return torch.tensor([*self._calm.values(), *entropies, *norms], dtype=torch.float64)

    def restore(self, state: torch.Tensor) -> None:
        """Restore a state from `state`."""
        values = state.tolist()
        first, last = len(CAUSES), len(CAUSES) + FIRST_STEPS
        self._calm = dict(zip(CAUSES, values[:first], strict=True))
        self._entropies = [value for value in values[first:last] if math.isfinite(value)]
        self._norms = [value for value in values[last:] if math.isfinite(value)]


CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def prepare_repeatable(*, enabled: bool) -> None:
    """Make cuBLAS deterministic if `enabled`; call this before its first product. A value set by the user remains."""
    if enabled:
        os.environ.setdefault(CUBLAS, ":4096:8")


@contextmanager
def repeatable(*, enabled: bool) -> Iterator[None]:
    """Make computations in this block deterministic, if `enabled`; restore torch's settings afterwards.

    These settings select the backward passes of SDPA's kernels and FlashAttention without atomic sums; an operation
    without a deterministic version raises. Results of threads and ranks are always added up in a fixed order.
    """
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    searches = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = searches


FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateNumbers:
    """Loss and gradient norms of an update."""

    loss: float
    grad_norm: float
    group_norms: Mapping[str, float]
    non_finite: tuple[str, ...]
    """Parameters whose gradient is not finite, and the loss if it is not finite."""

    @classmethod
    def of(cls, loss: float, update: Update) -> Self:
        """Make the record of an optimizer step, applied or skipped."""
        return cls(loss=loss, grad_norm=update.grad_norm, group_norms=update.group_norms, non_finite=update.non_finite)


def _write_dump(
    file: Path | None,
    gradient: GradientPass,
    *,
    generator: torch.Generator,
    run: Mapping[str, Any],
    found: UpdateNumbers,
) -> None:
    """Write a dump of a skipped update; ranks without a file only take part in gathering the weights."""
    weights = _weights(gradient.model, keep=file is not None)
    if file is None:
        return
    values = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in gradient.before["values"].items()
    }
    state = {
        **gradient.before,
        "format": FORMAT,
        "values": values,
        "weights": weights,
        "model_config": gradient.model.config.to_json_string(use_diff=False),
        "dtype": str(computing_dtype(gradient.model)).removeprefix("torch."),
        "device": gradient.model.device.type,
        "trajectories": json.dumps([trajectory_record(trajectory) for trajectory in gradient.batch.trajectories]),
        "experts": sorted(gradient.batch.extras.expert_ids),
        "config": json.dumps(run),
        "generator": generator.get_state(),
        "torch_generator": torch.get_rng_state(),
        "threads": torch.get_num_threads(),
        "found": {**dataclasses.asdict(found), "non_finite": list(found.non_finite)},
    }
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(file.name + ".partial")
        save_state(state, partial)
        partial.rename(file)


def _weights(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """Gather whole tensors by name; return none of them unless `keep`."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        gathered = whole(tensor)
        if keep:
            found[name] = gathered.cpu()
    return found


def read_dump(file: Path) -> dict[str, Any]:
    """Read a dump that `NumericsWatch` wrote.

    Raises:
        UsageError: the file does not exist, or is not a dump.
    """
    expected = "a file that a run has written to its folder `numerics`"
    if not file.is_file():
        raise UsageError(f"file {file} not found", expected=expected)
    try:
        state = load_state(file)
    except Exception as error:  # torch raises many kinds of errors for a broken pickle
        raise UsageError(f"{file} cannot be read", got=f"{type(error).__name__}", expected=expected) from error
    if state.get("format") != FORMAT:
        raise UsageError(
            f"{file} is not a dump of an update",
            got=f"format {state.get('format')}",
            expected=f"format {FORMAT}: {expected}",
        )
    return state


def recorded_numbers(state: Mapping[str, Any]) -> UpdateNumbers:
    """Return the numbers that a dump recorded."""
    return UpdateNumbers(**{**state["found"], "non_finite": tuple(state["found"]["non_finite"])})


NAMED_PARAMETERS = 5


class NumericsWatch:
    """Monitor of one trainer's updates; each rank has one, and all ranks make the same decisions."""

    def __init__(self, config: NumericsConfig, ranks: Ranks, generator: torch.Generator) -> None:
        self._config, self._ranks, self._generator = config, ranks, generator
        self._alarms = Alarms(config)
        self._folder: Path | None = None
        self._run: Mapping[str, Any] = {}
        self._in_a_row = self._dumps = 0
        self._skipped = ""
        self._hint: str | None = None

    def write_dumps(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Set the folder for dumps of skipped updates and the config written to them; needed on rank 0 only."""
        self._folder, self._run = folder, run

    def apply(self, gradient: GradientPass, optimizer: PolicyOptimizer) -> Update:
        """Apply the current gradient if it is finite, and skip the update otherwise.

        Raises:
            TrainingError: too many updates in a row were skipped.
            UsageError: the disk is full.
        """
        update = optimizer.update() if math.isfinite(gradient.loss) else optimizer.discard()
        if not update.non_finite:
            self._in_a_row = 0
            return update
        self._in_a_row += 1
        self._skipped = f"gradients are not finite in {_list_names(update.non_finite)}"
        self._dump(gradient, UpdateNumbers.of(gradient.loss, update))
        if self._in_a_row >= self._config.max_skipped:
            raise TrainingError(
                f"{self._in_a_row} updates in a row were skipped",
                got=self._skipped,
                expected="a finite loss and finite gradients",
                hint=(f"{self._hint}; " if self._hint else "")
                + "try a smaller trainer.learning_rate, or model.dtype=float32, from an earlier checkpoint",
            )
        return update

    def _dump(self, gradient: GradientPass, found: UpdateNumbers) -> None:
        if self._dumps >= self._config.dumps or not any(self._ranks.collect([self._folder is not None])):
            return
        self._dumps += 1
        name = f"step-{gradient.batch.step_version + 1:06d}-update-{gradient.before['updates'] + 1}.pt"
        file = None if self._folder is None else self._folder / name
        _write_dump(file, gradient, generator=self._generator, run=self._run, found=found)
        self._hint = f"find the first module that is not finite: agentrl repeat-update {shlex.quote(str(file))}"

    def report(self, report: StepReport) -> StepReport:
        """Return the report with alarm metrics and warnings added."""
        judged = self._alarms.judge(report.metrics, skipped=self._skipped, hint=self._hint)
        return dataclasses.replace(
            report,
            metrics={**report.metrics, "train/updates_skipped_in_a_row": float(self._in_a_row), **judged.metrics},
            warnings=(*judged.warnings, *report.warnings),
        )

    def state(self) -> torch.Tensor:
        """Return the state for a checkpoint: float64, always of the same length."""
        return torch.cat([torch.tensor([self._in_a_row, self._dumps], dtype=torch.float64), self._alarms.state()])

    def restore(self, state: torch.Tensor) -> None:
        """Restore a state from `state`."""
        self._in_a_row, self._dumps = int(state[0]), int(state[1])
        self._alarms.restore(state[2:])


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_PARAMETERS} more" if len(names) > NAMED_PARAMETERS else ""
    return ", ".join(names[:NAMED_PARAMETERS]) + more
