"""Errors of requests that are not answered, and what the client receives for each."""

from __future__ import annotations

from agentrl.errors import AgentRLError, EngineError
from agentrl.gateway.dialect import BadRequest

RETRIED = (408, 409, 425, 429)
"""Statuses below 500 after which the vendors' packages retry."""
NOT_IMPLEMENTED = 501
TOO_DEEP = "the request is nested too deeply"


class SessionOver(Exception):
    """The session has ended and accepts no more requests."""


class Unavailable(Exception):
    """The engine cannot answer now; the client may retry.

    Args:
        message: Reason.
        status: HTTP status: 429 if the service behind the gateway returned it, else 503.
    """

    def __init__(self, message: str, *, status: int = 503) -> None:
        super().__init__(message)
        self.status = status


def client_error_of(error: AgentRLError) -> Exception:
    """Convert an engine's error to the client's error; a status that the client should not retry is kept."""
    status = getattr(error, "status", None)
    if isinstance(status, int) and status not in RETRIED and (400 <= status < 500 or status == NOT_IMPLEMENTED):
        return BadRequest(str(error), status=status, code="upstream_refused")
    if isinstance(error, EngineError):
        return Unavailable(str(error), status=429 if status == 429 else 503)
    return error
