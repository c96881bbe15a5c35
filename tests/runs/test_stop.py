"""Stop requests of a run: the user's signals are counted, and foreign code that blocks the loop is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from agentrl.errors.foreign import await_or_abandon
from agentrl.runs.stop import AGAIN_S, BlockedCall, StopRequest

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


DEADLOCK = """
import asyncio, ctypes
from agentrl.cli.exits import end_despite_foreign_code
from agentrl.runs.stop import run_until_stopped

async def work():
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    print("blocked", flush=True)
    libc.pthread_mutex_lock(mutex)  # for ever, whatever signals arrive

with end_despite_foreign_code():
    run_until_stopped(work())
"""


def test_two_interruptions_end_a_program_that_is_stuck_in_c_code() -> None:
    """Python runs no signal handler until the C code returns."""
    with subprocess.Popen([sys.executable, "-c", DEADLOCK], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"blocked\n"
        for _ in range(2):
            program.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(1)
        try:
            assert program.wait(60) == 130
        finally:
            program.kill()


async def test_each_signal_counts_once_whoever_hears_it_first() -> None:
    request = StopRequest()
    work = asyncio.create_task(asyncio.sleep(3600))
    with request.bound(asyncio.get_running_loop(), work), request.stops(lambda: None):
        os.kill(os.getpid(), signal.SIGINT)
        assert request.count == 1, "the handler has run"
        await asyncio.sleep(3 * AGAIN_S)
        assert request.count == 1, "nor has the thread counted it again"
        request._counted_early += 1  # the thread was first
        request._counted += 1
        os.kill(os.getpid(), signal.SIGINT)
        assert request.count == 1
    work.cancel()
