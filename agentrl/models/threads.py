"""Lanes: parts of a computation that run at the same time, each on a thread of its own.

A small model's operations are too short to be shared by several cores. Whole sequences are not: each lane takes some of
them through the model. Who goes where depends on the work alone, so that a repeated run computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from agentrl.errors import UsageError

Part = TypeVar("Part")
Result = TypeVar("Result")

BATCH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary scaling that are set anew by the longest sequence of a forward pass."""


def check_lanes(setting: str, count: int, model: PreTrainedModel) -> None:
    """Refuse more than one lane where lanes would do nothing, or harm."""
    if count == 1:
        return
    if model.device.type != "cpu":
        raise UsageError(f"{setting} is for models on the CPU", got=f"one on {model.device}", expected="1 lane")
    scaling = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if scaling.get("rope_type") in BATCH_DEPENDENT:
        raise UsageError(
            "this model's rotary positions depend on what is computed together",
            got=f"rope_type {scaling['rope_type']}, {count} lanes",
            expected=f"{setting}: 1",
        )


class ThreadWorkers:
    """Threads that share this process's cores; one lane computes in the caller's thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads: ThreadPoolExecutor | None = None

    def run(self, compute: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
        """Compute all parts, each lane the next one that is left; returns, or raises what one of them raised, when none
        runs any more.
        """
        if self.count == 1 or len(parts) == 1:
            return [compute(part) for part in parts]
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
