"""Comparison of the gateway with other proxies in front of the same server, with the same clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from peers.installed import conditions, find_python

from agentrl.errors import AgentRLError, UsageError
from agentrl.sandbox.program_guard import children_of

FOLDER = Path(__file__).parent
PROXIES = {
    "agentrl": "agentrl_proxy.py",
    "agentlightning": "agentlightning_proxy.py",
    "litellm": "litellm_proxy.py",
    "rllm": "rllm_proxy.py",
}
STREAM_SESSIONS, TOKEN_S = 16, 0.03
"""Number of concurrent streams, and seconds between their tokens."""
WARM_SESSIONS = 4
"""Number of sessions before the first measurement."""
MAX_LINE_BYTES = 1 << 26
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}
"""Variables that keep litellm from contacting other machines and checking keys, which would cost time."""


def chosen_proxies(versus: str) -> list[str]:
    """Return the proxies of a comparison with one peer, with several (comma-separated), or with all.

    Raises:
        UsageError: a peer is not known.
    """
    known = [name for name in PROXIES if name != "agentrl"]
    asked = known if versus == "all" else versus.split(",")
    if unknown := [name for name in asked if name not in known]:
        raise UsageError("unknown peer", got=f"versus={unknown[0]}", expected=f"all, or some of {', '.join(known)}")
    return ["agentrl", *asked]


async def compare(
    ids: list[int], text: str, *, versus: str, sessions: int, turns: int, rounds: int, clients: Path
) -> dict[str, Any]:
    """Measure the proxies by turns: CPU time of their processes, requests per second, and the time of the first text.

    Args:
        ids: The answer as token ids.
        text: The answer as text.
        versus: Peers; see `chosen_proxies`.
        sessions: Concurrent sessions.
        turns: Requests of each session.
        rounds: Measurements of each proxy; medians are returned.
        clients: Program of the clients.

    Raises:
        UsageError: a peer is not known or not installed.
        AgentRLError: the server has not answered every request of a proxy once.
    """
    names = chosen_proxies(versus)
    pythons = {name: find_python(name) for name in names}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    found = conditions(names[1:], rounds)
    async with AsyncExitStack() as stack:
        settings = json.dumps({"ids": ids, "text": text, "delay_s": TOKEN_S})
        upstream, _ = await stack.enter_async_context(
            start_program([sys.executable, str(FOLDER / "upstream.py"), settings])
        )
        running = {}
        for name in names:
            many = WARM_SESSIONS + rounds * (sessions + STREAM_SESSIONS)
            words = [pythons[name], str(FOLDER / PROXIES[name]), upstream, str(many)]
            ready, process = await stack.enter_async_context(start_program(words))
            bench = _Proxy(name, process, clients, upstream, iter(json.loads(ready.removeprefix("READY "))), turns)
            await bench.measure(WARM_SESSIONS, streams=False)
            running[name] = bench
        for number in range(rounds):
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                whole = await running[name].measure(sessions, streams=False)
                streamed = await running[name].measure(STREAM_SESSIONS, streams=True)
                measured[name].append({**whole, "first_text_ms_median": streamed["first_text_ms_median"]})
    return {name: _medians(rows) for name, rows in measured.items()} | {"conditions": found}


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    cpu = [row["cpu_ms_per_request"] for row in rows]
    keys = ("cpu_ms_per_request", "requests_per_s", "first_text_ms_median")
    medians = {key: statistics.median(row[key] for row in rows) for key in keys}
    return {**medians, "cpu_ms_lowest": min(cpu), "cpu_ms_highest": max(cpu)}


@asynccontextmanager
async def start_program(words: list[str]) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Run a program that prints one line once it is ready: an address, or ``READY`` and what it serves."""
    pipe = asyncio.subprocess.PIPE
    path = (
        {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        if words[0] == sys.executable
        else OFFLINE | dict(os.environ)
    )
    process = await asyncio.create_subprocess_exec(*words, stdout=pipe, limit=MAX_LINE_BYTES, env=path)
    assert process.stdout is not None
    try:
        while raw := await process.stdout.readline():
            if raw.startswith((b"http", b"READY")):
                break
        if not raw:
            raise RuntimeError(f"{words[1]} ended before it was ready")
        yield raw.decode().strip(), process
    finally:
        if process.returncode is None:
            for pid in (*children_of(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await process.wait()


class _Proxy:
    """Running proxy, with unused addresses of sessions."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        clients: Path,
        upstream: str,
        addresses: Iterator[list[str]],
        turns: int,
    ) -> None:
        self._name, self._process, self._clients, self._upstream = name, process, clients, upstream
        self._addresses, self._turns = addresses, turns

    async def measure(self, sessions: int, *, streams: bool) -> dict[str, float]:
        """Let the clients play some sessions, and measure."""
        words = [sys.executable, str(self._clients), "chat", str(self._turns), str(int(streams))]
        pipe = asyncio.subprocess.PIPE
        path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        playing = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, limit=MAX_LINE_BYTES, env=path)
        before, answers = _cpu_s(self._process.pid), await self._answers()
        lines = [" ".join(next(self._addresses)) for _ in range(sessions)]
        said, _ = await playing.communicate("\n".join([*lines, "", ""]).encode())
        await asyncio.sleep(1)  # spans are written after their answers
        spent, result = _cpu_s(self._process.pid) - before, json.loads(said)
        requests = sessions * self._turns
        passed = await self._answers() - answers
        if result["failed"] or passed != requests:
            got = f"{result['failed']} failed, {passed} answered by the server: {result['example']}"
            raise AgentRLError(f"{self._name} has not passed every request on once", got=got, expected=requests)
        return {
            "cpu_ms_per_request": 1000 * spent / requests,
            "requests_per_s": requests / result["seconds"],
            "first_text_ms_median": 1000 * statistics.median(result["waited_s"] or [0.0]),
        }

    async def _answers(self) -> int:
        async with aiohttp.ClientSession() as http, http.get(f"{self._upstream}/answers") as answer:
            return int(await answer.text())


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its children."""
    ticks = 0
    for one in (pid, *children_of(pid)):
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")
