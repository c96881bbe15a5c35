"""Watches over the calls of an environment: each must return, and none may end the process."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from agentrl.errors import is_addressed_to, running_task

T = TypeVar("T")

LONG_CALL = 6
"""Making an environment may take so many times as long as another call: it loads data."""
_POLL_S = 0.1


class CallFailed(Exception):
    """A call of the environment did not return, or wanted to end the process; the message says which."""


@dataclass(slots=True, kw_only=True)
class Calls:
    """The calls that are under way, and what they started."""

    limit_s: float
    """Seconds within which a call must return."""
    under_way: dict[object, tuple[str, float, float]] = field(default_factory=dict)
    """By call: its name, its limit, and the time at which it is over it."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Killed when the watch ends."""
    raised: str = ""
    """The name of the call that raised something last."""
    is_over: bool = False
    """Nobody waits any more: nothing may be asked."""

    def overdue(self) -> str | None:
        """Which call has not returned in time, in words."""
        now = time.monotonic()
        late = [(end, name, limit) for name, limit, end in list(self.under_way.values()) if end < now]
        return f"{min(late)[1]} did not return within {min(late)[2]:g} s" if late else None


_CALLS: contextvars.ContextVar[Calls] = contextvars.ContextVar("calls")


def watched_calls() -> Calls:
    """Those of the watch that this code runs under; else some that nobody watches."""
    return _CALLS.get(Calls(limit_s=float("inf")))


@contextmanager
def asking(name: str, times: int = 1) -> Iterator[None]:
    """Say that the environment is being asked something.

    Args:
        name: Of the call, for messages.
        times: How many times as long as others it may take.

    Raises:
        CallFailed: it wanted to end the process.
    """
    calls, key = watched_calls(), object()
    if calls.is_over:
        raise CallFailed("the check has ended")
    limit_s = times * calls.limit_s
    calls.under_way[key] = (name, limit_s, time.monotonic() + limit_s)
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # the user's: only the main thread is interrupted from outside
        raise CallFailed(f"{name} ended the process ({type(error).__name__})") from error
    except asyncio.CancelledError as error:
        if is_addressed_to(running_task(), error):
            raise
        raise CallFailed(f"{name} raised {type(error).__name__}, though nobody cancelled it") from error
    except Exception:
        calls.raised = name
        raise
    finally:
        calls.under_way.pop(key, None)


def run_watched(work: Callable[[], T], limit_s: float) -> T:
    """What some work gives, done in a thread of its own while this one watches over its calls.

    A thread whose call does not return stays behind; it does not keep the process from ending.

    Args:
        work: Calls environments inside `asking`.
        limit_s: Seconds within which each call must return.

    Raises:
        CallFailed: one did not.
    """
    calls, ended = Calls(limit_s=limit_s), Future[T]()

    def run() -> None:
        _CALLS.set(calls)
        try:
            ended.set_result(work())
        except BaseException as error:  # raised again where the result is asked for
            ended.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="environment check", daemon=True).start()
    try:
        while not wait([ended], timeout=_POLL_S).done:
            if overdue := calls.overdue():
                raise CallFailed(overdue)
        return ended.result()
    finally:
        calls.is_over = True
        for process in calls.processes:
            process.kill()
            process.wait()
