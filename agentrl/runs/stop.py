"""Shutdown of a run's event loop: stop requests, and an end within seconds even if user code hangs.

A `StopRequest` comes from Ctrl-C, SIGTERM or a call from another thread. The first request asks the work to stop. The
second one cancels the work and stops the loop after `FORCE_S`; tasks that ignore their cancellation are abandoned.

Code that blocks the event loop's thread cannot be cancelled. If that is the main thread, the first request raises
`BlockedCall` in this code after `BLOCKED_S`, and the second one raises ``KeyboardInterrupt``. Neither works in a C call
that never returns, such as a collective with a stopped rank: after the second request, the process is forced to exit.
If such a call also holds the interpreter lock, no Python code runs at all. One Ctrl-C then has no effect, and on Linux
the kernel kills the process at the second one.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from agentrl.errors import CtrlC
from agentrl.errors.deadlines import CLOSING_S, FORCED_CLOSING_S, INTERRUPTED_CLOSING_S, close_in_time
from agentrl.errors.foreign import (
    CALL_GRACE_S,
    EPISODE_GRACE_S,
    DaemonThreads,
    abandon_pending,
    end_forked_copy,
    ignore_result,
    is_foreign,
    run_in_own_thread,
)
from agentrl.rollout.journal_file import LAST_WRITE_S
from agentrl.sandbox.supervisor import process_parents

T = TypeVar("T")
BLOCKED_S = 2.0
"""Seconds for which user or library code may block the event loop after a stop request."""
AGAIN_S = 0.2
"""Interval in seconds of all later checks, once code has blocked the loop."""
PHASE_GRACE_S = 7.0
"""Grace period in seconds of a phase that a stop request cancels, such as the start of servers."""
PARTS_CLOSING_S = 6.0
"""Seconds for closing all parts of a run after a stop request; parts that are still open are then closed by force."""
FORCE_S = 2.5
"""Grace period in seconds of the cancelled work after the second request."""
LEFTOVER_S = 1.0
"""Seconds for pending tasks to end after the main task, and as many for asynchronous generators."""
INTERRUPTED_EXIT_S = 1.0
"""Seconds for the interpreter's shutdown after an interrupted command, before the process is forced to exit."""
FORCED_EXIT_S = 4.0
"""Seconds from the second request to a forced exit of the process."""
AFTER_ONE_REQUEST = {
    "code that blocks the event loop": BLOCKED_S,
    "the phase, or the episodes of an evaluation and then those of training": max(PHASE_GRACE_S, 2 * EPISODE_GRACE_S),
    "environments, tools, engine and trackers": PARTS_CLOSING_S,
    "five parts that are still open": 5 * 2 * FORCED_CLOSING_S,
    "the last records of journals": LAST_WRITE_S,
    "leftover tasks and generators": 2 * LEFTOVER_S,
    "threads and child processes": INTERRUPTED_EXIT_S,
}
"""Maximum seconds of each stage of a shutdown after one request, if code hangs in every stage.

A running training step, weight sync or checkpoint, and launched servers and ranks, take additional time.
"""
AFTER_TWO_REQUESTS = {
    "cancelled work": FORCE_S,
    "two checks of the watchdog thread": 2 * AGAIN_S,
    "leftover tasks and generators": 2 * LEFTOVER_S,
}
"""The same after two requests, through the Python interface; a command exits after `FORCED_EXIT_S`."""
_IS_LINUX = sys.platform == "linux"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HANDLED = _SIGNALS if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*_SIGNALS, signal.SIGHUP)
"""All handled signals; ``nohup`` ignores SIGHUP. A terminal that closes may send it twice: it is one request."""
RESET_HANDLER = -(1 << 31)
"""SA_RESETHAND of Linux, as a C int."""
_INTERRUPTION = signal.SIGURG
"""Signal that interrupts the main thread. SIGINT and SIGTERM do not qualify: Python merges identical pending signals.
"""
_forced_exit_code: ContextVar[int | None] = ContextVar("forced_exit_code", default=None)


class BlockedCall(BaseException):
    """Exception raised in code that blocks the event loop after a stop request."""


def end_process(code: int) -> NoReturn:
    """Exit at once, without cleanup; kill the forked children first."""
    kill_copies()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or a broken pipe
            stream.flush()
    os._exit(code)


def kill_copies() -> None:
    """Kill forked children that have not called exec, such as those of `multiprocessing` in reward functions. They
    would outlive the run and hold its memory and GPUs. Linux only.
    """
    own = os.getpid()
    children = [process for process, parent in process_parents().items() if parent == own] if _IS_LINUX else []
    for child in children:
        with suppress(OSError):  # it has exited in the meantime
            if _command_of(child) == _command_of(own):
                os.kill(child, signal.SIGKILL)


def _command_of(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


def end_process_later(code: int, seconds: float) -> None:
    """Exit from a daemon thread after some seconds, unless the process exits first."""
    timer = threading.Timer(seconds, end_process, [code])
    timer.daemon = True
    timer.start()


@contextmanager
def forced_exit(code: int) -> Iterator[None]:
    """Make the process exit `FORCED_EXIT_S` after the second request of any work that starts in this block."""
    before = _forced_exit_code.set(code)
    try:
        yield
    finally:
        _forced_exit_code.reset(before)


_bound: list[StopRequest] = []
"""Requests that receive this process's signals."""
_masks = threading.local()


def _block_signals() -> None:
    """Block signals during a fork, so that the child does not receive one while it has the run's handlers."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _detach_from_run() -> None:
    """Restore the default signal handlers in a forked child, and end the child if it continues the run's event loop.

    With the run's handlers, it would ignore signals and write their numbers to the parent's pipe.
    """
    for request in _bound:
        request.detach()
    _bound.clear()
    _unblock_signals()


os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_detach_from_run)


class _SignalAction(ctypes.Structure):
    """The C library's ``struct sigaction`` on Linux."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


class OneTimeHandler:
    """The current SIGINT handler with SA_RESETHAND: the kernel restores the default action when it delivers the signal.

    A second Ctrl-C therefore kills a process in which Python code can no longer run.
    """

    def __init__(self) -> None:
        self._action = _SignalAction()
        self._set = ctypes.CDLL(None).sigaction
        self._set(signal.SIGINT, None, ctypes.byref(self._action))
        self._action.flags |= RESET_HANDLER

    def set(self) -> None:
        """Install the handler for the next signal; may be called from any thread."""
        self._set(signal.SIGINT, ctypes.byref(self._action), None)


class StopRequest:
    """Request to stop the work of an event loop; can be made from any thread, and before the loop exists."""

    def __init__(self) -> None:
        self.count = 0
        self._exit_code = _forced_exit_code.get()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[], object] | None = None
        self._main: asyncio.Task[Any] | None = None
        self._thread = 0
        self._over = threading.Event()
        self._watches: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True activates the watchdog thread, False ends it. Signal handlers can put items, but cannot start threads.
        """
        self._second_at = 0.0
        self._wakeup = -1
        """Write end of the pipe that receives the signal numbers (`signal.set_wakeup_fd`)."""
        self._handler: OneTimeHandler | None = None
        self._counted = self._counted_early = 0
        """Numbers of counted signals, and of those that were counted before their handler ran."""
        self._raises: type[BaseException] | None = None

    def __call__(self) -> None:
        """Request a stop; the second call cancels the work."""
        self.count += 1
        if self.count == 2:
            self._second_at = time.monotonic()
        self._call_soon(self._pass_on)
        self.watch()

    def detach(self) -> None:
        """Detach a forked child from the run."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (*_HANDLED[1:], _INTERRUPTION):
            signal.signal(number, signal.SIG_DFL)
        if self._loop is not None and threading.get_ident() == self._thread:
            self._loop.call_soon(end_forked_copy, 0)

    def raise_if_made(self) -> None:
        """Raise ``KeyboardInterrupt`` if the stop was requested; for work without an event loop."""
        if self.count:
            raise KeyboardInterrupt

    @contextmanager
    def counts_signals(self) -> Iterator[None]:
        """Count the first signal in this block as a request; the next Ctrl-C or SIGTERM has its usual effect at once.

        For work without an event loop, which calls `raise_if_made` from time to time. In other threads than the main
        one, signals keep their effect.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        usual = {number: signal.getsignal(number) for number in _HANDLED}

        def count(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGHUP:
                self.count = max(self.count, 1)
                return
            self.count += 1
            for each, handler in usual.items():
                signal.signal(each, handler)
            if self.count > 1:
                signal.raise_signal(number)

        for number in _HANDLED:
            signal.signal(number, count)
        try:
            yield
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)

    @contextmanager
    def stops(self, stop: Callable[[], object]) -> Iterator[None]:
        """Call `stop` in the event loop at the first request in this block, instead of cancelling the work."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None

    @contextmanager
    def bound(self, loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> Iterator[None]:
        """Apply requests to the task `main` in this block; in the main thread, also handle signals."""
        self._loop, self._main, self._thread = loop, main, threading.get_ident()
        self._over, self._watches = threading.Event(), queue.SimpleQueue()
        threading.Thread(target=self._watch, args=(self._over,), name="agentrl-stop", daemon=True).start()
        is_main = threading.current_thread() is threading.main_thread()
        handlers = {_INTERRUPTION: self._on_interruption, **dict.fromkeys(_HANDLED, self._on_signal)} if is_main else {}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        wakeup = self._receive_signals() if is_main else None
        if is_main:
            _bound.append(self)
        if is_main and self._exit_code is not None and _IS_LINUX:
            self._handler = OneTimeHandler()
            self._handler.set()
        try:
            if self.count:
                self._call_soon(self._pass_on)
                self.watch()
            yield
        finally:
            self._over.set()
            self._watches.put(False)
            self._loop = self._main = None
            if wakeup is not None:
                _bound.remove(self)
                signal.set_wakeup_fd(wakeup)
                os.close(self._wakeup)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive_signals(self) -> int:
        """Start a thread that also receives signals, because Python's handlers do not run during a C call of the main
        thread.

        Returns:
            The previous wakeup file descriptor.
        """
        reading, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        threading.Thread(target=self._count_signals, args=(reading,), name="agentrl-signals", daemon=True).start()
        return signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    def _count_signals(self, reading: int) -> None:
        """Count each signal that the Python handler has not counted within `AGAIN_S`."""
        received = 0
        with open(reading, "rb", buffering=0) as signals:
            while number := signals.read(1):
                if self._handler is not None and not self._over.is_set():
                    self._handler.set()
                received += number[0] in _SIGNALS
                self._over.wait(AGAIN_S)
                if number[0] == signal.SIGHUP and not self.count:
                    self()
                while self._counted < received:
                    self._counted += 1
                    self._counted_early += 1
                    self()

    def watch(self) -> None:
        """Activate the watchdog, which interrupts code that blocks the loop."""
        self._watches.put(True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            if not self.count:
                self()
            return
        if self._counted_early:
            self._counted_early -= 1
            return
        self._counted += 1
        self()

    def _on_interruption(self, number: int, frame: FrameType | None) -> None:
        raised, self._raises = self._raises, None
        if raised is CtrlC or (raised and self._loop is not None and is_foreign(asyncio.current_task(self._loop))):
            raise raised

    def _pass_on(self) -> None:
        if self._main is None:
            return
        if self.count == 1 and self._stop is not None:
            self._stop()
        else:
            self._main.cancel()

    def _call_soon(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has been closed in the meantime
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call)

    def _watch(self, over: threading.Event) -> None:
        if not self._watches.get():
            return
        patience = BLOCKED_S
        while not over.is_set():
            turned = threading.Event()
            self._call_soon(turned.set)
            is_blocked = not turned.wait(patience)
            if self.count > 1 and time.monotonic() > self._second_at + FORCE_S:
                self._force(is_blocked)
                patience = AGAIN_S
            elif is_blocked:
                self._interrupt(BlockedCall)
                patience = AGAIN_S
            over.wait(AGAIN_S)
            self._end_process_if_late()
        while self.count > 1 and self._exit_code is not None:
            time.sleep(AGAIN_S)
            self._end_process_if_late()

    def _end_process_if_late(self) -> None:
        if self.count > 1 and self._exit_code is not None and time.monotonic() > self._second_at + FORCED_EXIT_S:
            end_process(self._exit_code)

    def _force(self, is_blocked: bool) -> None:
        """Stop the loop without waiting for the work."""
        if is_blocked:
            self._interrupt(CtrlC)
        elif self._loop is not None:
            self._call_soon(self._loop.stop)

    def _interrupt(self, error: type[BaseException]) -> None:
        """Raise an exception in the code that blocks the loop, by a signal; works in the main thread only."""
        if self._thread == threading.main_thread().ident and not self._over.is_set():
            self._raises = error
            signal.pthread_kill(self._thread, _INTERRUPTION)


def run_until_stopped(work: Coroutine[Any, Any, T], request: StopRequest | None = None) -> T:
    """Run a coroutine in a new event loop like `asyncio.run`, but abandon tasks and threads that do not end.

    The loop's default executor starts one daemon thread per concurrent call. Afterwards, `sys.stdout` and `sys.stderr`
    are what they were before: ``redirect_stdout`` in concurrent threads may leave one thread's stream behind.

    Args:
        work: Coroutine to run.
        request: Stops the work from another thread; in the main thread, signals stop it too.

    Raises:
        KeyboardInterrupt: a request ended the work before it had a result.
    """
    request = request or StopRequest()
    loop = asyncio.new_event_loop()
    loop.set_default_executor(DaemonThreads("agentrl-default"))
    main = loop.create_task(work)
    main.add_done_callback(lambda _: loop.stop())
    streams = sys.stdout, sys.stderr
    with request.bound(loop, main):
        try:
            asyncio.set_event_loop(loop)
            loop.run_forever()
        finally:
            request.watch()
            if main.done():
                ignore_result(main)  # raised below, or already raised by the loop
            _close(loop)
            sys.stdout, sys.stderr = streams
    if request.count and (main.cancelled() or not main.done()):
        raise KeyboardInterrupt
    return main.result()


def run_with_stop_event(work: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function with an event that the first stop request sets; the second one cancels the coroutine."""
    request, stop = StopRequest(), asyncio.Event()
    with request.stops(stop.set):
        return run_until_stopped(work(stop), request)


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all tasks, close asynchronous generators and the loop; abandon tasks and generators that do not end."""
    try:
        _end(loop, asyncio.all_tasks(loop))
        loop.set_exception_handler(_report_error)
        _end(loop, {loop.create_task(loop.shutdown_asyncgens())}, cancel=False)
    finally:
        abandon_pending(asyncio.all_tasks(loop))
        asyncio.set_event_loop(None)
        loop.close()


def _report_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an error of the event loop, except from closing a generator that an abandoned task still uses."""
    if "asyncgen" not in context:
        loop.default_exception_handler(context)


def _end(loop: asyncio.AbstractEventLoop, tasks: set[asyncio.Task[Any]], *, cancel: bool = True) -> None:
    if not tasks:
        return
    for task in tasks:
        task.add_done_callback(ignore_result)
        if cancel:
            task.cancel()
    ending = loop.create_task(asyncio.wait(tasks, timeout=LEFTOVER_S))
    ending.add_done_callback(lambda _: loop.stop())
    loop.run_forever()


async def close_together(stop: asyncio.Event, *closing: Coroutine[Any, Any, None]) -> None:
    """Close several parts concurrently.

    Args:
        stop: Event of a stop request; once it is set, each part has little time left, see `close_in_time`.
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


async def close_in_thread(stop: asyncio.Event, close: Callable[[float], None], what: str) -> None:
    """Call a blocking `close`, which takes its timeout in seconds, in a thread that can be abandoned."""
    within_s = INTERRUPTED_CLOSING_S if stop.is_set() else CLOSING_S
    closing = functools.partial(run_in_own_thread, close, within_s - CALL_GRACE_S)
    await close_in_time(closing, what, within_s)


async def _close_all(closing: tuple[Coroutine[Any, Any, None], ...]) -> None:
    for outcome in await asyncio.gather(*closing, return_exceptions=True):
        if outcome is not None:
            raise outcome


async def _await_closing(closing: asyncio.Task[None]) -> None:
    """Wait for the closing; after a second request or `PARTS_CLOSING_S`, cancel it again, which leaves little time."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        closing.cancel()  # the second time
    try:
        await asyncio.wait({closing}, timeout=PARTS_CLOSING_S)
    finally:
        closing.cancel()
    await asyncio.wait({closing})
