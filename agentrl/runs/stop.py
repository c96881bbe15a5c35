"""Stop signals of a run: the first Ctrl-C or SIGTERM asks the run to stop; the second one ends it at once."""

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
    """Call `stop` on the first stop signal inside the block; the second one is handled as before the block.

    The second signal also works while code blocks the event loop and `stop` cannot run. Only the main thread receives
    signals; in other threads, this does nothing.
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
        put_back()  # at once, so that the second signal can end code that blocks the event loop
        loop.call_soon_threadsafe(stop)

    for number in _SIGNALS:
        signal.signal(number, first)
    try:
        yield
    finally:
        put_back()


class StopRequest:
    """Ctrl-C handler for work in another thread's event loop: the first call asks it to stop, the second cancels it."""

    def __init__(self) -> None:
        self.count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[], object] = lambda: None
        self._cancel: Callable[[], object] = lambda: None

    @contextmanager
    def stops(self, stop: Callable[[], object] | None = None) -> Iterator[None]:
        """Make the running task the target of interruptions inside the block.

        Args:
            stop: Function that asks the work to stop; by default the first call cancels it.
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
        """Interrupt the work; may be called from any thread."""
        self.count += 1
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has closed meanwhile
                loop.call_soon_threadsafe(self._stop if self.count == 1 else self._cancel)
