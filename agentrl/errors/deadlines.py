"""Deadlines of calls to engines, environments, tools, sandboxes and scorers, and of closing the parts of a run.

Foreign code that does not end at its deadline is abandoned, see `agentrl.errors.foreign`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

from agentrl.errors import AgentRLError, InfrastructureError, described_error, failure_of, is_addressed_to, running_task
from agentrl.errors.foreign import CALL_GRACE_S, ForeignExit, cancel_or_abandon, start_foreign_task

CLOSING_S = 30.0
"""Seconds for closing one part of a run, such as its environments or its tools, when its work is done."""
INTERRUPTED_CLOSING_S = 3.0
"""The same after an interruption."""
FORCED_CLOSING_S = 0.1
"""The same after a second interruption."""
_log = logging.getLogger(__name__)


def async_boundary(kind: type[InfrastructureError], what: str, *, deadline_s: float | None) -> _AsyncBoundary:
    """Return a `boundary` for code that awaits, with a deadline in seconds (``None``: the caller sets one)."""
    return _AsyncBoundary(kind, what, deadline_s)


class _AsyncBoundary:
    """Asynchronous context manager; a class, because it is faster than a generator and every turn uses several."""

    __slots__ = ("_deadline_s", "_kind", "_scope", "_task", "_what")

    def __init__(self, kind: type[InfrastructureError], what: str, deadline_s: float | None) -> None:
        self._kind, self._what, self._deadline_s = kind, what, deadline_s
        self._scope = asyncio.timeout(deadline_s)

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        await self._scope.__aenter__()

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._scope.__aexit__(error_type, error, trace)
        except TimeoutError as late:
            got = f"no answer in {self._deadline_s:g} s"
            raise self._kind(f"{self._what} missed its deadline", got=got) from late
        if error is None or isinstance(error, AgentRLError) or is_addressed_to(self._task, error):
            return
        raise failure_of(self._kind, self._what, error) from error


def close_limit(within_s: float = CLOSING_S) -> float:
    """Return the seconds for closing something: `within_s`, or less if the calling task is cancelled, once or twice."""
    caller = running_task()
    count = 0 if caller is None else caller.cancelling()
    return min(within_s, (within_s, INTERRUPTED_CLOSING_S, FORCED_CLOSING_S)[min(count, 2)])


async def close_in_time(close: Callable[[], Coroutine[Any, Any, None]], what: str, within_s: float = CLOSING_S) -> None:
    """Close something, and abandon it if that takes longer than `close_limit`; errors and timeouts are only logged.

    If the caller is cancelled in the meantime, less time is left, and the cancellation is raised at the end.
    """

    async def call() -> None:
        await close()

    loop, within_s = asyncio.get_running_loop(), close_limit(within_s)
    until, interruption = loop.time() + within_s, None
    task = start_foreign_task(call(), what)
    while not task.done() and loop.time() < until:
        try:
            await asyncio.wait({task}, timeout=until - loop.time())
        except asyncio.CancelledError as error:
            within_s = close_limit(within_s)
            interruption, until = error, min(until, loop.time() + within_s)
    if not task.done():
        _log.warning("%s takes too long; giving up on it", what)
        await cancel_or_abandon(task, min(CALL_GRACE_S, within_s))
    elif not task.cancelled() and (raised := task.exception()) is not None:
        if is_addressed_to(running_task(), raised):
            raise raised
        cause = raised.cause if isinstance(raised, ForeignExit) else raised
        _log.warning("%s failed: %s", what, described_error(cause))
    if interruption is not None:
        raise interruption
