"""Work in a thread of its own, which the process does not wait for when it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work`, from a thread that does not keep the process alive: a dead peer may hang it for a while."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="daemon", daemon=True).start()
    return await asyncio.wrap_future(future)
