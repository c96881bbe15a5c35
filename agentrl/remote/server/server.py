"""Server of one environment: the routes of the protocol (``docs/environments/remote.md``), start and shutdown.

Before it listens, the server creates one environment to check the options and to find the optional parts.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from agentrl.env import EnvironmentSpec
from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.remote.env_methods import ACTION_HINT, PARTS, SERVED_METHODS
from agentrl.remote.listening import Handler, Listener, guard, read_body
from agentrl.remote.server.session import Clock, Leases, ServerReply, Session, error_answer
from agentrl.remote.wire import (
    HEALTH,
    INFO,
    MAX_CALL_BYTES,
    PROTOCOL,
    SESSIONS,
    TASKS,
    TASKS_PER_PAGE,
    VERSION,
    Refusal,
    RefusalKind,
    field,
    to_json,
    write_served,
    write_task,
)
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.environment_probe import probe_environment
from agentrl.task import TaskSource


def make_application(
    *,
    info: Mapping[str, Any],
    sessions: Leases[Session],
    begin: Callable[[str], Coroutine[Any, Any, Session]],
    tasks: Callable[[str], TaskSource],
    splits: Sequence[str],
    token: str | None,
    host: str,
) -> web.Application:
    """Make an aiohttp application of the routes.

    Without `token`, clients need no token.
    """
    routes = _Routes(info, sessions, begin, functools.cache(tasks), splits)
    application = web.Application(middlewares=[error_answers, guard(token, host)])
    application.add_routes(
        [
            web.get(HEALTH, routes.health),
            web.get(INFO, routes.info),
            web.get(TASKS + "/{split}", routes.list_tasks),
            web.put(SESSIONS + "/{session}", routes.open_session),
            web.post(SESSIONS + "/{session}/{method}", routes.call),
            web.delete(SESSIONS + "/{session}", routes.end_session),
        ]
    )
    return application


@dataclass(frozen=True, slots=True)
class _Routes:
    description: Mapping[str, Any]
    sessions: Leases[Session]
    begin: Callable[[str], Coroutine[Any, Any, Session]]
    tasks: Callable[[str], TaskSource]
    splits: Sequence[str]

    async def health(self, _request: web.Request) -> web.Response:
        """Answer with the protocol's name and versions; needs no token."""
        return respond({"protocol": PROTOCOL, "versions": [VERSION], "status": "ok"})

    async def info(self, _request: web.Request) -> web.Response:
        """Answer with the description of the environment."""
        return respond(self.description)

    async def list_tasks(self, request: web.Request) -> web.Response:
        """Answer with a page of a split's tasks."""
        split = request.match_info["split"]
        if split not in self.splits:
            raise UsageError(f"unknown split {split!r}", expected=f"one of {', '.join(self.splits)}")
        start, count = _natural(request, "start", 0), _natural(request, "count", TASKS_PER_PAGE)
        source = self.tasks(split)
        end = min(start + min(count, TASKS_PER_PAGE), len(source))
        return respond({"total": len(source), "tasks": [write_task(source[index]) for index in range(start, end)]})

    async def open_session(self, request: web.Request) -> web.Response:
        """Open a session with the name that the client chose."""
        name = request.match_info["session"]
        self.sessions.check_name(name)
        wanted, served = (
            (await read_body(request, MAX_CALL_BYTES))[1].get("fingerprint"),
            self.description["fingerprint"],
        )
        if wanted not in (None, served):
            raise UsageError(
                f"the served environment {self.description['spec']['name']}, its options or its version have changed",
                got=f"fingerprint {served}",
                expected=wanted,
                hint="start the run again",
            )
        await self.sessions.open(name, lambda: self.begin(name))
        return respond({"session": name})

    async def call(self, request: web.Request) -> web.Response:
        """Execute a numbered request in a session."""
        session = self.sessions.find(request.match_info["session"])
        name = request.match_info["method"]
        method = SERVED_METHODS.get(name)
        if method is None:
            names = ", ".join(SERVED_METHODS)
            raise Refusal(RefusalKind.REQUEST, f"unknown method {name!r}: expected one of {names}")
        raw, body = await read_body(request, method.largest_request)
        number = field(body, "number", int)
        return to_response(await session.answer(number, name.encode() + raw, lambda: session.perform(method, body)))

    async def end_session(self, request: web.Request) -> web.Response:
        """Close a session."""
        self.sessions.end(request.match_info["session"])
        return respond({})


@web.middleware
async def error_answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return every error in the protocol's format."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        answer = error_answer(Refusal(RefusalKind.REQUEST, f"{request.method} {request.path}: {error.reason}"))
        return to_response(ServerReply(error.status, answer.body))
    except Exception as error:
        return to_response(error_answer(error))


def _natural(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise Refusal(RefusalKind.REQUEST, f"{name!r} of the query is {text[:80]!r}, expected a whole number")
    return int(text)


def respond(value: Any) -> web.Response:
    """Return a successful response with JSON."""
    return to_response(ServerReply(200, to_json(value)))


def to_response(answer: ServerReply) -> web.Response:
    """Convert an answer to an aiohttp response."""
    return web.Response(status=answer.status, body=answer.body, content_type="application/json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of an environment server."""

    host: str = "127.0.0.1"
    """Address to listen on; the default is reachable from this machine only."""
    port: int = 0
    """Port; 0 for any free one."""
    token: str | None = None
    """Token that clients must send; ``None`` requires none."""
    max_sessions: int = 256
    """Maximum number of concurrent sessions."""
    lease_s: float = 900.0
    """Seconds without a request after which a session is closed."""
    workers: int = 4
    """Number of threads or processes, for environments that do not run in the event loop."""
    reset_timeout_s: float = 60.0
    """Timeout in seconds for creating and resetting an environment."""
    step_timeout_s: float = 30.0
    """Timeout in seconds of all other calls."""

    @property
    def most_connections(self) -> int:
        """Maximum number of connections; a session has one per running request."""
        return 4 * self.max_sessions + 64


class EnvironmentServer:
    """Server of one environment; it belongs to one event loop.

    `options` override those of `spec`.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        options: Mapping[str, Any],
        settings: ServerSettings,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.url = ""
        self._options = {**spec.options, **options}
        self._pool = EnvPool(
            spec,
            options=options,
            workers=settings.workers,
            max_concurrent=settings.max_sessions,
            reset_timeout_s=settings.reset_timeout_s,
            step_timeout_s=settings.step_timeout_s,
        )
        self.sessions: Leases[Session] = Leases(
            ("session", "sessions"), most=settings.max_sessions, lease_s=settings.lease_s
        )
        self._clock = clock
        self._listener: Listener | None = None

    async def start(self) -> None:
        """Make an environment to describe it, then listen.

        Raises:
            UsageError: the options are wrong, or the port is taken.
            EnvironmentFailure: the environment cannot be made.
        """
        try:
            info = await self._look()
        except EnvironmentFailure:
            await asyncio.to_thread(probe_environment, self.spec, self._options, lambda _: None)  # names wrong options
            raise
        application = make_application(
            info=info,
            sessions=self.sessions,
            begin=self._begin,
            tasks=lambda split: self.spec.tasks_under(split, self._options),
            splits=self.spec.splits_under(self._options),
            token=self.settings.token,
            host=self.settings.host,
        )
        self._listener = Listener(application, most_connections=self.settings.most_connections)
        self.url = await self._listener.start(self.settings.host, self.settings.port)
        self.sessions.start_expiring()

    async def close(self) -> None:
        """Stop listening, and close all sessions and environments; idempotent."""
        if self._listener is not None:
            await self._listener.close()
        await self.sessions.close()
        await self._pool.close()

    async def _look(self) -> dict[str, Any]:
        """Make an environment and describe it for clients."""
        async with self._pool.borrow("the server") as handle:
            parts, hint = await handle.call(PARTS), await handle.call(ACTION_HINT)
        return write_served(self.spec, self._options, parts, hint)

    async def _begin(self, name: str) -> Session:
        stack = AsyncExitStack()
        handle = await stack.enter_async_context(self._pool.borrow(f"session {name[:8]}"))
        return Session(handle, stack, tool_timeout_s=self.settings.step_timeout_s, clock=self._clock)
