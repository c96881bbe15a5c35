"""One side of a comparison: a process that plays episodes on request, and measures itself.

It reads one request per line, ``{"episodes": 64, "at_once": 64}``, and prints one line of figures for each. This file
runs in the peers' environments, too, and imports only the standard library.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

from work import FIGURES, READY, TALLY

Play: TypeAlias = Callable[[int, int], Awaitable[int]]
"""Plays a number of episodes, at most a number at once; returns how many ended with the last answer."""


def serve(make: Callable[[str, str], Awaitable[Play]]) -> None:
    """Answer requests until standard input ends.

    Args:
        make: Prepares everything before the first episode: receives the address of the server and the folder of the
            model.
    """
    with asyncio.Runner() as loop:
        play = loop.run(make(sys.argv[1], sys.argv[2]))
        print(READY, flush=True)
        for line in sys.stdin:
            print(FIGURES + json.dumps(_measure(loop, play, **json.loads(line))), flush=True)


def _measure(loop: asyncio.Runner, play: Play, episodes: int, at_once: int) -> dict[str, Any]:
    TALLY.clear()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak
    wall, cpu = time.perf_counter(), time.process_time()
    ended = loop.run(_awaited(play(episodes, at_once)))
    return {
        "seconds": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "grown_bytes": _resident("VmHWM") - before,
        "resident_bytes": before,
        "ended": ended,
        "calls": TALLY.calls,
        "checksum": TALLY.checksum,
    }


async def _awaited(played: Awaitable[int]) -> int:
    return await played


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
