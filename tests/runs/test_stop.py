"""Stop requests: signals are counted, foreign code that blocks the loop is interrupted, and all limits are short."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agentrl.errors.deadlines import INTERRUPTED_CLOSING_S
from agentrl.errors.foreign import CALL_GRACE_S, EPISODE_GRACE_S, await_or_abandon
from agentrl.reward import SCORER_GRACE_S
from agentrl.rollout.journal_file import LAST_WRITE_S
from agentrl.runs.stop import (
    AFTER_ONE_REQUEST,
    AFTER_TWO_REQUESTS,
    AGAIN_S,
    FORCED_EXIT_S,
    PARTS_CLOSING_S,
    PHASE_GRACE_S,
    BlockedCall,
    StopRequest,
    forced_exit,
    run_until_stopped,
    run_with_stop_event,
)

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


@pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="started with nohup")
@pytest.mark.parametrize("has_loop", [True, False])
async def test_a_closed_terminal_is_one_request_even_if_it_sends_its_signal_twice(has_loop: bool) -> None:
    request, before = StopRequest(), signal.getsignal(signal.SIGHUP)
    work = asyncio.create_task(asyncio.Event().wait())
    bound = request.bound(asyncio.get_running_loop(), work) if has_loop else request.counts_signals()
    with bound, request.stops(lambda: None):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert request.count == 1
    assert signal.getsignal(signal.SIGHUP) == before
    work.cancel()


def test_one_request_ends_a_run_within_20_seconds_and_two_within_5() -> None:
    assert sum(AFTER_ONE_REQUEST.values()) <= 20
    assert LAST_WRITE_S in AFTER_ONE_REQUEST.values()  # the event loop waits for the thread that writes journals
    assert sum(AFTER_TWO_REQUESTS.values()) <= 5
    assert FORCED_EXIT_S + 2 * AGAIN_S <= 5


def test_a_grace_period_is_longer_than_those_that_it_contains() -> None:
    """Otherwise both run out together, and one call is abandoned and reported twice."""
    assert CALL_GRACE_S < SCORER_GRACE_S < EPISODE_GRACE_S < PHASE_GRACE_S
    assert CALL_GRACE_S + EPISODE_GRACE_S / 2 < EPISODE_GRACE_S  # a call, and the close of its environment
    assert INTERRUPTED_CLOSING_S + CALL_GRACE_S < PARTS_CLOSING_S


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_the_event_of_a_server_and_the_second_cancels_it(number: signal.Signals) -> None:
    before, seen = signal.getsignal(number), []

    async def serve(stop: asyncio.Event) -> str:
        signal.raise_signal(number)
        await stop.wait()
        seen.append("stopped")
        if len(seen) == 2:
            signal.raise_signal(number)
            await asyncio.Event().wait()
        return "closed"

    assert run_with_stop_event(serve) == "closed"
    with pytest.raises(KeyboardInterrupt):
        run_with_stop_event(serve)
    assert signal.getsignal(number) == before


def test_streams_that_user_code_replaced_are_restored_after_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    async def replace() -> None:
        sys.stdout = sys.stderr = io.StringIO()

    run_until_stopped(replace())
    print("result")
    print("note", file=sys.stderr)
    assert capsys.readouterr() == ("result\n", "note\n")


def test_only_the_program_ends_its_process_after_a_second_request() -> None:
    with forced_exit(130):
        assert StopRequest()._exit_code == 130
    assert StopRequest()._exit_code is None


def test_a_request_outlives_the_event_loop_of_its_work() -> None:
    """A warm start prepares in an event loop and then learns without one."""
    request = StopRequest()

    async def prepare() -> str:
        return "data"

    assert run_until_stopped(prepare(), request) == "data"
    request.raise_if_made()
    request()
    with pytest.raises(KeyboardInterrupt):
        request.raise_if_made()
    with pytest.raises(KeyboardInterrupt):
        run_until_stopped(asyncio.sleep(60), request)


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


@pytest.mark.slow
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


LOCKED = """
import asyncio, ctypes
from agentrl.cli.exits import end_despite_foreign_code
from agentrl.runs.stop import run_until_stopped

async def work():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # keeps the interpreter lock
    libc.pthread_mutex_lock(mutex)
    print("blocked", flush=True)
    libc.pthread_mutex_lock(mutex)  # for ever

with end_despite_foreign_code():
    run_until_stopped(work())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the handler")
@pytest.mark.slow
def test_two_interruptions_end_a_program_that_holds_the_interpreter_lock() -> None:
    with subprocess.Popen([sys.executable, "-c", LOCKED], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"blocked\n"
        time.sleep(0.5)
        program.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(1)
        program.send_signal(signal.SIGINT)
        try:
            assert program.wait(60) == -signal.SIGINT
        finally:
            program.kill()


STOPPED_TWICE = """
import asyncio, os, signal
from agentrl.cli.exits import end_despite_foreign_code
from agentrl.runs.stop import run_with_stop_event

async def work(stop):
    for count in (1, 2):
        os.kill(os.getpid(), signal.SIGINT)
        await stop.wait()
        print(count, flush=True)
        await asyncio.sleep(0.5)  # the thread that hears signals sets the handler again
    await asyncio.Event().wait()

with end_despite_foreign_code():
    try:
        run_with_stop_event(work)
    except KeyboardInterrupt:
        raise SystemExit(130)
"""


@pytest.mark.slow
def test_the_second_interruption_of_a_program_that_responds_is_handled() -> None:
    program = subprocess.run([sys.executable, "-c", STOPPED_TWICE], capture_output=True, text=True, timeout=240)
    assert (program.returncode, program.stdout) == (130, "1\n2\n"), program.stderr


LEFT_OVER = """
import multiprocessing, signal, sys, time
from agentrl.cli import main

class Environment:
    def __del__(self):
        print("deleted", flush=True)
        time.sleep(1000)

def stay(ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(1000)

left, ready = Environment(), multiprocessing.Event()
child = multiprocessing.get_context("fork").Process(target=stay, args=(ready,), daemon=True)
child.start()
ready.wait()
print(child.pid, file=sys.stderr, flush=True)
sys.argv = ["agentrl", "--help"]
main()
"""


@pytest.mark.slow
def test_a_finished_program_exits_without_waiting_for_objects_or_children() -> None:
    program = subprocess.run([sys.executable, "-c", LEFT_OVER], capture_output=True, text=True, timeout=240)
    assert program.returncode == 0, program.stderr
    assert "Usage: agentrl" in program.stdout
    assert "deleted" not in program.stdout
    until = time.monotonic() + 60
    while (child := Path(f"/proc/{int(program.stderr)}/stat")).exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)


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


TERMINATED_CHILD = """
import asyncio, multiprocessing, time
from agentrl.runs.stop import run_with_stop_event

async def work(stop):
    def reward():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        child.start()
        child.terminate()  # at once, before the child has run anything
        child.join(60)
        return child.exitcode
    codes = {await asyncio.to_thread(reward) for _ in range(20)} | {reward()}
    await asyncio.sleep(1)  # longer than the thread needs that hears signals
    print(codes, stop.is_set())

run_with_stop_event(work)
"""


@pytest.mark.slow
def test_a_signal_to_a_forked_child_ends_the_child_and_not_the_run() -> None:
    """The child of a reward function (``multiprocessing``) has the run's signal handlers and their pipe at first."""
    program = subprocess.run([sys.executable, "-c", TERMINATED_CHILD], capture_output=True, text=True, timeout=240)
    assert program.stdout == "{-15} False\n", program.stderr


FORKING = """
import asyncio, os, sys, threading
from agentrl.errors.foreign import DaemonThreads, await_or_abandon, call_in_thread
from agentrl.rollout.env_workers import ThreadWorker
from agentrl.runs.stop import run_until_stopped

async def fork(*, waits=False):
    os.fork()
    await asyncio.sleep(waits)

async def work():
    match sys.argv[1]:
        case "coroutine":
            await await_or_abandon(fork(), "a reward")
        case "waiting coroutine":
            await await_or_abandon(fork(waits=True), "a reward")
        case "thread":
            await call_in_thread(DaemonThreads("tools"), os.fork, "a tool")
        case "environment":
            await ThreadWorker().submit(os.fork, what="an environment", deadline_s=600)
    await asyncio.sleep(1)
    print("went on")

run_until_stopped(work())
"""


@pytest.mark.parametrize("site", ["coroutine", "waiting coroutine", "thread", "environment"])
@pytest.mark.slow
def test_a_forked_copy_of_the_process_does_not_continue_the_run(site: str) -> None:
    program = subprocess.run([sys.executable, "-c", FORKING, site], capture_output=True, text=True, timeout=240)
    assert (program.returncode, program.stdout) == (0, "went on\n")
    assert program.stderr.count("the copy ends here") == 1, program.stderr


def test_the_first_signal_is_counted_and_the_second_has_its_usual_effect():
    request, at_start = StopRequest(), signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with request.counts_signals():
        signal.raise_signal(signal.SIGTERM)
        assert request.count == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    signal.signal(signal.SIGINT, at_start)  # ignored if pytest runs in the background of a shell
    with pytest.raises(KeyboardInterrupt):
        request.raise_if_made()
