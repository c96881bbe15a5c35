"""The server of sandboxes: `agentrl sandbox serve`. It shares the core of the environment server."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from agentrl.env_server.listening import Listener, guard, read_body
from agentrl.env_server.methods import field
from agentrl.env_server.refusal import Refusal
from agentrl.env_server.routes import SESSION_NAME, error_answers, respond, to_response
from agentrl.env_server.sandbox_methods import SANDBOX_METHODS, variables
from agentrl.env_server.served_sandbox import ServedSandbox
from agentrl.env_server.server import SWEEPS_PER_LEASE, ServerSettings
from agentrl.env_server.session import Clock
from agentrl.errors import UsageError
from agentrl.remote.wire import HEALTH, Problem
from agentrl.sandbox import Limits, SandboxSpec, open_sandbox
from agentrl.sandbox.http_wire import LARGEST_CALL, PROTOCOL, SANDBOXES, VERSION, largest_request, read_limits
from agentrl.sandbox.spec import NO_NETWORK

KEPT_NAMES = 1000
"""Names of closed sandboxes that are not opened again."""


class SandboxServer:
    """Serves sandboxes until it is closed. Lives in one event loop.

    Args:
        spec: What they are like; clients may ask for less, and never for more.
        settings: How they are served.
        clock: Seconds, for leases.
    """

    def __init__(self, spec: SandboxSpec, settings: ServerSettings, *, clock: Clock = time.monotonic) -> None:
        self.spec, self.settings, self.url = spec, settings, ""
        self._clock = clock
        self._opened: dict[str, asyncio.Task[ServedSandbox]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._ended: dict[str, None] = {}
        self._listener: Listener | None = None
        self._sweeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._opened)

    async def start(self) -> None:
        """Open a sandbox to see that it can be done, then listen.

        Raises:
            UsageError: the spec asks for what this machine cannot do, or the port is taken.
            SandboxError: no sandbox starts.
        """
        async with open_sandbox(self.spec):
            pass
        application = web.Application(middlewares=[error_answers, guard(self.settings.token, self.settings.host)])
        application.add_routes(
            [
                web.get(HEALTH, self._health),
                web.put(SANDBOXES + "/{name}", self._open),
                web.post(SANDBOXES + "/{name}/{method}", self._call),
                web.delete(SANDBOXES + "/{name}", self._end),
            ]
        )
        self._listener = Listener(application, most_connections=self.settings.most_connections)
        self.url = await self._listener.start(self.settings.host, self.settings.port)
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Stop listening and close all sandboxes. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
        await self._drop_all()  # which answers the calls that are under way
        if self._listener is not None:
            await self._listener.close()
        await self._drop_all()  # what was opened meanwhile

    def expire(self) -> None:
        """Close the sandboxes whose lease is over."""
        for name, opened in list(self._opened.items()):
            if _is_open(opened) and opened.result().idle_s > self.settings.lease_s:
                self._drop(name)

    async def _health(self, _request: web.Request) -> web.Response:
        return respond({"protocol": PROTOCOL, "versions": [VERSION], "status": "ok"})

    async def _open(self, request: web.Request) -> web.Response:
        """Open a sandbox under the client's name for it, unless that has been done."""
        name = request.match_info["name"]
        if not SESSION_NAME.fullmatch(name):
            raise Refusal(Problem.REQUEST, f"{name[:80]!r} names no sandbox: 8 to 64 letters, digits, - or _")
        if name in self._ended:  # by a client that did not wait for the answer
            raise Refusal(Problem.SESSION, f"the sandbox {name} was closed")
        spec = self._narrowed((await read_body(request, LARGEST_CALL))[1])
        if name not in self._opened:
            if len(self._opened) >= self.settings.max_sessions:
                raise Refusal(Problem.BUSY, f"all {self.settings.max_sessions} sandboxes are taken")
            self._opened[name] = asyncio.create_task(self._begin(spec))
        opening = self._opened[name]
        try:
            served = await asyncio.shield(opening)
        except Exception:
            if self._opened.get(name) is opening:
                del self._opened[name]
            raise
        return respond({"folder": served.sandbox.folder})

    async def _begin(self, spec: SandboxSpec) -> ServedSandbox:
        sandbox = open_sandbox(spec)
        await sandbox.start()
        return ServedSandbox(sandbox, self._clock)

    def _narrowed(self, wanted: Mapping[str, Any]) -> SandboxSpec:
        """The server's spec, with the client's wishes as far as they ask for less.

        Raises:
            UsageError: they ask for more.
        """
        try:
            asked = read_limits(wanted.get("limits")) or Limits()
        except TypeError as error:
            raise Refusal(Problem.REQUEST, f"'limits' of the request: {error}") from error
        self._refuse_higher(asked, field({"demanded": [], **wanted}, "demanded", list))
        limits = self.spec.limits.narrowed(asked)
        network, image = wanted.get("network", NO_NETWORK), wanted.get("image")
        network = tuple(map(str, network)) if isinstance(network, list) else network
        if network not in (NO_NETWORK, self.spec.network):
            raise UsageError("sandboxes are served without this network", got=network, expected=self.spec.network)
        if image not in (None, self.spec.image):
            raise UsageError("sandboxes are served without this image", got=image, expected=self.spec.image or "none")
        env = {**self.spec.env, **variables(wanted)}
        return dataclasses.replace(self.spec, limits=limits, network=network, env=env)

    def _refuse_higher(self, asked: Limits, demanded: Sequence[str]) -> None:
        """Refuse limits that are higher than the server's; those that nobody demanded are lowered instead.

        Raises:
            UsageError: names them.
        """
        given = self.spec.limits.given
        higher = [name for name, value in asked.given.items() if name in demanded and value > given[name]]
        if higher:
            raise UsageError(
                "sandboxes are served with lower limits",
                got=", ".join(f"limits.{name}={asked.given[name]:g}" for name in higher),
                expected=", ".join(f"at most {given[name]:g}" for name in higher),
                hint="ask for less, or start the server with --set limits.NAME=VALUE",
            )

    async def _call(self, request: web.Request) -> web.Response:
        """Carry out a call."""
        opened = self._opened.get(request.match_info["name"])
        if opened is None or not _is_open(opened):
            hint = f"it was closed, or nobody asked it for {self.settings.lease_s:g} s, or the server was started again"
            raise Refusal(Problem.SESSION, f"there is no such sandbox: {hint}")
        served, method = opened.result(), request.match_info["method"]
        if method not in SANDBOX_METHODS:
            raise Refusal(Problem.REQUEST, f"there is no method {method!r}: expected {', '.join(SANDBOX_METHODS)}")
        raw, body = await read_body(request, largest_request(method, self.spec.limits))
        do = SANDBOX_METHODS[method]
        return to_response(await served.answer(field(body, "id", str), method.encode() + raw, lambda: do(served, body)))

    async def _end(self, request: web.Request) -> web.Response:
        """Close a sandbox; one that is not there is closed already."""
        self._drop(request.match_info["name"])
        return respond({})

    async def _drop_all(self) -> None:
        for name in list(self._opened):
            self._drop(name)
        while self._closing:
            await asyncio.wait(set(self._closing))

    def _drop(self, name: str) -> None:
        self._ended[name] = None
        for oldest in list(self._ended)[:-KEPT_NAMES]:
            del self._ended[oldest]
        opened = self._opened.pop(name, None)
        if opened is not None:
            closing = asyncio.create_task(_close(opened))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.settings.lease_s / SWEEPS_PER_LEASE)
            self.expire()


def _is_open(opened: asyncio.Task[ServedSandbox]) -> bool:
    """Whether a sandbox is there, and neither still being opened nor could not be."""
    return opened.done() and not opened.cancelled() and opened.exception() is None


async def _close(opened: asyncio.Task[ServedSandbox]) -> None:
    if not opened.done():
        await asyncio.wait({opened})
    if _is_open(opened):
        await opened.result().close()
