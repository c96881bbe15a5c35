"""Environment and engine servers of a run, which the campaign kills, stops and restarts.

An HTTP proxy between the run and a server loses, delays and garbles its answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from agentrl.errors import TrainingError
from agentrl.sandbox.orphan_guard import marked_processes
from agentrl.sandbox.supervisor import send_signal
from agentrl.serving.launch.guard import descendants
from agentrl.serving.launch.resources import reserve_port
from agentrl.testing.chaos.plan import PlannedFault
from agentrl.testing.chaos.processes import MARK, kill_left, send, wait_until

T = TypeVar("T")

AGENTRL = (sys.executable, "-c", "from agentrl.cli import main; main()")
"""The program `agentrl` of this interpreter, independently of ``PATH``."""
HEALTH = "/health"
"""Route that answers once a server is ready."""
ANSWER_S = 10.0
END_S = 30.0
ENVIRONMENT_START_S = 180.0
ENGINE_START_S = 600.0
LOST_S = 3.0
"""Seconds between the loss of a server and its restart."""
STOPPED_S = 10.0
"""Seconds for which a server stays stopped before it is killed and restarted."""
GENERATE = ("/inference/v1/generate", "/generate")
"""Routes of vLLM and SGLang whose answers are garbled."""
OUTAGE_S = 5.0
"""Seconds for which connections are refused or frozen."""
DELAYED_REPLY_S = 3.0
MAX_BODY_BYTES = 1 << 30
HOP_HEADERS = {"content-length", "transfer-encoding", "connection", "host", "content-encoding"}
WRONG_VALUES: tuple[Any, ...] = (None, "text", 10**7, [], {})
"""Replacement values, none of which is a valid token id, log-probability or version."""


class FaultyServer:
    """A server command, its address, and its processes.

    The route `unpause` resumes a paused engine; it is empty for environments.
    """

    def __init__(self, words: Sequence[str], folder: Path, *, start_s: float, unpause: str = "") -> None:
        folder.mkdir(parents=True)
        self._words, self._folder, self._start_s, self._unpause = words, folder, start_s, unpause
        reservation = reserve_port()
        self._port = reservation.port
        reservation.release()
        self._mark = f"{folder}/{os.getpid()}"
        self.url = f"http://127.0.0.1:{self._port}"
        self._start()

    def _start(self) -> None:
        with (self._folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                [*AGENTRL, *self._words, "--port", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, MARK: self._mark},
                start_new_session=True,
            )
        wait_until(lambda: self._process.poll() is not None or self._is_ready(), self._start_s)
        if not self._is_ready():
            said = (self._folder / "output").read_text(errors="replace")[-2000:]
            raise TrainingError(f"the server at {self.url} did not start", got=said)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + HEALTH, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def unpause(self) -> None:
        """Resume an engine that a killed run has paused, as the next run's error message asks the user to do."""
        if self._unpause:
            asking = urllib.request.Request(
                self.url + self._unpause, data=b"{}", headers={"Content-Type": "application/json"}, method="POST"
            )
            with suppress(OSError), urllib.request.urlopen(asking, timeout=ANSWER_S):
                pass

    def hit(self, way: str) -> str:
        """Send signals to one of the server's processes; restart the server unless it survives."""
        pid = random.choice(sorted(marked_processes(self._mark, MARK)))
        detail = f"process {pid}, {Path(f'/proc/{pid}/comm').read_text().strip()}"
        send(way, pid)
        if way.endswith("SIGCONT"):
            return detail
        time.sleep(STOPPED_S if way == "SIGSTOP" else LOST_S)
        self._end()
        self._start()
        return detail

    def _end(self) -> None:
        """Terminate the server and kill its remaining processes; some programs overwrite their environment."""
        started = descendants(self._process.pid)
        for number in (signal.SIGTERM, signal.SIGCONT):
            self._process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        kill_left([self._mark])
        for pid in started:
            send_signal(pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the server."""
        self._end()


def start_environment_server(environment: str, folder: Path) -> FaultyServer:
    """Start a server of an environment.

    Raises:
        TrainingError: it did not start.
    """
    words = ("env", "serve", environment, "--lease", "60", "--workers", "2")
    return FaultyServer(words, folder, start_s=ENVIRONMENT_START_S)


def start_engine_server(engine: str, model: str, folder: Path) -> FaultyServer:
    """Start a vLLM or SGLang server of a model.

    Raises:
        TrainingError: it did not start.
    """
    settings = ("--folder", str(folder / "logs"), "--max-context", "512", "engine.max_num_seqs=16")
    words = ("serve", "--engine", engine, "--model", model, *settings, "model.dtype=float32")
    unpause = {"vllm": "/resume", "sglang": "/continue_generation"}[engine]
    return FaultyServer(words, folder, start_s=ENGINE_START_S, unpause=unpause)


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
    """Proxy of one server, in its own thread."""

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
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return "http://127.0.0.1:{1}".format(*self._runner.addresses[0][:2])

    def inject(self, fault: PlannedFault) -> None:
        """Apply a connection fault now, or an answer fault at the next request for an answer."""
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
