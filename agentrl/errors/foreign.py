"""Calls to foreign code: environments, tools, rewards, agent loops and anything else that the user wrote.

Foreign code may ignore cancellation, block its thread forever, or call ``sys.exit()``. Each call therefore runs in its
own task (`await_or_abandon`) or daemon thread (`call_in_thread`), and the caller waits for it only until the caller
itself is cancelled. A call that does not end then is abandoned: the log names it, its result is ignored, and neither
the run nor the exiting process waits for it.

Threads for agentrl's own blocking work (`run_in_own_thread`) are separate, so that foreign code cannot use them up.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar

from agentrl.errors import is_addressed_to, running_task

P = ParamSpec("P")
T = TypeVar("T")
CALL_GRACE_S = 1.0
"""Seconds for a cancelled call to end, before it is abandoned."""
EPISODE_GRACE_S = 3.5
"""The same for an attempt at an episode, which itself abandons calls and closes its environment."""
IDLE_THREAD_S = 30.0
"""Seconds after which an idle thread ends."""
FORKED_COPY = (
    b"agentrl: an environment, a tool, a reward function or an agent loop forked this process, and the copy returned "
    b"from it; the copy ends here (end it by os._exit(), or use multiprocessing or subprocess)\n"
)
"""Message of a copy of the process that foreign code forked, and that would otherwise continue as a second run."""
_log = logging.getLogger(__name__)
_abandoned: set[asyncio.Task[Any] | concurrent.futures.Future[Any]] = set()
"""Abandoned calls that have not ended; a reference to a task keeps Python from closing its coroutine."""


class ForeignExit(Exception):
    """A ``SystemExit`` or ``KeyboardInterrupt`` of foreign code, which would end the event loop if it left its task."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause


async def await_or_abandon(work: Coroutine[Any, Any, T], what: str, *, grace_s: float | None = None) -> T:
    """Await foreign code in its own task, and return its result.

    If the calling task is cancelled or misses a deadline, `work` is cancelled too, and abandoned if it has not ended
    after the grace period. The calling task is cancelled either way.

    Args:
        work: Coroutine to await.
        what: Description of the call for the log: ``"step of household (task 17)"``.
        grace_s: Seconds for a cancelled call to end, by default `CALL_GRACE_S`; longer for code that awaits such calls.
    """
    task, ended = start_foreign_task(work, what), asyncio.get_running_loop().create_future()
    task.add_done_callback(functools.partial(_wake, ended))
    try:
        await ended
    except asyncio.CancelledError:
        await cancel_or_abandon(task, grace_s)
        raise
    return foreign_result(task)


def start_foreign_task(work: Coroutine[Any, Any, T], what: str) -> asyncio.Task[T]:
    """Start foreign code in its own task, whose result `foreign_result` returns."""
    return asyncio.get_running_loop().create_task(_contain(work), name=what)


def foreign_result(task: asyncio.Task[T]) -> T:
    """Return the result of a task of `start_foreign_task` that is done, or raise what its code raised."""
    try:
        return task.result()
    except ForeignExit as ended:
        raise ended.cause from None


async def _contain(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; ``sys.exit()`` and the like end only its task."""
    process = os.getpid()
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        if is_addressed_to(running_task(), error):
            raise
        raise ForeignExit(error) from error
    finally:
        end_forked_copy(process)


def end_forked_copy(process: int) -> None:
    """End this process if it is a copy of `process` that foreign code forked and did not end."""
    if os.getpid() != process:
        os.write(2, FORKED_COPY)
        os._exit(1)


def _wake(ended: asyncio.Future[None], _: object) -> None:
    if not ended.done():
        ended.set_result(None)


async def cancel_or_abandon(task: asyncio.Task[Any], grace_s: float | None = None) -> None:
    """Cancel a task, and abandon it if it has not ended after the grace period (default: `CALL_GRACE_S`).

    If the caller is cancelled in the meantime, the task is cancelled again, and the grace period is not extended.
    """
    loop = asyncio.get_running_loop()
    again: asyncio.CancelledError | None = None
    until = loop.time() + (CALL_GRACE_S if grace_s is None else grace_s)
    task.add_done_callback(ignore_result)
    task.cancel()
    while not task.done() and loop.time() < until:
        try:
            await asyncio.wait({task}, timeout=until - loop.time())
        except asyncio.CancelledError as error:
            again = error
            task.cancel()
    if not task.done():
        _abandon(task, f"{task.get_name()} did not end when it was cancelled; it is left running")
    if again is not None:
        raise again


def _abandon(call: asyncio.Task[Any] | concurrent.futures.Future[Any], message: str) -> None:
    _abandoned.add(call)
    _log.warning("%s", message)


def ignore_result(call: asyncio.Task[Any] | concurrent.futures.Future[Any]) -> None:
    """Ignore the result of an abandoned call."""
    _abandoned.discard(call)
    if not call.cancelled():
        call.exception()


def count_abandoned() -> int:
    """Return the number of abandoned calls that have not ended."""
    return len(_abandoned)


def is_foreign(task: asyncio.Task[Any] | None) -> bool:
    """Return True if `start_foreign_task` made the task."""
    return task is not None and getattr(task.get_coro(), "cr_code", None) is _contain.__code__


def abandon_pending(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Keep the tasks of a loop that ends without them, so that Python does not close their coroutines."""
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        _abandoned.add(task)


_executors: weakref.WeakSet[DaemonThreads] = weakref.WeakSet()


def _begin_anew() -> None:
    for executor in list(_executors):
        executor._begin()


os.register_at_fork(after_in_child=_begin_anew)


class DaemonThreads(concurrent.futures.ThreadPoolExecutor):
    """Executor of daemon threads; a hanging call delays neither other calls nor the end of the process.

    A call gets an idle thread or a new one, up to the limit.

    Args:
        name: Name of the threads.
        limit: Maximum number of threads; further calls wait. ``None`` for foreign code, whose calls may hang.
    """

    def __init__(self, name: str, *, limit: int | None = None) -> None:
        super().__init__()  # starts no thread
        self._name, self._limit = name, limit
        self._begin()
        _executors.add(self)

    def _begin(self) -> None:
        """Begin without threads, as a copy of the process does: it has none of the original's."""
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._count = 0
        self._free = 0
        """Number of threads to which no queued call is assigned."""
        self._waiting = 0
        """Number of calls that wait because of the limit."""

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        """Run the call in a thread, and return its future."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._counting:
            is_new = not self._free and self._count != self._limit
            if is_new:
                self._count += 1
            elif self._free:
                self._free -= 1
            else:
                self._waiting += 1
        self._calls.put(functools.partial(_run, future, functools.partial(call, *args, **kwargs)))
        if is_new:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: the threads end by themselves, and none is waited for."""

    def _serve(self) -> None:
        while True:
            try:
                run = self._calls.get(timeout=IDLE_THREAD_S)
            except queue.Empty:
                with self._counting:
                    if self._free:  # otherwise a call is on its way to this thread
                        self._free -= 1
                        self._count -= 1
                        return
                continue
            run()
            del run
            with self._counting:
                if self._waiting:
                    self._waiting -= 1
                else:
                    self._free += 1


def _run(future: concurrent.futures.Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    process = os.getpid()
    try:
        try:
            result = call()
        finally:
            end_forked_copy(process)
    except StopIteration as error:  # a future cannot raise it, as a coroutine cannot
        failure = RuntimeError("a call in a thread raised StopIteration")
        failure.__cause__ = error
        future.set_exception(failure)
    except BaseException as error:  # the caller gets it
        future.set_exception(error)
    else:
        future.set_result(result)


def cause_of(error: BaseException) -> BaseException:
    """Return the ``StopIteration`` that coroutines and threads replace with a ``RuntimeError``; other errors as is."""
    return error.__cause__ if isinstance(error.__cause__, StopIteration) else error


async def call_in_thread(threads: DaemonThreads, call: Callable[[], T], what: str) -> T:
    """Call a foreign function that may block in a thread, and return its result.

    If the calling task is cancelled or misses a deadline, the call is abandoned; its thread takes no other call
    until it has ended.

    `what` describes the call in the log: ``"tool search"``.
    """
    running = threads.submit(contextvars.copy_context().run, call)
    try:
        return await asyncio.wrap_future(running)
    except asyncio.CancelledError:
        if running.running():
            running.add_done_callback(ignore_result)
            _abandon(running, f"{what} did not return in time; its thread is left running")
        raise


_own_threads = DaemonThreads("agentrl-work", limit=min(32, (os.cpu_count() or 1) + 4))


async def run_in_own_thread(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run agentrl's own blocking work, of bounded duration, in a thread that foreign code cannot occupy."""
    call = functools.partial(contextvars.copy_context().run, work, *args, **kwargs)
    return await asyncio.wrap_future(_own_threads.submit(call))
