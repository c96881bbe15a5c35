"""A worker that runs calls one after another, each with a deadline that starts when its turn comes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from agentrl.errors import AgentRLError, EnvironmentFailure, described_error, is_addressed_to, running_task

W = TypeVar("W")


@dataclass(slots=True)
class Job(Generic[W]):
    """One call that waits for its turn."""

    work: W
    what: str
    """What it does, for messages: ``"step of household (task 17)"``."""
    deadline_s: float
    result: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SerialWorker(ABC, Generic[W]):
    """Runs jobs in the order in which they came; a job whose caller is cancelled still runs to its end or deadline."""

    def __init__(self) -> None:
        self._jobs: deque[Job[W]] = deque()
        self._pump: asyncio.Task[None] | None = None

    @abstractmethod
    async def execute(self, job: Job[W]) -> Any:
        """Run one job."""

    @abstractmethod
    async def replace(self) -> None:
        """Give up on what runs now and make the worker usable again."""

    @abstractmethod
    async def close(self) -> None:
        """Release the worker; nothing may be running."""

    async def submit(self, work: W, *, what: str, deadline_s: float) -> Any:
        """Run `work` after everything submitted before it.

        Raises:
            EnvironmentFailure: it raised, missed its deadline, or the worker died.
        """
        job = Job(work, what, deadline_s)
        self._jobs.append(job)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return await job.result

    async def _run(self) -> None:
        pump = running_task()
        while self._jobs:
            job = self._jobs.popleft()
            if job.result.cancelled():
                continue
            try:
                outcome = await self._execute_in_time(job)
            except BaseException as error:
                if is_addressed_to(pump, error):
                    raise
                if not job.result.done():
                    job.result.set_exception(_classified(job, error))
            else:
                if not job.result.done():
                    job.result.set_result(outcome)

    async def _execute_in_time(self, job: Job[W]) -> Any:
        try:
            async with asyncio.timeout(job.deadline_s) as scope:
                return await self.execute(job)
        except TimeoutError as error:
            if not scope.expired():
                raise
            await self.replace()
            waited = f"no answer in {job.deadline_s:g} s"
            raise EnvironmentFailure(f"{job.what} missed its deadline", got=waited) from error

    async def drain(self) -> None:
        """Wait until every submitted job has ended."""
        if self._pump is not None:
            await self._pump


def _classified(job: Job[W], error: BaseException) -> AgentRLError:
    if isinstance(error, AgentRLError):
        return error
    failure = EnvironmentFailure(f"{job.what} failed", got=described_error(error))
    failure.__cause__ = error
    return failure
