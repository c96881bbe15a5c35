"""Which server takes a request: the one of its session, else the one with the fewest tokens in flight.

A state machine of counts, without I/O. A request whose session has a server waits for that server as long as it is
open, because its cache holds the session; sessions of a closed server move when their next request comes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way to a server."""

    session_id: str
    tokens: int
    """Tokens that it can take up in a cache: its prompt and the longest answer."""
    server: int | None = None
    """Its server; ``None`` while it waits for one."""


@dataclass(slots=True)
class ServerPlaces:
    """What one server has."""

    limit: int = 0
    """Requests that it may have at once; 0: it is closed."""
    requests: int = 0
    tokens: int = 0
    """Tokens in flight."""

    @property
    def is_free(self) -> bool:
        """Whether it takes one more request."""
        return self.requests < self.limit


@dataclass(slots=True)
class Router:
    """Places requests in order of arrival, as far as the limits allow."""

    servers: list[ServerPlaces]
    held: bool = False
    """Nothing is placed."""
    waiting: deque[Ticket] = field(default_factory=deque)
    _homes: dict[str, int] = field(default_factory=dict)

    def enter(self, ticket: Ticket) -> None:
        """A request waits for a server; call `place`."""
        self.waiting.append(ticket)

    def leave(self, ticket: Ticket) -> None:
        """A request is over at its server, or does not want one any more; call `place`."""
        if ticket.server is None:
            self.waiting.remove(ticket)
            return
        server = self.servers[ticket.server]
        server.requests -= 1
        server.tokens -= ticket.tokens
        ticket.server = None

    def place(self) -> list[Ticket]:
        """Give servers to waiting requests; those that got one."""
        placed: list[Ticket] = []
        passed: list[Ticket] = []
        while self.waiting and not self.held and any(server.is_free for server in self.servers):
            ticket = self.waiting.popleft()
            index = self._choose(ticket.session_id)
            if index is None:
                passed.append(ticket)
            else:
                self._take(ticket, index)
                placed.append(ticket)
        self.waiting.extendleft(reversed(passed))
        return placed

    def end_session(self, session_id: str) -> None:
        """Forget where a session was."""
        self._homes.pop(session_id, None)

    def home(self, session_id: str) -> int | None:
        """The server of a session."""
        return self._homes.get(session_id)

    def _choose(self, session_id: str) -> int | None:
        home = self._homes.get(session_id)
        if home is not None and self.servers[home].limit:
            return home if self.servers[home].is_free else None
        free = [index for index, server in enumerate(self.servers) if server.is_free]
        return min(free, key=lambda index: self.servers[index].tokens, default=None)

    def _take(self, ticket: Ticket, index: int) -> None:
        ticket.server = index
        self._homes[ticket.session_id] = index
        self.servers[index].requests += 1
        self.servers[index].tokens += ticket.tokens
