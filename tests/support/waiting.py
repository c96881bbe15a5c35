"""Waits with a deadline: a test that waits in vain says for what, before pytest ends its worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from support.forks import PATIENCE_S

T = TypeVar("T")
PAUSE_S = 0.02


class Joinable(Protocol):
    """A thread or a process of `multiprocessing`."""

    name: str

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


def wait_until(holds: Callable[[], T], what: str, *, within_s: float = PATIENCE_S, pause_s: float = PAUSE_S) -> T:
    """Wait until a condition returns something true; return it.

    Raises:
        AssertionError: it did not in time; the message names what was waited for.
    """
    until = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < until, f"waited {within_s:g} s in vain for {what}"
        time.sleep(pause_s)
    return found


def join(worker: Joinable, *, within_s: float = PATIENCE_S) -> None:
    """Wait for the end of a thread or process.

    Raises:
        AssertionError: it did not end in time.
    """
    worker.join(within_s)
    assert not worker.is_alive(), f"waited {within_s:g} s in vain for the end of {worker.name}"
