"""One client's sandbox, and the rule that makes calls repeatable: each has an id, each is done once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agentrl.env_server.refusal import Refusal
from agentrl.env_server.session import Answer, Clock, error_answer
from agentrl.remote.wire import Problem, to_json
from agentrl.sandbox import Sandbox, SandboxProcess

KEPT = 64
"""Answers that are kept for repetitions, besides those that are still being made."""


@dataclass(frozen=True, slots=True)
class _Call:
    checksum: bytes
    work: asyncio.Task[Answer]


class ServedSandbox:
    """A sandbox, and the calls that it was asked for; several may be under way.

    Args:
        sandbox: Started.
        clock: Seconds, for the lease.
    """

    def __init__(self, sandbox: Sandbox, clock: Clock) -> None:
        self.sandbox = sandbox
        self.processes: list[SandboxProcess] = []
        self._clock = clock
        self._calls: dict[str, _Call] = {}
        self._used_at = clock()

    @property
    def idle_s(self) -> float:
        """Seconds since the last call was answered; 0 while one is carried out."""
        return 0.0 if any(not call.work.done() for call in self._calls.values()) else self._clock() - self._used_at

    async def answer(self, call_id: str, request: bytes, do: Callable[[], Awaitable[dict[str, Any]]]) -> Answer:
        """Carry out a call, or give the answer that its first sending got.

        Raises:
            Refusal: the id was another call's.
        """
        checksum = hashlib.sha256(request).digest()
        call = self._calls.get(call_id)
        if call is None:
            call = self._calls[call_id] = _Call(checksum, asyncio.create_task(self._carry_out(do)))
            self._forget()
        elif call.checksum != checksum:
            raise Refusal(Problem.NUMBER, f"the id {call_id} was another call before")
        return await asyncio.shield(call.work)

    def cancel(self, call_id: str) -> None:
        """Stop a call that nobody waits for any more."""
        call = self._calls.get(call_id)
        if call is not None:
            call.work.cancel()

    async def close(self) -> None:
        """Close the sandbox; calls that are under way end with it."""
        await self.sandbox.close()
        for call in self._calls.values():
            call.work.cancel()

    def _forget(self) -> None:
        done = [call_id for call_id, call in self._calls.items() if call.work.done()]
        for call_id in done[:-KEPT]:
            del self._calls[call_id]

    async def _carry_out(self, do: Callable[[], Awaitable[dict[str, Any]]]) -> Answer:
        try:
            return Answer(200, to_json(await do()))
        except Exception as error:  # whatever it is, the client must hear of it
            return error_answer(error)
        except asyncio.CancelledError:
            return error_answer(Refusal(Problem.REQUEST, "the call was cancelled"))
        finally:
            self._used_at = self._clock()
