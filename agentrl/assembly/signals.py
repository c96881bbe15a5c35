"""Ctrl-C and SIGTERM as a polite request, once; the second one is obeyed at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
