"""Reasons for which a request is not answered, and the errors that the client gets."""

from __future__ import annotations

from agentrl.errors import AgentRLError, EngineError
from agentrl.gateway.dialect import BadRequest

RETRIED = (408, 409, 425, 429)
"""Statuses below 500 after which the vendors' packages ask again."""
NOT_IMPLEMENTED = 501


class SessionOver(Exception):
    """The episode takes no more requests."""


class Unavailable(Exception):
    """The engine cannot answer now; the client may ask again.

    Args:
        message: Why.
        status: The HTTP status: 503, or 429 where the service behind the gateway said so.
    """

    def __init__(self, message: str, *, status: int = 503) -> None:
        super().__init__(message)
        self.status = status


def as_told(error: AgentRLError) -> Exception:
    """Return the error that the client gets for an engine's error, which keeps its status if no retry can help."""
    status = getattr(error, "status", None)
    if isinstance(status, int) and status not in RETRIED and (400 <= status < 500 or status == NOT_IMPLEMENTED):
        return BadRequest(str(error), status=status, code="upstream_refused")
    if isinstance(error, EngineError):
        return Unavailable(str(error), status=429 if status == 429 else 503)
    return error
