"""Sandboxes: start, exec, Python round trip, 64 concurrently; compared with the same operations without agentrl.

agentrl bench sandbox
agentrl bench sandbox starts=100 at_once=64
agentrl bench sandbox backend=docker image=python:3.12-slim at_once=16
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from agentrl.sandbox import Sandbox, SandboxSpec, open_sandbox
from agentrl.sandbox.docker.container_plan import DEFAULT_IMAGE, Image, Traits, plan, read_options
from agentrl.sandbox.docker.daemon import EXTRA
from agentrl.sandbox.docker.sandbox import SUPPLY
from agentrl.sandbox.isolation import arguments, find_bubblewrap
from agentrl.sandbox.local import SUPERVISOR
from agentrl.sandbox.spec import DEFAULT_LIMITS, NO_NETWORK

ECHO = "import sys\nfor line in sys.stdin: print(eval(line), flush=True)"
COMMANDS_EACH = 5
REQUESTS = """
import http.client, sys, time
for port in sys.argv[2:]:
    for _ in range(int(sys.argv[1])):
        began = time.perf_counter()
        client = http.client.HTTPConnection("127.0.0.1", int(port))
        client.request("GET", "/")
        assert client.getresponse().read() == b"hello"
        client.close()
        print(time.perf_counter() - began)
"""
"""Program that prints the seconds of each request, with one connection each."""


def run(
    backend: str = "local",
    starts: int = 50,
    execs: int = 200,
    at_once: int = 64,
    image: str | None = None,
    url: str | None = None,
    env: dict[str, str] | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the milliseconds of each step.

    Args:
        backend: Name of the back end.
        starts: Number of sandboxes started one after the other.
        execs: Number of commands, and of Python round trips, in one sandbox.
        at_once: Concurrent sandboxes, each with five commands.
        image: Container image.
        url: Address of a server or daemon.
        env: Environment variables of commands.
        options: Options of the back end.
    """
    spec = SandboxSpec(type=backend, image=image, url=url, env=env or {}, options=options or {})
    return {
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "limits_ms": {"local": _measure_limits, "docker": _measure_daemon}.get(backend, _none)(spec, execs // 4),
        **asyncio.run(_measure(spec, starts, execs)),
        **(asyncio.run(_measure_warm_starts(spec, starts)) if backend == "docker" else {}),
        "together": asyncio.run(_measure_concurrent(spec, at_once)),
    }


def _none(_spec: SandboxSpec, _count: int) -> dict[str, Any]:
    return {}


def _measure_daemon(spec: SandboxSpec, count: int) -> dict[str, Any]:
    """Measure the start and removal of an equal, empty container with Docker's library."""
    api = EXTRA.load().APIClient(base_url=spec.url, version="1.40")
    starting, removing = [], []
    image = Image.read(api.inspect_image(spec.image or DEFAULT_IMAGE), None)
    config = {**plan(spec, read_options(spec), image, Traits()).config, "StdinOnce": False}
    for _ in range(count):
        began = time.perf_counter()
        identity = api.create_container_from_config(config)["Id"]
        api.start(identity)
        starting.append(time.perf_counter() - began)
        began = time.perf_counter()
        api.remove_container(identity, force=True, v=True)
        removing.append(time.perf_counter() - began)
    api.close()
    return {"create_and_start": _figures(starting), "remove": _figures(removing)}


async def _measure_warm_starts(spec: SandboxSpec, count: int) -> dict[str, Any]:
    """Measure starts from a warm container."""
    warm = dataclasses.replace(spec, options={**spec.options, "warm": 1})
    times = []
    async with open_sandbox(warm):
        for _ in range(count):
            await SUPPLY.settle()
            sandbox = open_sandbox(warm)
            times.append(await _time(sandbox.start))
            await sandbox.close()
    await SUPPLY.settle()
    await asyncio.to_thread(SUPPLY.drain)
    return {"warm_start_ms": _figures(times)}


def _measure_limits(_spec: SandboxSpec, count: int) -> dict[str, Any]:
    """Measure the lower bounds of any sandbox."""
    bubblewrap = [find_bubblewrap(), *arguments(0, NO_NETWORK, disk_bytes=DEFAULT_LIMITS.disk_bytes or 0)]
    python = [*SUPERVISOR[:-1], "pass"]
    programs = {
        "fork_and_exec": ["/bin/true"],
        "python": python,
        "bubblewrap": [*bubblewrap, "/bin/true"],
        "bubblewrap_with_python": [*bubblewrap, *python],
    }
    return {name: _figures([_time_program(words) for _ in range(count)]) for name, words in programs.items()}


def _time_program(words: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(words, check=True)
    return time.perf_counter() - began


async def _measure(spec: SandboxSpec, starts: int, execs: int) -> dict[str, Any]:
    starting, closing = [], []
    for _ in range(starts):
        sandbox = open_sandbox(spec)
        starting.append(await _time(sandbox.start))
        closing.append(await _time(sandbox.close))
    async with open_sandbox(spec) as sandbox:
        commands = [await _time(lambda: sandbox.exec(["/bin/true"])) for _ in range(execs)]
        python = [await _time(lambda: sandbox.exec(["python3", "-c", "pass"])) for _ in range(execs // 4)]
        files = [await _time(lambda: _write_and_read(sandbox)) for _ in range(execs // 4)]
        turns = await _round_trips(sandbox, execs)
        requests = {} if _lacks_ports(spec) else await _requests(sandbox, execs)
    return {
        "start_ms": _figures(starting),
        "close_ms": _figures(closing),
        "exec_ms": _figures(commands),
        "exec_python_ms": _figures(python),
        "write_and_read_ms": _figures(files),
        "python_round_trip_ms": _figures(turns),
        **requests,
    }


def _lacks_ports(spec: SandboxSpec) -> bool:
    """Return True if sandboxes of this type cannot forward ports."""
    return spec.type not in ("local", "docker")


async def _requests(sandbox: Sandbox, count: int) -> dict[str, Any]:
    """Measure requests to a server of this process: through a forwarded port, and from outside the sandbox."""
    async with await asyncio.start_server(_hello, "127.0.0.1", 0) as server:
        outside = str(server.sockets[0].getsockname()[1])
        inside = await sandbox.forward(lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), _hello))
        forwarded = (await sandbox.exec(["python3", "-c", REQUESTS, str(count), str(inside)])).stdout
        words = [sys.executable, "-c", REQUESTS, str(count), outside]
        program = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
        direct, _ = await program.communicate()
    return {
        "forwarded_request_ms": _figures([*map(float, forwarded.split())]),
        "direct_request_ms": _figures([*map(float, direct.split())]),
    }


async def _hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
    writer.close()


async def _round_trips(sandbox: Sandbox, count: int) -> list[float]:
    """Measure round trips to a running interpreter, line by line."""
    program = await sandbox.spawn(["python3", "-c", ECHO])

    async def turn() -> None:
        await program.write(b"6 * 7\n")
        assert await program.read_line() == b"42\n"

    await turn()
    return [await _time(turn) for _ in range(count)]


async def _write_and_read(sandbox: Sandbox) -> None:
    await sandbox.write("file", b"x" * 1000)
    assert len(await sandbox.read("file")) == 1000


async def _measure_concurrent(spec: SandboxSpec, count: int) -> dict[str, Any]:
    """Measure many concurrent sandboxes."""
    all_open = asyncio.Barrier(count)

    async def one() -> list[float]:
        async with open_sandbox(spec) as sandbox:
            await all_open.wait()
            times = [await _time(lambda: sandbox.exec(["/bin/true"])) for _ in range(COMMANDS_EACH)]
            await all_open.wait()
            return times

    began = time.perf_counter()
    results = await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)
    seconds = time.perf_counter() - began
    failed = [result for result in results if isinstance(result, BaseException)]
    times = [value for result in results if not isinstance(result, BaseException) for value in result]
    return {
        "sandboxes": count,
        "failures": len(failed),
        "seconds": seconds,
        "exec_ms": _figures(times) if times else repr(failed[0]),
    }


async def _time(do: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await do()
    return time.perf_counter() - began


def _figures(seconds: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile, in milliseconds."""
    ordered = sorted(seconds)
    last = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return {"median": 1000 * statistics.median(ordered), "p99": 1000 * last, "least": 1000 * ordered[0]}
