"""Ctrl-C and SIGTERM as a polite request, once; the second one is obeyed at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first signal inside the block; after it, signals mean what they meant before.

    The second one counts also while code blocks the event loop, and `stop` cannot be called.

    Only the main thread receives signals; in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def first(number: int, frame: FrameType | None) -> None:
        put_back()  # at once: code that blocks the event loop can still be ended by the second signal
        loop.call_soon_threadsafe(stop)

    for number in _SIGNALS:
        signal.signal(number, first)
    try:
        yield
    finally:
        put_back()


class Interruption:
    """Ctrl-C for work whose event loop runs in another thread: the first asks it to stop, the second cancels it."""

    def __init__(self) -> None:
        self.count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[], object] = lambda: None
        self._cancel: Callable[[], object] = lambda: None

    @contextmanager
    def stops(self, stop: Callable[[], object] | None = None) -> Iterator[None]:
        """Inside the block, the running task is what is interrupted.

        Args:
            stop: Asks the work to stop; it is cancelled at once when left out.
        """
        task = asyncio.current_task()
        assert task is not None
        self._loop, self._cancel, self._stop = asyncio.get_running_loop(), task.cancel, stop or task.cancel
        try:
            if self.count:
                self._stop()
            yield
        finally:
            self._loop = None

    def __call__(self) -> None:
        """Interrupt, from any thread."""
        self.count += 1
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(self._stop if self.count == 1 else self._cancel)
