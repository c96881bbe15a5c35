"""Calls of foreign code: they can be abandoned, and hold up nothing else."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
from contextlib import AsyncExitStack
from functools import partial

import pytest
from support.forks import exit_code, forked

from agentrl.errors import deadlines, foreign
from agentrl.errors.deadlines import close_in_time
from agentrl.errors.foreign import DaemonThreads, await_or_abandon, call_in_thread, run_in_own_thread


async def swallow_cancellation(released: asyncio.Event) -> str:
    while not released.is_set():
        try:
            await released.wait()
        except asyncio.CancelledError:
            continue
    return "late"


async def test_a_result_an_error_and_an_exit_reach_the_caller() -> None:
    async def fail(error: BaseException) -> None:
        raise error

    async def answer() -> str:
        return "done"

    assert await await_or_abandon(answer(), "a call") == "done"
    for error in (ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            await await_or_abandon(fail(error), "a call")
    assert asyncio.current_task().cancelling() == 0


async def test_a_call_that_swallows_its_cancellation_is_abandoned(monkeypatch, caplog) -> None:
    monkeypatch.setattr(foreign, "CALL_GRACE_S", 0.01)
    monkeypatch.setattr(foreign, "_abandoned", set())  # other tests abandon calls, too
    released = asyncio.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await await_or_abandon(swallow_cancellation(released), "step of a stubborn environment")
    assert "step of a stubborn environment did not end when it was cancelled" in caplog.text
    assert foreign.count_abandoned() == 1
    released.set()
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
    await asyncio.sleep(0)
    assert foreign.count_abandoned() == 0


async def test_a_call_that_ends_when_it_is_cancelled_is_awaited(caplog) -> None:
    ended = False

    async def clean_up() -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended = True

    call = asyncio.create_task(await_or_abandon(clean_up(), "a call"))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait({call})
    assert (call.cancelled(), ended, caplog.text) == (True, True, "")


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), asyncio.CancelledError()])
async def test_an_error_of_a_close_is_only_logged(error, caplog) -> None:
    async def fail() -> None:
        raise error

    await close_in_time(fail, "closing the tools")
    assert ("closing the tools failed: " in caplog.text) is not isinstance(error, asyncio.CancelledError)


@pytest.mark.parametrize("is_early", [True, False])
async def test_an_interruption_limits_the_time_of_a_close(monkeypatch, caplog, is_early) -> None:
    monkeypatch.setattr(deadlines, "INTERRUPTED_CLOSING_S", 0.1)
    over, ended = asyncio.Event(), []

    async def end(seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(seconds)

    async def close() -> None:
        try:
            await asyncio.Event().wait() if is_early else None
        finally:
            async with AsyncExitStack() as stack:
                for seconds in (0.01, 30.0, 0.02):
                    stack.push_async_callback(close_in_time, partial(end, seconds), f"closing {seconds}")
        over.set()

    closing = asyncio.create_task(close())
    await asyncio.sleep(0.03)
    closing.cancel()
    await asyncio.wait({closing}, timeout=60)
    assert (closing.cancelled(), ended, over.is_set()) == (True, [0.02, 30.0, 0.01], False)
    assert "closing 30.0 takes too long; giving up on it" in caplog.text


async def test_a_second_interruption_leaves_a_close_hardly_any_time() -> None:
    closing = asyncio.create_task(close_in_time(asyncio.Event().wait, "closing the tools"))
    for _ in range(2):
        await asyncio.sleep(0.01)
        closing.cancel()
    await asyncio.wait({closing}, timeout=deadlines.INTERRUPTED_CLOSING_S / 2)
    assert closing.cancelled()


@pytest.mark.parametrize("error", [ValueError, StopIteration, SystemExit, KeyboardInterrupt])
async def test_an_error_of_a_thread_reaches_the_caller(error) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError if error is StopIteration else error):
        await call_in_thread(DaemonThreads("test"), fail, "a call")


async def test_hanging_calls_hold_up_no_other_call(monkeypatch, caplog) -> None:
    monkeypatch.setattr(foreign, "_abandoned", set())
    threads, released, word = DaemonThreads("test"), threading.Event(), contextvars.ContextVar[str]("word")
    word.set("mine")
    hanging = [asyncio.create_task(call_in_thread(threads, released.wait, f"call {i}")) for i in range(50)]
    await asyncio.sleep(0)  # the tasks begin
    assert await call_in_thread(threads, word.get, "a call") == "mine"
    for call in hanging:
        call.cancel()
    await asyncio.wait(hanging)
    assert "call 49 did not return in time; its thread is left running" in caplog.text
    assert foreign.count_abandoned() == 50
    released.set()


async def test_idle_threads_are_reused_and_end(monkeypatch) -> None:
    threads = DaemonThreads("test")
    names = {await call_in_thread(threads, threading.get_ident, "a call") for _ in range(20)}
    assert len(names) < 10  # a thread may be free a moment after its result is known
    monkeypatch.setattr(foreign, "IDLE_THREAD_S", 0.001)
    for _ in range(20):
        assert await call_in_thread(threads, lambda: 1, "a call") == 1
        await asyncio.sleep(0.002)


async def test_a_limit_makes_calls_wait() -> None:
    threads, running, most = DaemonThreads("test", limit=2), 0, 0
    counting = threading.Lock()

    def work() -> int:
        nonlocal running, most
        with counting:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.001)
        with counting:
            running -= 1
        return 1

    for _ in range(3):
        assert sum(await asyncio.gather(*(call_in_thread(threads, work, "a call") for _ in range(20)))) == 20
    assert most == 2


async def test_own_work_runs_with_its_arguments() -> None:
    assert await run_in_own_thread(int, "ff", base=16) == 255


HANGING = """
import asyncio, threading
from agentrl.errors.foreign import DaemonThreads, call_in_thread

async def main():
    asyncio.get_running_loop().set_default_executor(DaemonThreads("default"))
    call = asyncio.create_task(call_in_thread(DaemonThreads("test"), threading.Event().wait, "a call"))
    other = asyncio.create_task(asyncio.to_thread(threading.Event().wait))
    await asyncio.sleep(0.01)
    call.cancel()

asyncio.run(main())
print("over")
"""


def test_a_process_ends_although_a_thread_hangs() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "over\n"), ended.stderr


def test_a_copy_of_the_process_starts_its_own_threads() -> None:
    """It has none of the original's, so a call that is given to one of them would never be made."""
    threads = DaemonThreads("test", limit=1)
    assert threads.submit(int).result(20) == 0
    assert exit_code(forked(lambda: threads.submit(int).result(20))) == 0
