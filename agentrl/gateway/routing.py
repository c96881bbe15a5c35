"""Find the session of a request by its conversation, if neither its path nor its key names one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.gateway.dialect import BadRequest, Dialect
from agentrl.gateway.history import chain_of
from agentrl.gateway.pending import digest_of, off_loop
from agentrl.gateway.session import GatewaySession


async def session_of_history(
    sessions: Sequence[GatewaySession], dialect: Dialect, body: Mapping[str, Any], raw: bytes, *, is_retry: bool
) -> GatewaySession:
    """Return the session whose conversation a request continues; the first session for a new conversation.

    Args:
        sessions: Candidate sessions.
        dialect: The client's dialect.
        body: JSON of the request.
        raw: Bytes of the request.
        is_retry: True if the client marks the request as a retry.
    """
    first = sessions[0]
    if len(sessions) == 1:
        return first
    if is_retry:
        digest = await off_loop(len(raw), digest_of, dialect.path, raw)
        if sent := next((session for session in sessions if session.has_request(digest)), None):
            return sent
    found = await off_loop(len(raw), _find_continued, sessions, dialect, body)
    return first if found is None else found


def _find_continued(
    sessions: Sequence[GatewaySession], dialect: Dialect, body: Mapping[str, Any]
) -> GatewaySession | None:
    reply = body.get("previous_response_id")
    if isinstance(reply, str):
        return next((session for session in sessions if session.has_reply(reply)), None)
    try:
        request = dialect.read(body, {})
        chain = chain_of(request.messages, request.tools)
    except (BadRequest, RecursionError):
        return None
    return next((session for session in sessions if session.has_answer_of(chain, request)), None)
