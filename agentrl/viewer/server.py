"""The web server of the viewer: its routes, its threads, its events, and the built pages.

    browser ──HTTP──▶ event loop ──call──▶ a few threads (SQLite, Parquet, JSON) ──▶ answer
                          ▲
                          └──events── watcher thread, index thread (see `library`)

The event loop never reads a run's files.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import orjson
from aiohttp import web

from agentrl.errors import AgentRLError, UsageError
from agentrl.errors.foreign import DaemonThreads
from agentrl.remote.listening import Handler, Listener, read_body
from agentrl.remote.wire import Refusal
from agentrl.viewer import api
from agentrl.viewer.library import Library, open_library
from agentrl.viewer.queries import Query
from agentrl.viewer.security import add_headers, guard
from agentrl.viewer.sources import UnknownAddress

_log = logging.getLogger(__name__)

THREADS = 4
"""Number of threads that read files for requests."""
MAX_CONNECTIONS = 256
LOOPBACK = ("127.0.0.1", "::1", "localhost")
JSON = "application/json"
Change: TypeAlias = Callable[[Library, web.Request, Mapping[str, Any]], Any]
"""Function that makes a change and returns the answer; it receives the request's body."""
MAX_LISTENERS = 100
"""Maximum number of open event streams."""
GATHER_S = 0.2
"""Seconds for which identical events are merged: an index is built in many small chunks."""
BEAT_S = 15.0
"""Seconds between the comments by which the server detects closed connections."""
STATIC = Path(__file__).parent / "static"
"""Folder of the built files."""
INDEX = "index.html"
"""Page that all URLs load; the names of other built files contain a digest."""
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".ico": "image/x-icon",
    ".js": "text/javascript",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".woff2": "font/woff2",
}
"""Content types of the served files; the system's table may differ."""
YEAR_S = 365 * 24 * 3600
_DIGEST = re.compile(r"[.-][A-Za-z0-9_-]{8,}\.\w+")
"""Suffix pattern of immutable files."""
MISSING = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>agentrl view</title></head>
<body><h1>The pages of the viewer are not built</h1>
<p>This is a source checkout. Build them with <code>make viewer</code> (it needs npm), and load this page again.</p>
<p>Without them, <code>agentrl view RUN --output FILE</code> writes one page, and <code>--terminal</code> prints
episodes. The data is at <a href="/api/sources">/api/sources</a>.</p></body></html>
"""


class EventHub:
    """Distributor of events to the open pages. `publish` is thread-safe; all other methods run in the event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: dict[asyncio.Event, str | None] = {}
        self._waiting: dict[asyncio.Event, dict[tuple[str, str], dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self) -> None:
        """Use the running event loop."""
        self._loop = asyncio.get_running_loop()

    def publish(self, kind: str, source: str, body: dict[str, Any]) -> None:
        """Send an event to the pages that listen to the source, or to all; identical events are merged."""
        with self._lock:
            loop = self._loop
            if loop is None or self._is_closed:
                return
            woken = [one for one, wanted in self._listeners.items() if wanted is None or source in ("", wanted)]
            for listener in woken:
                self._waiting[listener][kind, source] = body
        for listener in woken:
            try:
                loop.call_soon_threadsafe(listener.set)
            except RuntimeError:  # the loop has closed meanwhile
                return

    async def listen(self, source: str | None) -> AsyncIterator[bytes]:
        """Yield the events of one source or of all until `close`; ``connected`` is the first.

        At ``connected``, a page reads its data again, which may have changed before the server knew that it listens.
        """
        listener = asyncio.Event()
        with self._lock:
            if self._is_closed:
                return
            self._listeners[listener], self._waiting[listener] = source, {}
        try:
            yield _encode("connected", source or "", {})
            while not self._is_closed:
                try:
                    await asyncio.wait_for(listener.wait(), BEAT_S)
                except TimeoutError:
                    yield b": beat\n\n"
                    continue
                listener.clear()
                with self._lock:
                    events, self._waiting[listener] = self._waiting[listener], {}
                if events:
                    yield b"".join(_encode(kind, key, body) for (kind, key), body in events.items())
                    await asyncio.sleep(GATHER_S)
        finally:
            with self._lock:
                del self._listeners[listener], self._waiting[listener]

    @property
    def is_full(self) -> bool:
        """True if the maximum number of pages is listening."""
        return len(self._listeners) >= MAX_LISTENERS

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        for listener in list(self._listeners):
            listener.set()


def _encode(kind: str, source: str, body: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps({"source": source or None, **body}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewerSettings:
    """Settings of the server."""

    folders: Sequence[Path]
    """Runs, evaluations, or folders that contain them."""
    host: str = "127.0.0.1"
    port: int = 0
    """Port to listen on; 0 for a free one."""
    token: str | None = None
    """Token that clients must send; required unless the host is this machine."""


class ViewerServer:
    """Server of the viewer's pages.

    Args:
        settings: Settings.

    Raises:
        UsageError: a folder does not exist, or the host needs a token.
    """

    def __init__(self, settings: ViewerSettings) -> None:
        if settings.token is None and settings.host not in LOOPBACK:
            raise UsageError("the viewer needs a token", got=f"the host {settings.host} and no token")
        self._settings = settings
        self.hub = EventHub()
        self.library = open_library(settings.folders, self.hub.publish)
        self._threads = DaemonThreads("agentrl-view", limit=THREADS)
        self.application = self._make_application()
        self._listener = Listener(self.application, most_connections=MAX_CONNECTIONS)
        self.url = ""
        """Address of the server; set by `start`."""

    async def start(self) -> None:
        """Find the runs and start to listen.

        Raises:
            UsageError: the port is taken.
        """
        await self.open()
        self.url = await self._listener.start(self._settings.host, self._settings.port)

    async def open(self) -> None:
        """Find the runs, and start to watch them; the application can then answer."""
        self.hub.start()
        await self._in_thread(self.library.start)

    async def close(self) -> None:
        """Stop listening and release all resources; also allowed before `start`."""
        self.hub.close()
        await self._listener.close()
        await self.close_library()

    async def close_library(self) -> None:
        """End the threads and close the files."""
        await asyncio.to_thread(self.library.close)

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _make_application(self) -> web.Application:
        guarded = guard(self._settings.token, self._settings.host)
        application = web.Application(middlewares=[self._finish, guarded], client_max_size=api.MAX_BODY_BYTES)
        routes = [web.get(path, self._json(address)) for path, address in api.READS.items()]
        application.add_routes(
            [
                *routes,
                web.post("/api/r/{source}/notes", self._change(api.create_note)),
                web.delete("/api/r/{source}/notes/{note}", self._change(api.remove_note)),
                web.get("/api/r/{source}/episode/{episode}/image/{checksum}", self._send_image),
                web.get("/api/events", self._send_events),
                web.get("/", self._send_page),
                web.get("/r/{page:.*}", self._send_page),
                web.get("/compare", self._send_page),
                web.get("/{file:.*}", self._send_file),
            ]
        )
        return application

    @web.middleware
    async def _finish(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Add the headers of all responses, and turn every error into a response."""
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = _error(error.status, UsageError(error.text or error.reason))
            response.headers.extend({name: value for name, value in error.headers.items() if name == "Allow"})
        except UnknownAddress as error:
            response = _error(404, error)
        except AgentRLError as error:
            response = _error(400, error)
        except Refusal as error:
            response = _error(400, UsageError(str(error)))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # a boundary: a damaged store must not end the server
            _log.warning("%s %s failed", request.method, request.path, exc_info=True)
            response = _error(500, UsageError("the response cannot be created", got=f"{type(error).__name__}: {error}"))
        if not response.prepared:
            add_headers(response)
        return response

    def _json(self, address: api.Address) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            query = Query(request.query, address.parameters)
            found = await self._in_thread(lambda: api.encode(address.answer(self.library, request, query)))
            return web.Response(body=found, content_type=JSON, headers={"Cache-Control": "no-store"})

        return handle

    def _change(self, change: Change) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            Query(request.query)  # there is no parameter
            body = (await read_body(request, api.MAX_BODY_BYTES))[1] if request.method == "POST" else {}
            found = await self._in_thread(lambda: api.encode(change(self.library, request, body)))
            self.hub.publish("notes", request.match_info["source"], {})
            return web.Response(body=found, content_type=JSON, headers={"Cache-Control": "no-store"})

        return handle

    async def _send_image(self, request: web.Request) -> web.StreamResponse:
        Query(request.query)  # there is no parameter
        data, kind = await self._in_thread(lambda: api.find_episode_image(self.library, request))
        return web.Response(body=data, content_type=kind, headers={"Cache-Control": "private, max-age=3600"})

    async def _send_events(self, request: web.Request) -> web.StreamResponse:
        source = Query(request.query, ("source",)).text("source")
        if self.hub.is_full:
            raise web.HTTPServiceUnavailable(text="too many pages are open")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        add_headers(response)
        await response.prepare(request)
        async for event in self.hub.listen(source):
            await response.write(event)
        return response

    async def _send_page(self, request: web.Request) -> web.StreamResponse:
        depth = request.rel_url.raw_path.count("/") - 1
        response: web.Response = await self._in_thread(lambda: read_page(depth))
        return response

    async def _send_file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["file"]
        if name.startswith("api/"):
            raise web.HTTPNotFound(text=f"no such address: {request.path[:200]}")
        response: web.Response = await self._in_thread(lambda: read_asset(name))
        return response


def _error(status: int, error: AgentRLError) -> web.Response:
    body = {
        "message": error.what,
        "got": None if error.got is None else str(error.got),
        "expected": None if error.expected is None else str(error.expected),
        "hint": error.hint,
    }
    return web.Response(
        body=orjson.dumps({"error": body}), status=status, content_type=JSON, headers={"Cache-Control": "no-store"}
    )


def read_page(depth: int) -> web.Response:
    """Return the page of all addresses.

    It names its files relative to its address, `depth` folders up, so that a proxy may serve the viewer under a prefix.
    """
    try:
        text = (STATIC / INDEX).read_text(encoding="utf-8")
    except OSError:
        return web.Response(text=MISSING, content_type="text/html", status=503)
    text = text.replace('="./', '="' + "../" * depth) if depth else text
    return web.Response(text=text, content_type="text/html", headers={"Cache-Control": "no-cache"})


def read_asset(name: str) -> web.Response:
    """Return a built file.

    Raises:
        web.HTTPNotFound: there is none with this name.
    """
    kind = TYPES.get(Path(name).suffix)
    try:
        file = (STATIC / name).resolve()
        is_inside = file.is_relative_to(STATIC.resolve()) and file.is_file()
        data = file.read_bytes() if kind is not None and is_inside else None
    except (OSError, ValueError):  # a name with a null character, or too long
        data = None
    if data is None or kind is None:
        raise web.HTTPNotFound(text="no such file")
    cache = f"public, max-age={YEAR_S}, immutable" if _DIGEST.search(name) else "no-cache"
    return web.Response(body=data, content_type=kind, charset=_charset(kind), headers={"Cache-Control": cache})


def _charset(kind: str) -> str | None:
    return "utf-8" if kind.startswith("text/") or kind == "application/json" else None
