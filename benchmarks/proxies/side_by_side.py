"""Comparison of the gateway with another proxy in front of the same server, with the same clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError
from agentrl.sandbox.program_guard import children_of

FOLDER = Path(__file__).parent
PROXIES = {"agentrl": "agentrl_proxy.py", "agentlightning": "agentlightning_proxy.py"}
STREAM_SESSIONS, TOKEN_S = 16, 0.03
"""Number of concurrent streams, and seconds between their tokens."""
LONGEST_LINE = 1 << 26
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}
"""Variables that keep litellm from contacting other machines and checking keys, which would cost time."""


def find_python(name: str) -> str:
    """Return the Python interpreter of a proxy; other proxies have their own environment."""
    if name == "agentrl":
        return sys.executable
    folder = os.environ.get("AGENTRL_PROXIES", "")
    if not (Path(folder) / ".installed").is_file():
        raise UsageError(
            "agent-lightning is not installed",
            got=f"AGENTRL_PROXIES={folder}",
            expected="its environment",
            hint="run make proxies",
        )
    return f"{folder}/bin/python"


async def compare(ids: list[int], text: str, *, sessions: int, turns: int, clients: Path) -> dict[str, Any]:
    """Measure each proxy: CPU time of its processes, requests per second, and the time of the first text.

    Args:
        ids: The answer as token ids.
        text: The answer as text.
        sessions: Concurrent sessions.
        turns: Requests of each session.
        clients: Program of the clients.
    """
    figures: dict[str, Any] = {}
    for name, program in PROXIES.items():
        measured = {}
        for streams, many, delay_s in ((False, sessions, 0.0), (True, STREAM_SESSIONS, TOKEN_S)):
            settings = json.dumps({"ids": ids, "text": text, "delay_s": delay_s})
            async with start_program([sys.executable, str(FOLDER / "upstream.py"), settings]) as (upstream, _):
                words = [find_python(name), str(FOLDER / program), upstream, str(many)]
                async with start_program(words) as (ready, process):
                    addresses = json.loads(ready.removeprefix("READY "))
                    measured[streams] = await _measure(process, clients, addresses, turns=turns, streams=streams)
        whole, streamed = measured[False], measured[True]
        figures[name] = {
            "cpu_ms_per_request": whole["cpu_ms"],
            "requests_per_s": whole["requests_per_s"],
            "failed": whole["failed"] + streamed["failed"],
            "first_text_ms_median": streamed["first_ms"],
        }
    return figures


@asynccontextmanager
async def start_program(words: list[str]) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Run a program that prints one line once it is ready: an address, or ``READY`` and what it serves."""
    pipe = asyncio.subprocess.PIPE
    path = (
        {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        if words[0] == sys.executable
        else OFFLINE | dict(os.environ)
    )
    process = await asyncio.create_subprocess_exec(*words, stdout=pipe, limit=LONGEST_LINE, env=path)
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


async def _measure(
    proxy: asyncio.subprocess.Process, clients: Path, addresses: list[list[str]], *, turns: int, streams: bool
) -> dict[str, float]:
    words = [sys.executable, str(clients), "chat", str(turns), str(int(streams))]
    pipe = asyncio.subprocess.PIPE
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    playing = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, limit=LONGEST_LINE, env=path)
    before = _cpu_s(proxy.pid)
    said, _ = await playing.communicate("\n".join([*map(" ".join, addresses), "", ""]).encode())
    await asyncio.sleep(1)  # spans are written after their answers
    spent, result = _cpu_s(proxy.pid) - before, json.loads(said)
    requests = len(addresses) * turns
    firsts = result.get("waited_s") or [0.0]
    return {
        "cpu_ms": 1000 * spent / requests,
        "requests_per_s": requests / result["seconds"],
        "failed": result["failed"],
        "first_ms": 1000 * statistics.median(firsts),
    }


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its children."""
    ticks = 0
    for one in (pid, *children_of(pid)):
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")
