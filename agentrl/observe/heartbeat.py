"""Lines that show that work goes on when nothing else was printed for a while: for logs, which have no live panel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentrl.observe.console import note

QUIET_S = 15.0
"""Seconds without a line after which one is printed."""


class Heartbeat:
    """A line whenever it has been quiet for a while.

    Args:
        words: What to say then; called in a thread of its own, so that a busy event loop does not hold it up.
        quiet_s: Seconds without a line before it.
    """

    def __init__(self, words: Callable[[], str], *, quiet_s: float = QUIET_S) -> None:
        self._words = words
        self._quiet_s = quiet_s
        self._began = self._said = time.monotonic()

    def heard(self) -> None:
        """Note that another line was printed just now."""
        self._said = time.monotonic()

    def beat(self, now: float) -> float:
        """Speak if it is time to.

        Args:
            now: The monotonic clock, in seconds.

        Returns:
            Seconds until it may be time again.
        """
        if now - self._said >= self._quiet_s:
            self._said = now
            note(f"{self._words()}, {now - self._began:.0f} s")
        return self._said + self._quiet_s - now

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Watch the clock inside the block."""
        with repeating("heartbeat", lambda: self.beat(time.monotonic())):
            yield


@contextmanager
def repeating(name: str, work: Callable[[], float]) -> Iterator[None]:
    """Call `work` again and again while the block runs, at least once, in a thread of its own.

    Args:
        name: Of the thread.
        work: Returns the seconds until the next call.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(work()):
            pass

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
