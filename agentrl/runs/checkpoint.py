"""The checkpoint of a training run, from which it goes on as if nothing had happened.

checkpoints/step-000010/
model/            Hugging Face folder: the policy's weights, exactly, and its tokenizer; of adapters peft's folder
trainer.pt        optimizer, schedule, generators; trainer/ where several ranks have written it
progress.json     step, version, task order and curriculum, finished unused trajectories, position in metrics.jsonl
manifest.json     sizes and checksums
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from agentrl.builders.training import TrainingParts
from agentrl.errors import UsageError
from agentrl.observe.checkpoints import Checkpoint
from agentrl.observe.model_folder import MODEL
from agentrl.training.weights import copy_policy, save_policy_folder

_PROGRESS = "progress.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a run, as a checkpoint keeps it."""

    step: int
    """Training steps done."""
    version: int
    """Version of the weights."""
    metrics_position: int
    """Bytes of ``metrics.jsonl`` that belong to these steps."""
    store_position: int
    """Bytes of the next step's file of trajectories that were written by then."""
    pending: Mapping[str, float] | None
    """Metrics of the last step, when the run was stopped before they were written."""
    scheduler: Mapping[str, Any]
    """Task order, state of the curriculum, and finished unused trajectories."""


def write_checkpoint(folder: Path, parts: TrainingParts, progress: Progress) -> None:
    """Fill the folder of a checkpoint."""
    save_policy_folder(parts.source, parts.tokenizer, folder / MODEL, parts.renderer.images)
    parts.trainer.checkpoint.save(folder)
    (folder / _PROGRESS).write_bytes(orjson.dumps(asdict(progress)))


def copy_checkpoint(parts: TrainingParts, progress: Progress) -> Callable[[Path], None]:
    """Copy what `write_checkpoint` writes; gives what fills the folder from the copies while training goes on."""
    write_policy = copy_policy(parts.source, parts.tokenizer, parts.renderer.images)
    write_trainer, written = parts.trainer.checkpoint.copy(), orjson.dumps(asdict(progress))

    def write(folder: Path) -> None:
        write_policy(folder / MODEL)
        write_trainer(folder)
        (folder / _PROGRESS).write_bytes(written)

    return write


def read_progress(checkpoint: Checkpoint) -> Progress:
    """Read how far the run had come.

    Raises:
        UsageError: the checkpoint was not written by a training run.
    """
    file = checkpoint.path / _PROGRESS
    if not file.is_file():
        raise UsageError(
            f"checkpoint {checkpoint.path} cannot be resumed",
            got="a model only",
            expected="a training run's checkpoint",
            hint=f"start a new run from it: agentrl train … model.path={shlex.quote(str(checkpoint.path))}",
        )
    return Progress(**orjson.loads(file.read_bytes()))


def restore(checkpoint: Checkpoint, parts: TrainingParts, progress: Progress) -> None:
    """Put trainer and scheduler back; the model's weights were loaded from the checkpoint when it was built."""
    parts.trainer.checkpoint.load(checkpoint.path)
    parts.scheduler.load_state_dict(progress.scheduler)
