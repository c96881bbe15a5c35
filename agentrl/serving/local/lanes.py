"""Lanes: the sequences of a step in parts that are computed at the same time, each on a thread of its own.

A small model's operations are too short to be shared by several cores. Whole sequences are not: each lane takes some of
them through the model. Who goes where depends on the plan alone, so that a repeated run computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from agentrl.config.schema import FEWEST_PER_LANE, LocalEngineConfig
from agentrl.errors import UsageError
from agentrl.serving.local.step import Piece

Part = TypeVar("Part")
Result = TypeVar("Result")

BATCH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary scaling that are set anew by the longest sequence of a forward pass."""
TOKEN_COST = 24
"""Cached tokens whose attention costs as much as taking one new token through the model, for small models."""


def check_lanes(config: LocalEngineConfig, model: PreTrainedModel) -> None:
    """Refuse more than one lane where lanes would do nothing, or harm.

    Raises:
        UsageError: another device than the CPU, or rotary positions that depend on the batch.
    """
    if config.lanes == 1:
        return
    if model.device.type != "cpu":
        raise UsageError("engine.lanes is for models on the CPU", got=f"one on {model.device}", expected="1 lane")
    scaling = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if scaling.get("rope_type") in BATCH_DEPENDENT:
        raise UsageError(
            "this model's rotary positions depend on what is computed together",
            got=f"rope_type {scaling['rope_type']}, {config.lanes} lanes",
            expected="engine.lanes: 1",
        )


class Lanes:
    """Threads that share this process's cores.

    Args:
        count: How many; 1 computes in the caller's thread.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads: ThreadPoolExecutor | None = None

    def split(self, pieces: Sequence[Piece]) -> list[list[Piece]]:
        """Neighbouring pieces in as many parts as are worth it, of about the same cost."""
        count = max(1, min(self.count, len(pieces) // FEWEST_PER_LANE))
        if count == 1:
            return [list(pieces)]
        ordered = sorted(pieces, key=lambda piece: (piece.row.shelf.capacity, piece.row.index))
        costs = [piece.count * TOKEN_COST + piece.end for piece in ordered]
        share, spent = sum(costs) / count, 0.0
        parts: list[list[Piece]] = [[] for _ in range(count)]
        for piece, cost in zip(ordered, costs, strict=True):
            parts[min(int((spent + cost / 2) / share), count - 1)].append(piece)
            spent += cost
        return [part for part in parts if part]

    def run(self, compute: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
        """Compute all parts; returns, or raises what one of them raised, when none runs any more."""
        if len(parts) == 1:
            return [compute(parts[0])]
        if self._threads is None:
            self._threads = self._start()
        running = [self._threads.submit(compute, part) for part in parts]
        wait(running)
        return [future.result() for future in running]

    def _start(self) -> ThreadPoolExecutor:
        total = torch.get_num_threads()
        share = max(1, total // self.count)
        threads = ThreadPoolExecutor(self.count, thread_name_prefix="lane", initializer=_take_share, initargs=(share,))
        together = Barrier(self.count)
        wait([threads.submit(together.wait) for _ in range(self.count)])
        torch.set_num_threads(total)  # what the lanes have set for themselves is also what threads to come would get
        return threads

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


def _take_share(threads: int) -> None:
    torch.get_num_threads()  # a thread's first operation takes the process's number: let that be over
    torch.set_num_threads(threads)
