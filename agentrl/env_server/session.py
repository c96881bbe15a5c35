"""One client's environment, and the rule that makes requests repeatable: each has a number, each is done once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

from agentrl.env_server.refusal import Refusal, is_fatal, message_of, problem_of
from agentrl.remote.wire import Problem, to_json
from agentrl.rollout.environments import HostedEnvironment
from agentrl.tool import Tool

Clock: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request is answered with."""

    status: int
    body: bytes


def error_answer(error: Exception) -> Answer:
    """An error as its answer."""
    problem = problem_of(error)
    return Answer(problem.status, to_json({"error": {"kind": problem, "message": message_of(error)}}))


class Session:
    """A borrowed environment.

    Args:
        environment: The environment.
        stack: Gives it back.
        tool_timeout_s: Deadline of a call of one of its tools.
        clock: Seconds, for the lease.
    """

    def __init__(
        self, environment: HostedEnvironment, stack: AsyncExitStack, *, tool_timeout_s: float, clock: Clock
    ) -> None:
        self.environment = environment
        self.tool_timeout_s = tool_timeout_s
        self.tools: Mapping[str, Tool] = {}
        """The tools of the current episode."""
        self._stack = stack
        self._clock = clock
        self._number = 0
        self._request = b""
        self._work: asyncio.Task[Answer] | None = None
        self._failure: Exception | None = None
        self._used_at = clock()

    @property
    def idle_s(self) -> float:
        """Seconds since the last request was answered; 0 while one is carried out."""
        return 0.0 if self._work is not None and not self._work.done() else self._clock() - self._used_at

    async def answer(self, number: int, request: bytes, do: Callable[[], Awaitable[dict[str, Any]]]) -> Answer:
        """Carry out a request, or give the answer that its first sending got.

        Args:
            number: One more than that of the request before, or the same for a repetition.
            request: Its bytes: a repetition has the same.
            do: Carries it out.

        Raises:
            Refusal: the number is wrong.
        """
        checksum = hashlib.sha256(request).digest()
        if number == self._number and self._work is not None:
            if checksum != self._request:
                raise Refusal(Problem.NUMBER, f"number {number} was another request before, and this is none like it")
            return await asyncio.shield(self._work)
        if number != self._number + 1:
            expected = f"{self._number + 1}, or {self._number} to repeat the last one" if self._number else "1"
            raise Refusal(Problem.NUMBER, f"the request has number {number}, expected {expected}")
        before, self._number, self._request = self._work, number, checksum
        self._work = asyncio.create_task(self._carry_out(before, do))
        return await asyncio.shield(self._work)

    async def close(self) -> None:
        """Give the environment back; one that failed, or is still at work, is thrown away."""
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.wait({self._work})
            self._failure = RuntimeError("closed in the middle of a request")
        if self._failure is None:
            await self._stack.aclose()
        else:
            await self._stack.__aexit__(type(self._failure), self._failure, None)

    async def _carry_out(
        self, before: asyncio.Task[Answer] | None, do: Callable[[], Awaitable[dict[str, Any]]]
    ) -> Answer:
        if before is not None:
            await asyncio.wait({before})
        try:
            return Answer(200, to_json(await do()))
        except Exception as error:  # whatever it is, the client must hear of it
            if is_fatal(error):
                self._failure = error
            return error_answer(error)
        finally:
            self._used_at = self._clock()
