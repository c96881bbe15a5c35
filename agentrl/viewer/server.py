"""The web server of the viewer: its routes, its threads, its start and end.

    browser ──HTTP──▶ event loop ──call──▶ a few threads (SQLite, Parquet, JSON) ──▶ answer
                          ▲
                          └──events── watcher thread, index thread (see `library`)

The event loop itself never reads a file of a run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import orjson
from aiohttp import web

from agentrl.errors import AgentRLError, UsageError
from agentrl.errors.foreign import DaemonThreads
from agentrl.remote.listening import Handler, Listener, read_body
from agentrl.remote.wire import Refusal
from agentrl.viewer import api, static_files
from agentrl.viewer.events import EventHub
from agentrl.viewer.library import Library, open_library
from agentrl.viewer.queries import Query
from agentrl.viewer.security import add_headers, guard
from agentrl.viewer.sources import UnknownAddress

_log = logging.getLogger(__name__)

THREADS = 4
"""Threads that read files for requests."""
MOST_CONNECTIONS = 256
LOOPBACK = ("127.0.0.1", "::1", "localhost")
JSON = "application/json"
Answer: TypeAlias = Callable[[Library, web.Request, Query], Any]
"""Function that makes the answer of an address, in a thread."""


Change: TypeAlias = Callable[[Library, web.Request, Mapping[str, Any]], Any]
"""Function that changes something, and makes the answer; it receives the request's body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewerSettings:
    """Settings of the server."""

    folders: Sequence[Path]
    """Runs, evaluations, or folders that contain some."""
    host: str = "127.0.0.1"
    port: int = 0
    """Port to listen on; 0 for a free one."""
    token: str | None = None
    """Token that clients must show; required unless the host is this machine."""


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
        self._listener = Listener(self.application, most_connections=MOST_CONNECTIONS)
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
        application = web.Application(middlewares=[self._finish, guarded], client_max_size=api.LARGEST_BODY)
        routes = [web.get(path, self._json(answer)) for path, answer in api.READS.items()]
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
        """Add the headers of all answers, and turn every error into an answer."""
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
            response = _error(500, UsageError("the answer cannot be made", got=f"{type(error).__name__}: {error}"))
        if not response.prepared:
            add_headers(response)
        return response

    def _json(self, answer: Answer) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            query = Query(request.query)
            found = await self._in_thread(lambda: api.encode(answer(self.library, request, query)))
            return web.Response(body=found, content_type=JSON, headers={"Cache-Control": "no-store"})

        return handle

    def _change(self, change: Change) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = (await read_body(request, api.LARGEST_BODY))[1] if request.method == "POST" else {}
            found = await self._in_thread(lambda: api.encode(change(self.library, request, body)))
            self.hub.publish("notes", request.match_info["source"], {})
            return web.Response(body=found, content_type=JSON, headers={"Cache-Control": "no-store"})

        return handle

    async def _send_image(self, request: web.Request) -> web.StreamResponse:
        data, kind = await self._in_thread(lambda: api.find_episode_image(self.library, request))
        return web.Response(body=data, content_type=kind, headers={"Cache-Control": "private, max-age=3600"})

    async def _send_events(self, request: web.Request) -> web.StreamResponse:
        if self.hub.is_full:
            raise web.HTTPServiceUnavailable(text="too many pages are open")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        add_headers(response)
        await response.prepare(request)
        async for event in self.hub.listen(request.query.get("source") or None):
            await response.write(event)
        return response

    async def _send_page(self, request: web.Request) -> web.StreamResponse:
        response: web.Response = await self._in_thread(static_files.page)
        return response

    async def _send_file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["file"]
        if name.startswith("api/"):
            raise web.HTTPNotFound(text=f"no such address: {request.path[:200]}")
        response: web.Response = await self._in_thread(lambda: static_files.asset(name))
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
