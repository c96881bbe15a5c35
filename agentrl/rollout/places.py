"""Where an environment's code runs: the same calls, inline, in a thread, or in a worker process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from agentrl.errors import EnvironmentFailure, async_boundary
from agentrl.rollout.process_worker import ProcessWorker
from agentrl.rollout.resident import Resident
from agentrl.rollout.thread_worker import ThreadWorker, run_coroutine


class Place(ABC):
    """One environment, reachable from the event loop."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether calls can still succeed."""

    @abstractmethod
    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Call a method of the environment's `Resident`.

        Raises:
            EnvironmentFailure: it raised, returned nonsense, missed its deadline, or its worker died; `what` says
                what was being done.
        """


class InlinePlace(Place):
    """In the event loop. The deadline bounds asynchronous environments only: nothing interrupts blocking code here."""

    def __init__(self, resident: Resident) -> None:
        self._resident = resident

    @property
    def is_alive(self) -> bool:
        """Always."""
        return True

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Await the method itself."""
        async with async_boundary(EnvironmentFailure, what, deadline_s=deadline_s):
            return await getattr(self._resident, method)(*arguments)


class ThreadPlace(Place):
    """In a thread; always the same one, for code that cares."""

    def __init__(self, worker: ThreadWorker, resident: Resident) -> None:
        self._worker = worker
        self._resident = resident
        self._running = False

    @property
    def is_alive(self) -> bool:
        """Whether no call of it still runs somewhere."""
        return not self._running

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Run the method in the thread; the deadline counts from when the thread is free."""

        def work() -> Any:
            self._running = True
            try:
                return run_coroutine(getattr(self._resident, method)(*arguments))
            finally:
                self._running = False

        return await self._worker.submit(work, deadline_s=deadline_s, what=what)


class ProcessPlace(Place):
    """In a worker process that several environments share."""

    def __init__(self, worker: ProcessWorker, resident: int, life: int) -> None:
        self._worker = worker
        self._resident = resident
        self._life = life

    @property
    def is_alive(self) -> bool:
        """Whether the process is still the one in which the environment was made."""
        return self._worker.life == self._life

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Send the call to the process; the deadline counts from when the process is free."""
        return await self._worker.call(
            self._resident, method, arguments, life=self._life, deadline_s=deadline_s, what=what
        )
