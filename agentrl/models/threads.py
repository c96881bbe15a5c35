"""Number of torch threads, and lanes: threads that compute parts of a batch concurrently.

The operations of a small model are too short to be parallelized, but sequences can be distributed: each lane runs some
of them through the model. The partition depends only on the work, so that a repeated run is bitwise identical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Barrier
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from agentrl.errors import UsageError
from agentrl.models.cores import pinned_thread
from agentrl.models.packing import batch_dependent_rope

Part = TypeVar("Part")
Result = TypeVar("Result")


def check_lanes(setting: str, count: int, model: PreTrainedModel) -> None:
    """Check that a model supports several lanes.

    Raises:
        UsageError: there are several lanes, and the model is not on the CPU or depends on the batch.
    """
    if count == 1:
        return
    if model.device.type != "cpu":
        raise UsageError(
            f"{setting} is for models on the CPU", got=f"{count} lanes, a model on {model.device}", expected="1 lane"
        )
    if (rope := batch_dependent_rope(model.config)) is not None:
        raise UsageError(
            "this model's rotary positions depend on the other sequences of a batch",
            got=f"rope_type {rope}, {count} lanes",
            expected=f"{setting}: 1",
        )


class ThreadWorkers:
    """Threads that share this process's cores; a single lane runs in the caller's thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads: ThreadPoolExecutor | None = None

    def run(self, compute: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
        """Compute all parts; each lane takes the next remaining part.

        When all parts are done, returns their results or raises the error of the first part that failed.
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
        torch.set_num_threads(total)  # otherwise, the lanes' settings would apply to later threads
        return threads

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


def _take_share(threads: int) -> None:
    torch.get_num_threads()  # a thread's first call resets its number of threads to the process's
    torch.set_num_threads(threads)


def compute_on(cores: Sequence[int], work: Callable[[], Result]) -> Result:
    """Call `work` on `cores` (all if empty), with one torch thread per core.

    The calling thread must not have used torch before, because torch's threads stay on the cores on which they started.
    """
    if not cores:
        return work()
    with pinned_thread(cores), torch_threads(len(cores)):
        return work()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of threads of the calling thread's operations to `count` in this block; 0 changes nothing."""
    if not count:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
