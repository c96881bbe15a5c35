"""One request in the pool, over all its attempts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from agentrl.errors import AgentRLError
from agentrl.policy import GenerateRequest
from agentrl.serving.pool.member import Member
from agentrl.serving.pool.router import Ticket


@dataclass(slots=True, eq=False)
class PoolRequest:
    """A request and what became of it."""

    request: GenerateRequest
    resubmissions: int = 0
    is_aborted: bool = False
    member: Member | None = None
    """The server that samples it now."""
    _placed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def sent(self) -> GenerateRequest:
        """What a server is sent: each attempt has an id of its own, because a lost server may still run the last."""
        if not self.resubmissions:
            return self.request
        return replace(self.request, request_id=f"{self.request.request_id}/again-{self.resubmissions}")

    def new_ticket(self) -> Ticket:
        """The ticket of the next attempt."""
        self._placed = asyncio.get_running_loop().create_future()
        tokens = len(self.request.prompt_ids) + self.request.params.max_tokens
        return Ticket(session_id=self.request.session_id, tokens=tokens)

    async def wait(self) -> None:
        """Wait until the ticket has a server, or the request is aborted.

        Raises:
            AgentRLError: the pool failed.
        """
        if not self.is_aborted:
            await self._placed

    def placed(self) -> None:
        """The ticket has a server."""
        if not self._placed.done():
            self._placed.set_result(None)

    def abort(self) -> None:
        """The caller takes what there is."""
        self.is_aborted = True
        self.placed()

    def fail(self, error: AgentRLError) -> None:
        """The pool cannot serve it any more."""
        if not self._placed.done():
            self._placed.set_exception(error)
            self._placed.exception()  # seen: whoever waits gets it, and nobody may wait
