"""Which of several sessions a request belongs to, where neither its path nor its key says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.gateway.dialect import BadRequest, Dialect
from agentrl.gateway.history import chain_of
from agentrl.gateway.session import GatewaySession
from agentrl.gateway.work import digest_of, off_loop


async def session_of_history(
    sessions: Sequence[GatewaySession], dialect: Dialect, body: Mapping[str, Any], raw: bytes, *, is_retry: bool
) -> GatewaySession:
    """Return the session in which a request's conversation goes on; the first of them for a new conversation.

    Args:
        sessions: Those that the request may belong to.
        dialect: Of the client, as the other arguments of `GatewaySession.begin`.
        body: The request's JSON.
        raw: Its bytes.
        is_retry: The client says that it has sent this before.
    """
    first = sessions[0]
    if len(sessions) == 1:
        return first
    if is_retry:
        digest = await off_loop(len(raw), digest_of, dialect.path, raw)
        if known := next((session for session in sessions if session.has_request(digest)), None):
            return known
    found = await off_loop(len(raw), _which_continues, sessions, dialect, body)
    return first if found is None else found


def _which_continues(
    sessions: Sequence[GatewaySession], dialect: Dialect, body: Mapping[str, Any]
) -> GatewaySession | None:
    reply = body.get("previous_response_id")
    if isinstance(reply, str):
        return next((session for session in sessions if session.has_reply(reply)), None)
    try:
        asked = dialect.read(body, {})
        chain = chain_of(asked.messages, asked.tools)
    except (BadRequest, RecursionError):
        return None
    return next((session for session in sessions if session.has_answer_of(chain, asked)), None)
