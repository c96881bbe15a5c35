"""What a run saves so that it can go on as if nothing had happened.

checkpoints/step-000010/
model/            Hugging Face folder: the policy's weights, exactly, and its tokenizer
trainer.pt        optimizer, schedule, generators
progress.json     step, version, task order and curriculum, finished unused trajectories, position in metrics.jsonl
manifest.json     sizes and checksums
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from agentrl.assembly.training import TrainingParts
from agentrl.errors import UsageError
from agentrl.observe.checkpoints import Checkpoint
from agentrl.observe.model_folder import MODEL
from agentrl.training.checkpoint import load_state, save_model_folder, save_state

_TRAINER = "trainer.pt"
_PROGRESS = "progress.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come."""

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
    """Task order, what the curriculum has learnt, and finished unused trajectories."""


def write_checkpoint(folder: Path, parts: TrainingParts, progress: Progress) -> None:
    """Fill the folder of a checkpoint."""
    trainer = parts.trainer
    save_model_folder(trainer.model, parts.tokenizer, folder / MODEL, parts.renderer.images)
    state = {name: value for name, value in trainer.state_dict().items() if name != "model"}
    save_state(state, folder / _TRAINER)
    (folder / _PROGRESS).write_bytes(orjson.dumps(asdict(progress)))


def read_progress(checkpoint: Checkpoint) -> Progress:
    """How far the run had come.

    Raises:
        UsageError: the checkpoint was not written by a training run.
    """
    file = checkpoint.path / _PROGRESS
    if not file.is_file():
        raise UsageError(
            f"checkpoint {checkpoint.path} cannot be resumed",
            got="a model only",
            expected="a training run's checkpoint",
            hint=f"start a new run from it: agentrl train … model.path={checkpoint.path}",
        )
    return Progress(**orjson.loads(file.read_bytes()))


def restore(checkpoint: Checkpoint, parts: TrainingParts, progress: Progress) -> None:
    """Put trainer and scheduler back; the model's weights were loaded from the checkpoint when it was built."""
    state = load_state(checkpoint.path / _TRAINER)
    parts.trainer.load_state_dict({**state, "model": parts.trainer.model.state_dict()})
    parts.scheduler.load_state_dict(progress.scheduler)
