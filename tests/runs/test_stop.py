"""Stop requests of a run: the user's signals are counted, and foreign code that blocks the loop is interrupted."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from agentrl.errors.foreign import await_or_abandon
from agentrl.runs.stop import BlockedCall, StopRequest

SIGNALS = {signal.SIGINT, signal.SIGURG}


async def block_while_two_signals_arrive(request: StopRequest) -> None:
    """Let the watcher's interruption and Ctrl-C arrive together, as during a long call of C code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    request._interrupt(BlockedCall)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@pytest.mark.parametrize("is_foreign", [True, False])
async def test_ctrl_c_counts_although_an_interruption_is_pending(is_foreign: bool) -> None:
    request, before = StopRequest(), signal.getsignal(signal.SIGURG)
    call = block_while_two_signals_arrive(request)
    work = asyncio.create_task(await_or_abandon(call, "a call") if is_foreign else call)
    with request.bound(asyncio.get_running_loop(), work), request.stops(lambda: None):
        await asyncio.wait({work})
    assert (request.count, type(work.exception())) == (1, BlockedCall if is_foreign else type(None))
    assert signal.getsignal(signal.SIGURG) == before
