"""Wall time, CPU time and tokens to reach a success rate from one initial model: agentrl (sync and async) and TRL.

All frameworks train the quick start's household task by tool calls, with GRPO and the same settings, from one cloned
model, on the same tasks in the same order. A run ends when the mean success of three successive steps (384 training
episodes at temperature 1) reaches `success`, or after `limit_s`. A check first ensures that TRL's prompts have the same
tokens as agentrl's. Frameworks alternate, seed by seed; finished runs in `folder` are not repeated.

    agentrl bench e2e --versus trl --json e2e.json
    agentrl bench e2e --versus trl folder=runs/e2e seeds=[0] limit_s=3600
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.e2e_runs import SIDES, learn_all
from peers.e2e_tasks import HOUSEHOLD

from agentrl.errors import UsageError


def run(
    *,
    versus: str = "trl",
    seeds: Sequence[int] = (0, 1, 2),
    success: float = 0.85,
    steps: int = 75,
    limit_s: float = 7200.0,
    folder: str | None = None,
    sides: Sequence[str] = tuple(SIDES),
    threads: int = 2,
) -> dict[str, Any]:
    """Return the seconds, CPU seconds and sampled tokens of each side and seed.

    Args:
        versus: ``trl``.
        seeds: Seeds of the tasks and the sampling.
        success: Success rate that ends a run.
        steps: Maximum number of steps of a run.
        limit_s: Seconds after which a run ends without success.
        folder: Folder of the runs, which is kept; a temporary folder by default.
        sides: Frameworks that run: ``agentrl``, ``agentrl_async``, ``trl``.
        threads: Threads of each framework; use ``taskset`` with as many cores.
    """
    if versus != "trl":
        raise UsageError("unknown peer", got=f"versus={versus}", expected="trl")
    return learn_all(
        HOUSEHOLD,
        seeds=seeds,
        success=success,
        steps=steps,
        limit_s=limit_s,
        folder=folder,
        sides=sides,
        threads=threads,
        warm_start=True,
    )
