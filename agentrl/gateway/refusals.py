"""Errors of requests that are not answered, and what the client receives for each; unknown routes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from aiohttp import web

from agentrl.errors import AgentRLError, EngineError
from agentrl.gateway.dialect import BadRequest, Dialect

RETRIED = (408, 409, 425, 429)
"""Statuses below 500 after which the vendors' packages retry."""
NOT_IMPLEMENTED = 501
TOO_DEEP = "the request is nested too deeply"
NOT_SERVED: Mapping[str, str] = {
    "/completions": "Plain text is not completed here, because each answer is a turn of a chat in the model's chat "
    "template: send messages to /v1/chat/completions",
    "/embeddings": "The policy makes no embeddings",
    "/responses/compact": "Histories are not compacted here: send them whole",
}
"""Reasons why routes that clients know are not served, by the end of their path."""
BASE_URL = "The base URL ends with /v1 in OpenAI's packages, and before it in Anthropic's"
ANTHROPIC_VERSION = "anthropic-version"
"""Header that Anthropic's clients send with each request."""
NO_WEBSOCKET = 426
"""Status after which Codex goes on without WebSockets; after others it first tries again, for minutes."""


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


def dialect_of(request: web.Request, dialects: Sequence[Dialect]) -> Dialect:
    """Return the dialect whose errors the client of a request reads."""
    name = "anthropic" if ANTHROPIC_VERSION in request.headers else dialects[0].name
    return next(dialect for dialect in dialects if dialect.name == name)


async def refuse_route(request: web.Request, dialects: Sequence[Dialect]) -> web.Response:
    """Answer a request that no route takes: another method is expected, or another path."""
    found = [(await resource.resolve(request))[1] for resource in request.app.router.resources()]
    methods = sorted(set().union(*found) - {"*", "HEAD"})
    if not methods:
        return refuse_path(request, dialects)
    expected = " or ".join(methods)
    if request.headers.get("Upgrade", "").lower() == "websocket":
        text = f"there are no WebSockets here: send {expected} {request.path}"
        return _refusal(request, dialects, NO_WEBSOCKET, text, "unsupported", {"Upgrade": "HTTP/1.1"})
    text = f"{request.path} does not accept {request.method}: expected {expected}"
    if "Access-Control-Request-Method" in request.headers:
        text = f"a web page cannot send requests to this gateway: send {expected} {request.path} from a program"
    return _refusal(request, dialects, 405, text, "method_not_allowed", {"Allow": ", ".join(methods)})


def refuse_path(request: web.Request, dialects: Sequence[Dialect]) -> web.Response:
    """Answer a request for an unknown path."""
    routes, path = [dialect.path for dialect in dialects], request.path
    text = f"unknown route {request.method} {path}: expected POST to one of {', '.join(routes)}"
    meant = re.sub(r"/+", "/", path).rstrip("/")
    served = next((route for route in routes if meant.endswith(route.removeprefix("/v1"))), None)
    refused = next((end for end in NOT_SERVED if meant.endswith(end)), None)
    if served is not None:
        is_exact = meant != path and meant.endswith(served)
        text += f". Did you mean {meant[-120:]}?" if is_exact else f". {BASE_URL}"
    elif refused is not None:
        text += f". {NOT_SERVED[refused]}"
    return _refusal(request, dialects, 404, text, "not_found", {})


def _refusal(
    request: web.Request, dialects: Sequence[Dialect], status: int, text: str, code: str, headers: Mapping[str, str]
) -> web.Response:
    body = dialect_of(request, dialects).error(status, text, code=code)
    return web.Response(body=json.dumps(body).encode(), status=status, headers=headers, content_type="application/json")
