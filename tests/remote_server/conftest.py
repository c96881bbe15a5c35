"""Environment servers in a thread of the test's process, on real sockets, and a proxy that loses answers."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.waiting import join

from agentrl.env import EnvironmentSpec
from agentrl.remote.server import EnvironmentServer, MCPServer, OpenEnvServer, ServerSettings

sys.path.append(str(Path(__file__).parent))


class LoopThread:
    """An event loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.ending: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """What is called at the end."""

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def stop(self) -> None:
        for end in self.ending:
            self.run(end())
        self.run(self._cancel_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        join(self.thread)
        self.loop.close()

    async def _cancel_tasks(self) -> None:
        """Cancel what libraries leave running, as `asyncio.run` does."""
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in left:
                task.cancel()
            await asyncio.wait(left)


class Running:
    """A server."""

    def __init__(self, thread: LoopThread, server: EnvironmentServer | OpenEnvServer | MCPServer) -> None:
        self.thread, self.server = thread, server
        self.now = 0.0
        """The time of leases."""

    @property
    def url(self) -> str:
        return self.server.url

    def count(self) -> int:
        """Open sessions."""
        return len(self.server.sessions)

    def expire(self) -> None:
        """Let a lease pass."""
        self.now += 2 * self.server.settings.lease_s
        self.thread.loop.call_soon_threadsafe(self.server.sessions.expire)
        self.thread.run(asyncio.sleep(0))

    def close(self) -> None:
        self.thread.run(self.server.close())


Serve = Callable[..., Running]


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


@pytest.fixture
def serve(loop_thread: LoopThread) -> Iterator[Serve]:
    """Starts servers; they end with the test."""
    with ExitStack() as stack:

        def start(
            spec: EnvironmentSpec,
            options: dict[str, Any] | None = None,
            kind: type[EnvironmentServer | OpenEnvServer | MCPServer] = EnvironmentServer,
            **settings: Any,
        ) -> Running:
            async def make() -> Running:
                server = kind(spec, options or {}, ServerSettings(**settings), clock=lambda: running.now)
                running = Running(loop_thread, server)
                await server.start()
                return running

            running: Running = loop_thread.run(make())
            stack.callback(running.close)
            return running

        yield start


class Proxy:
    """Passes requests on; loses answers or whole requests when `loses` or `swallows` says so."""

    def __init__(self, target: str) -> None:
        self.target, self.url = target, ""
        self.loses: Callable[[str], bool] = lambda _: False
        """The server gets the request, and the client no answer."""
        self.swallows: Callable[[str], bool] = lambda _: False
        """The server does not get the request either."""
        self.refused = threading.Event()
        """Set when the server has said that it is busy."""

    async def start(self) -> None:
        self.session = aiohttp.ClientSession()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.forward)
        self.runner = web.AppRunner(application, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = "http://127.0.0.1:{1}".format(*self.runner.addresses[0][:2])

    async def forward(self, request: web.Request) -> web.StreamResponse:
        route = f"{request.method} {request.path_qs}"
        if self.swallows(route):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        async with self.session.request(
            request.method, self.target + request.path_qs, data=await request.read(), headers=request.headers
        ) as answer:
            body = await answer.read()
        if answer.status == 503:
            self.refused.set()
        if self.loses(route):
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=answer.status, body=body, content_type="application/json")

    async def close(self) -> None:
        await self.runner.cleanup()
        await self.session.close()


@pytest.fixture
def proxy(loop_thread: LoopThread) -> Iterator[Callable[[str], Proxy]]:
    """Starts proxies."""
    with ExitStack() as stack:

        def start(target: str) -> Proxy:
            made = Proxy(target)
            loop_thread.run(made.start())
            stack.callback(lambda: loop_thread.run(made.close()))
            return made

        yield start


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_ENV_TOKEN", raising=False)
