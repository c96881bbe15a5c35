"""Checkpoints of a training run, from which a resumed run continues exactly.

::

    checkpoints/step-000010/
    model/            Hugging Face folder: the policy's exact weights and its tokenizer; a peft folder for adapters
    trainer.pt        optimizer, schedule, generators; with several ranks, the folder trainer/
    progress.json     `Progress`: step, version, task order and curriculum, finished unused trajectories
    manifest.json     sizes and checksums
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from agentrl.builders.training import TrainingParts
from agentrl.errors import UsageError
from agentrl.observe.checkpoints import Checkpoint
from agentrl.observe.model_folder import MODEL

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PROGRESS = "progress.json"
P = TypeVar("P", bound="DataclassInstance")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """Progress of a training run in a checkpoint, on new or on stored episodes."""

    step: int
    """Number of finished training steps."""
    metrics_position: int
    """Size in bytes of ``metrics.jsonl`` after these steps."""
    settings: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Adapted values of schedules with a target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(StepProgress):
    """Progress of a run on new episodes in a checkpoint."""

    version: int
    """Version of the weights."""
    store_position: int
    """Size in bytes of the next step's trajectory file at the time of the checkpoint."""
    pending: Mapping[str, float] | None
    """Metrics of the last step, if the run stopped before they were written."""
    evaluating: int | None
    """Step whose evaluation was running in parallel with training."""
    scheduler: Mapping[str, Any]
    """Task order, state of the curriculum, and finished unused trajectories."""


def write_checkpoint(folder: Path, parts: TrainingParts, progress: Progress) -> None:
    """Write a checkpoint into its folder."""
    parts.source.save(folder / MODEL, parts.tokenizer, parts.renderer.images)
    parts.trainer.checkpoint.save(folder)
    write_progress(folder, progress)


def copy_checkpoint(parts: TrainingParts, progress: Progress) -> Callable[[Path], None]:
    """Copy the state of a checkpoint; the returned function writes the copy into a folder during training."""
    write_policy = parts.source.copy(parts.tokenizer, parts.renderer.images)
    write_trainer, written = parts.trainer.checkpoint.copy(), orjson.dumps(asdict(progress))

    def write(folder: Path) -> None:
        write_policy(folder / MODEL)
        write_trainer(folder)
        (folder / _PROGRESS).write_bytes(written)

    return write


def write_progress(folder: Path, progress: DataclassInstance) -> None:
    """Write a run's progress into the folder of a checkpoint."""
    (folder / _PROGRESS).write_bytes(orjson.dumps(asdict(progress)))


def read_progress(checkpoint: Checkpoint, kind: type[P]) -> P:
    """Read a checkpoint's progress.

    `kind` is the record of the progress: `Progress`, or that of another kind of run.

    Raises:
        UsageError: the checkpoint does not belong to such a run.
    """
    file = checkpoint.path / _PROGRESS
    record = orjson.loads(file.read_bytes()) if file.is_file() else {}
    known = {one.name for one in fields(kind)}
    required = {one.name for one in fields(kind) if MISSING is one.default is one.default_factory}
    if not required <= record.keys() <= known:
        raise UsageError(
            f"checkpoint {checkpoint.path} cannot be resumed",
            got="the progress of another kind of run" if record else "a model only",
            expected="a checkpoint of a training run",
            hint=f"start a new run from it: agentrl train … model.path={shlex.quote(str(checkpoint.path))}",
        )
    return kind(**record)


def restore(checkpoint: Checkpoint, parts: TrainingParts, progress: Progress) -> None:
    """Restore trainer and scheduler; the model has loaded its weights from the checkpoint already."""
    parts.trainer.checkpoint.load(checkpoint.path)
    parts.scheduler.load_state_dict(progress.scheduler)
