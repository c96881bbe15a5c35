"""Optional parts of an input: there, or a clear error."""

from __future__ import annotations

import torch

from agentrl.algorithms.marks import Input
from agentrl.errors import TrainingError


def given(part: torch.Tensor | None, what: Input) -> torch.Tensor:
    """The tensor.

    Raises:
        TrainingError: nobody has provided it.
    """
    if part is None:
        raise TrainingError(
            "a part of the step is missing that the algorithm needs", got=f"no {what.name.lower()}", expected=what
        )
    return part
