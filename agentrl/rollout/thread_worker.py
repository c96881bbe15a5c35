"""A thread for blocking environments; one that hangs is abandoned and replaced."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, TypeAlias

from agentrl.errors import AgentRLError, EnvironmentFailure, boundary
from agentrl.rollout.serial_worker import Job, SerialWorker

Work: TypeAlias = Callable[[], Any]
_Inbox: TypeAlias = "SimpleQueue[tuple[Job[Work], asyncio.Future[Any]] | None]"


class ThreadWorker(SerialWorker[Work]):
    """Runs functions in one daemon thread, which starts with the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self._inbox: _Inbox | None = None

    async def execute(self, job: Job[Work]) -> Any:
        """Hand the function to the thread and wait."""
        if self._inbox is None:
            self._inbox = SimpleQueue()
            threading.Thread(target=_serve, args=(self._inbox,), name="agentrl-environment", daemon=True).start()
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox.put((job, done))
        return await done

    async def replace(self) -> None:
        """Abandon the thread, which hangs; the next function gets a new one."""
        await self.close()

    async def close(self) -> None:
        """Let the thread end after what it does now."""
        if self._inbox is not None:
            self._inbox.put(None)
            self._inbox = None


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise RuntimeError("a synchronous environment suspended")


def _serve(inbox: _Inbox) -> None:
    while (item := inbox.get()) is not None:
        job, done = item
        result, error = None, None
        try:
            with boundary(EnvironmentFailure, job.what):
                result = job.work()
        except AgentRLError as raised:
            error = raised
        loop = done.get_loop()
        if loop.is_closed():
            return
        loop.call_soon_threadsafe(_deliver, done, result, error)


def _deliver(done: asyncio.Future[Any], result: Any, error: AgentRLError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
