"""When checkpoints are written: at once, or by a thread while the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from agentrl.observe.checkpoints import Checkpoint, Checkpoints

_log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes checkpoints, never two at a time.

    Args:
        checkpoints: Of the run.
        background: From a thread.
        on_saved: Is told, in the caller's thread, of each that is whole.
    """

    def __init__(self, checkpoints: Checkpoints, *, background: bool, on_saved: Callable[[Checkpoint], None]) -> None:
        self.background = background
        self._checkpoints, self._on_saved = checkpoints, on_saved
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[Checkpoint] | None = None

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Write the checkpoint of a step, after the one before.

        Args:
            step: Training steps done.
            write: Fills the folder that it is given; in the background, from copies.

        Raises:
            UsageError: the disk is full, now or for the one before.
        """
        self.wait()
        if self.background:
            self._running = self._thread.submit(self._checkpoints.save, step, write)
        else:
            self._on_saved(self._checkpoints.save(step, write))

    def look(self) -> None:
        """Take note of a checkpoint that has been written meanwhile.

        Raises:
            UsageError: it could not be, as the disk is full.
        """
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            UsageError: it could not be, as the disk is full.
        """
        if self._running is not None:
            running, self._running = self._running, None
            self._on_saved(running.result())

    def close(self) -> None:
        """Wait, where another error is on its way already: one of writing is only logged."""
        try:
            self.wait()
        except Exception:
            _log.exception("a checkpoint could not be written")
        self._thread.shutdown()
