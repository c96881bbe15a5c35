"""Access rules of the viewer: which requests it accepts, and which resources its pages may load.

Without a token, the ``Host`` and ``Origin`` of a request must be this machine. With a token, which is required if other
machines can connect, a browser sends the token once, in the URL that the command prints, and receives a cookie for it,
which pages of other sites cannot use.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from aiohttp import web
from yarl import URL

from agentrl.remote.listening import Handler, is_own_page, own_names

CONTENT_POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data:",
        "style-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content-Security-Policy of all responses: no resources of other sites, and no inline scripts or styles."""
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
COOKIE = "agentrl_view"
TOKEN = "token"
"""Query parameter of the URL that the command prints."""


def add_headers(response: web.StreamResponse) -> None:
    """Add the headers of all answers."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


def guard(token: str | None, host: str) -> Any:
    """Make a middleware that admits only the user's own requests.

    Args:
        token: Token that clients must send; without one, only requests to this machine's names are accepted.
        host: Address on which the server listens.
    """
    names = own_names(host)
    secret = None if token is None else hashlib.sha256(f"agentrl view {token}".encode()).hexdigest()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is None or secret is None:
            if not is_own_page(request, names):
                raise web.HTTPForbidden(
                    text="without a token the viewer answers only requests to this machine: behind a proxy, use "
                    "--token-file"
                )
            return await handler(request)
        if not _is_same_site(request):
            raise web.HTTPForbidden(text="the viewer answers only its own pages")
        shown = request.query.get(TOKEN)
        if shown is not None and _equal(shown, token) and request.method == "GET":
            return _with_cookie(request, secret)
        bearer = request.headers.get("Authorization", "")
        if _equal(request.cookies.get(_cookie(request), ""), secret) or _equal(bearer, f"Bearer {token}"):
            return await handler(request)
        raise web.HTTPUnauthorized(text="open the address with ?token=… that agentrl view has printed")

    return check


def _cookie(request: web.Request) -> str:
    """Return the name of the cookie, which contains the port: browsers send a host's cookies to all of its ports."""
    return f"{COOKIE}_{request.url.port}"


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="surrogateescape"), other.encode(errors="surrogateescape"))


def _is_same_site(request: web.Request) -> bool:
    """Return True unless ``Origin`` shows that a page of another site sent the request."""
    origin = request.headers.get("Origin")
    if origin is None:
        return True
    try:
        return URL(origin).authority.lower() == request.host.lower()
    except ValueError:
        return False


def _with_cookie(request: web.Request, secret: str) -> web.Response:
    """Redirect the browser to the same URL without the token, and set the cookie.

    The location is relative, because a proxy may serve the viewer under a prefix.
    """
    target = request.rel_url.without_query_params(TOKEN)
    page = "./" + target.raw_path.rpartition("/")[2]
    location = f"{page}?{target.raw_query_string}" if target.raw_query_string else page
    response = web.Response(status=303, headers={"Location": location, "Cache-Control": "no-store"})
    response.set_cookie(_cookie(request), secret, httponly=True, samesite="Strict", path="/")
    return response
