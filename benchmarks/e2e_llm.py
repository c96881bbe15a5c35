"""Benchmark `e2e` with Qwen2.5-Coder-0.5B-Instruct, which learns arithmetic with a calculator, without a warm start.

make instruct-model bench-peers
agentrl bench e2e_llm --versus trl --json e2e_llm.json
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.e2e_runs import SIDES, learn_all
from peers.e2e_tasks import ARITHMETIC

from agentrl.errors import UsageError


def run(
    *,
    versus: str = "trl",
    seeds: Sequence[int] = (0,),
    success: float = 0.5,
    steps: int = 12,
    limit_s: float = 7200.0,
    folder: str | None = None,
    sides: Sequence[str] = tuple(SIDES),
    threads: int = 2,
) -> dict[str, Any]:
    """Return the seconds, CPU seconds and sampled tokens of each side and seed; for the arguments see `e2e`."""
    if versus != "trl":
        raise UsageError("unknown peer", got=f"versus={versus}", expected="trl")
    return learn_all(
        ARITHMETIC,
        seeds=seeds,
        success=success,
        steps=steps,
        limit_s=limit_s,
        folder=folder,
        sides=sides,
        threads=threads,
        warm_start=False,
    )
