"""How a run ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run has come to."""

    folder: Path
    step: int
    """Training steps done, over the whole life of the run; updates, of a run that only learns."""
    checkpoint: str
    """Its newest checkpoint: a model path for evaluation."""
    metrics: Mapping[str, float]
    """Of the last step."""
    interrupted: bool
    """Somebody asked it to stop; `resume` continues."""
