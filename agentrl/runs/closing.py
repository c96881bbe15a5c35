"""The end of a run: its parts are closed together, and a stop request shortens their time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from agentrl.errors.deadlines import CLOSING_S, INTERRUPTED_CLOSING_S, close_in_time
from agentrl.errors.foreign import CALL_GRACE_S, run_in_own_thread
from agentrl.runs.stop import PARTS_CLOSING_S


async def close_together(stop: asyncio.Event, *closing: Coroutine[Any, Any, None]) -> None:
    """Close parts at the same time.

    Args:
        stop: Set by a stop request, which cancels the closing: each part is still closed, see `close_in_time`.
        closing: Coroutines, each of which closes a part.

    Raises:
        Exception: the first error of a part, once all are closed.
    """
    work, stopped = asyncio.create_task(_close_all(closing)), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if not work.done():
            work.cancel()
            await _await_closing(work)
    if not work.cancelled():
        work.result()


async def close_in_thread(stop: asyncio.Event, close: Callable[..., None], what: str) -> None:
    """Close a part whose `close` blocks and takes ``within_s``, in a thread that can be abandoned."""
    within_s = INTERRUPTED_CLOSING_S if stop.is_set() else CLOSING_S
    closing = functools.partial(run_in_own_thread, close, within_s=within_s - CALL_GRACE_S)
    await close_in_time(closing, what, within_s)


async def _close_all(closing: tuple[Coroutine[Any, Any, None], ...]) -> None:
    for outcome in await asyncio.gather(*closing, return_exceptions=True):
        if outcome is not None:
            raise outcome


async def _await_closing(closing: asyncio.Task[None]) -> None:
    """Wait until the parts are closed; after a second request or `PARTS_CLOSING_S`, almost no time is left."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        closing.cancel()  # the second time
    try:
        await asyncio.wait({closing}, timeout=PARTS_CLOSING_S)
    finally:
        closing.cancel()
    await asyncio.wait({closing})
