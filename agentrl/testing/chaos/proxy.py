"""HTTP proxy between a run and a server, which loses, delays and garbles answers."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from agentrl.testing.chaos.plan import PlannedFault

T = TypeVar("T")
GENERATE = ("/inference/v1/generate", "/generate")
"""Routes of vLLM and SGLang whose answers are garbled."""
OUTAGE_S = 5.0
"""Seconds for which connections are refused or frozen."""
DELAYED_REPLY_S = 3.0
LARGEST_BODY = 1 << 30
HOP_HEADERS = {"content-length", "transfer-encoding", "connection", "host", "content-encoding"}
WRONG_VALUES: tuple[Any, ...] = (None, "text", 10**7, [], {})
"""Replacements of a value, none of which is a valid token id, log-probability or version."""


def garble_json(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one random change: a missing field or item, or a value of the wrong kind or range."""
    if isinstance(value, dict) and value:
        name = rng.choice(sorted(value))
        if rng.random() < 0.2:
            return {key: item for key, item in value.items() if key != name}
        return {**value, name: garble_json(value[name], rng)}
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return [*value[:at], *value[at + 1 :]]
        return [*value[:at], garble_json(value[at], rng), *value[at + 1 :]]
    return rng.choice([wrong for wrong in WRONG_VALUES if wrong != value])


class FaultyProxy:
    """Proxy of one server, in a thread of its own.

    Args:
        target: Address of the server.
        note: Called with the way of each fault of an answer that took effect.
    """

    def __init__(self, target: str, note: Callable[[str], None]) -> None:
        self.target = target.rstrip("/")
        self._note = note
        self._answers: deque[PlannedFault] = deque()
        self._refuses_until = self._freezes_until = 0.0
        self._connections: set[asyncio.Transport] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos proxy", daemon=True)
        self._thread.start()
        self.url = self._run(self._start())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _start(self) -> str:
        self._session = aiohttp.ClientSession(auto_decompress=True)
        application = web.Application(client_max_size=LARGEST_BODY)
        application.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return "http://127.0.0.1:{1}".format(*self._runner.addresses[0][:2])

    def inject(self, fault: PlannedFault) -> None:
        """Apply a fault of the connections now, or one of an answer with the next request for one."""
        match fault.way:
            case "refused":
                self._refuses_until = time.monotonic() + OUTAGE_S
            case "frozen":
                self._freezes_until = time.monotonic() + OUTAGE_S
            case "dropped":
                pass
            case _:
                self._answers.append(fault)
                return
        self._loop.call_soon_threadsafe(self._drop)

    def _drop(self) -> None:
        for transport in self._connections:
            transport.abort()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        if transport is None:
            return web.Response(status=503)
        self._connections.add(transport)
        try:
            now = time.monotonic()
            if now < self._refuses_until:
                transport.abort()
                return web.Response(status=503)
            await asyncio.sleep(max(0.0, self._freezes_until - now))
            return await self._answer(request, transport)
        finally:
            self._connections.discard(transport)

    async def _answer(self, request: web.Request, transport: asyncio.Transport) -> web.StreamResponse:
        fault = self._answers.popleft() if self._answers and request.path in GENERATE else None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS}
        try:
            async with self._session.request(
                request.method, self.target + request.path_qs, data=await request.read(), headers=headers
            ) as found:
                status, body, kind = found.status, await found.read(), found.content_type
        except (aiohttp.ClientError, ConnectionError):
            transport.abort()
            return web.Response(status=503)
        if fault is not None:
            self._note(fault.way)
            status, body = await _disturb(fault, status, body)
        return web.Response(status=status, body=body, content_type=kind)

    def close(self) -> None:
        """Close all connections and end the thread."""
        self._run(self._runner.cleanup())
        self._run(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _disturb(fault: PlannedFault, status: int, body: bytes) -> tuple[int, bytes]:
    rng = random.Random(fault.draw)
    match fault.way:
        case "lost":
            await asyncio.Event().wait()
        case "late":
            await asyncio.sleep(DELAYED_REPLY_S)
        case "failed":
            return 500, b'{"error": "a fault of agentrl chaos"}'
        case "truncated":
            return status, body[: rng.randrange(len(body) or 1)]
        case _:
            return status, json.dumps(garble_json(json.loads(body), rng)).encode()
    return status, body
