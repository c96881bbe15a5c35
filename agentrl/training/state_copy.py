"""A copy of a trainer's state, which is written while training goes on.

rank 0   copy ─► next step …        thread: ─► write own part ─┐
rank 1   copy ─► next step …        thread: ─► write own part ─┴─► rank 0 knows that all is there
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from agentrl.training.checkpoint import ALONE, save_shared, save_state, shared_state
from agentrl.training.critic.state import TrainedState
from agentrl.training.ranks import Ranks

COPY, WRITE, FINISH = "copy", "write copy", "finish copy"
"""What rank 0 asks of the others."""


class StateCopies:
    """Copies the state of a trainer, one at a time, and writes the copy from a thread.

    Args:
        trained: What is saved.
        progress: Gives what is saved beside it.
        ranks: Each has a part.
    """

    def __init__(self, trained: TrainedState, progress: Callable[[], Mapping[str, Any]], ranks: Ranks) -> None:
        self._trained, self._progress, self._ranks = trained, progress, ranks
        self._state: Mapping[str, Any] = {}
        self._thread: threading.Thread | None = None

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """What rank 0 asks of the other ranks, by name."""
        return {COPY: self._copy, WRITE: self._write_beside, FINISH: self._finish}

    def take(self) -> Callable[[Path], None]:
        """Copy the state into the CPU's memory; gives what writes it, from any thread, and raises OSError."""
        with self._ranks.led(COPY):
            self._copy()
        return self._write

    def _copy(self) -> None:
        own = self._trained.state_dict() if not self._ranks.are_many else None
        state = shared_state(self._trained, self._progress()) if own is None else {"optimizer": own, **self._progress()}
        self._state = copied(state)

    def _write(self, folder: Path) -> None:
        if not self._ranks.are_many:
            save_state(self._state, folder / ALONE)
            return
        with self._ranks.led(WRITE, folder):  # which waits for a step to end; the others write beside theirs, too
            pass
        try:
            save_shared(self._state, folder, self._ranks.beside)
        finally:
            with self._ranks.led(FINISH):
                self._state = {}

    def _write_beside(self, folder: Path) -> None:
        self._thread = threading.Thread(target=self._write_own, args=(folder,), name="checkpoint", daemon=True)
        self._thread.start()

    def _write_own(self, folder: Path) -> None:
        try:
            save_shared(self._state, folder, self._ranks.beside)
        except OSError:
            return  # rank 0 gets it as well, and says so

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread, self._state = None, {}


def copied(value: Any) -> Any:
    """Nested data with copies of its tensors, in the CPU's memory; a tensor in shards stays in shards."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: copied(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(item) for item in value)
    return value
