"""A file that repeats an update: weights, the step's trajectories, generators, config, and what was found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agentrl.errors import UsageError
from agentrl.observe.disk import writing
from agentrl.training.checkpoint import load_state, save_state
from agentrl.training.gradient_pass import GradientPass
from agentrl.training.ranks.sharding import computing_dtype, whole
from agentrl.trajectory import Trajectory

FORMAT = 1
"""Of the file; another one is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an update came to."""

    loss: float
    grad_norm: float
    group_norms: Mapping[str, float]
    non_finite: tuple[str, ...]
    """Parameters whose gradient is not finite, and the loss where that is not."""


def write_dump(
    file: Path | None,
    gradient: GradientPass,
    before: Mapping[str, Any],
    *,
    part: list[int],
    trajectories: Sequence[Trajectory],
    experts: Set[str],
    generator: torch.Generator,
    run: Mapping[str, Any],
    found: Found,
) -> None:
    """Write the file; ranks that have none of their own help to gather the weights.

    Args:
        file: Its folder is made if needed.
        gradient: Its model's weights are those that the update began with, for it changed nothing.
        before: `GradientPass.snapshot` before the update.
        part: The update's sequences.
        trajectories: That trained in the step.
        experts: Ids of those that an expert played.
        generator: Of the mini-batches.
        run: The run's config.
        found: What the update came to.

    Raises:
        UsageError: the disk is full.
    """
    weights = _weights(gradient.model, keep=file is not None)
    if file is None:
        return
    values = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in before["values"].items()
    }
    state = {
        **before,
        "format": FORMAT,
        "values": values,
        "part": part,
        "weights": weights,
        "model_config": gradient.model.config.to_json_string(use_diff=False),
        "dtype": str(computing_dtype(gradient.model)).removeprefix("torch."),
        "device": gradient.model.device.type,
        "trajectories": json.dumps([trajectory.to_record() for trajectory in trajectories]),
        "experts": sorted(experts),
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
    """Whole tensors by name; those that are not kept are only gathered."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        gathered = whole(tensor)
        if keep:
            found[name] = gathered.cpu()
    return found


def read_dump(file: Path) -> dict[str, Any]:
    """What `write_dump` wrote.

    Raises:
        UsageError: there is no such file, or it is another one.
    """
    expected = "a file that a run has written into its folder `numerics`"
    if not file.is_file():
        raise UsageError(f"there is no file {file}", expected=expected)
    try:
        state = load_state(file)
    except Exception as error:  # torch raises whatever the pickle inside happens to hit
        raise UsageError(f"{file} cannot be read", got=f"{type(error).__name__}", expected=expected) from error
    if state.get("format") != FORMAT:
        raise UsageError(
            f"{file} is no dump of an update",
            got=f"format {state.get('format')}",
            expected=f"format {FORMAT}: {expected}",
        )
    return state


def found_of(state: Mapping[str, Any]) -> Found:
    """What the update came to when it was run."""
    return Found(**{**state["found"], "non_finite": tuple(state["found"]["non_finite"])})
