"""Ctrl-C and SIGTERM as a polite request, once; the second one is obeyed at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first signal inside the block; after it, signals mean what they meant before.

    Only the main thread receives signals; in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def put_back() -> None:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def first() -> None:
        put_back()
        stop()

    for number in _SIGNALS:
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        put_back()
