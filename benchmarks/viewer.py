"""Viewer on a large store: latency of its routes, and memory of its server.

agentrl bench viewer
agentrl bench viewer episodes=10000 rounds=3
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from store import EPISODES_PER_STEP, play, write_store

from agentrl.observe.metrics import MetricsFile
from agentrl.observe.trajectory_store import TrajectoryStore

LONG_TURNS, LONG_TOKENS = 20, 190
"""Turns of a long episode, and sampled tokens per turn; with as many observed tokens, 8,000 in total."""
NAME = "large"
METRICS = 120
"""Number of metrics per step."""


def run(
    episodes: int = 100_000,
    turns: int = 4,
    tokens: int = 40,
    long: int = 24,
    rounds: int = 10,
    folder: str | None = None,
) -> dict[str, Any]:
    """Return milliseconds of each route, seconds to build the index, and memory of the server.

    On a busy machine, the CPU milliseconds, which include the watcher thread's, are more reliable than the others.

    Args:
        episodes: Number of stored episodes.
        turns: Turns of each.
        tokens: Sampled tokens per turn; observations have as many.
        long: Number of further episodes, of 8,000 tokens.
        rounds: Number of requests for each route.
        folder: Folder of the store, which is kept and reused; a temporary folder by default.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as temporary:
        place = Path(folder or temporary)
        if not (place / NAME).exists():
            _write_run(place / NAME, episodes, turns, tokens, long)
        (place / NAME / "trajectories" / ".index.sqlite").unlink(missing_ok=True)
        command = [sys.executable, "-c", "from agentrl.cli import main; main()", "view", str(place), "--no-browser"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().strip()
                return asyncio.run(_measure(url.partition("/r/")[0], server.pid, episodes + long, rounds))
            finally:
                server.send_signal(signal.SIGINT)


def _write_run(folder: Path, episodes: int, turns: int, tokens: int, long: int) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("environment: {name: household, split: train}\ntrainer: {steps: 1000}\n")
    write_store(folder / "trajectories", episodes, turns, tokens)
    last = 2 + episodes // EPISODES_PER_STEP
    chance = random.Random(1)
    with TrajectoryStore(folder / "trajectories", step=last) as store:
        for number in range(episodes + 7, episodes + 7 + long):
            play(store, number, LONG_TURNS, LONG_TOKENS, chance)
    metrics = MetricsFile(folder / "metrics.jsonl")
    for step in range(1, last + 1):
        values = {"success/mean": chance.random(), "reward/mean": chance.random(), "reward/std": 0.3, "episodes": 500}
        metrics.append_step(
            step, {**values, **{f"train/metric_{number}": chance.random() for number in range(METRICS)}}
        )
    metrics.close()


async def _measure(url: str, process: int, episodes: int, rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"episodes": episodes, "memory_mb_at_start": _memory(process)}
    async with aiohttp.ClientSession(url) as http:

        async def get(path: str) -> Any:
            async with http.get(path) as answer:
                data = await answer.read()
                assert answer.status == 200, data[:1000]
                return orjson.loads(data)

        began = time.monotonic()
        await get(f"/api/r/{NAME}")
        slowest = 0.0
        while not (found := await get(f"/api/r/{NAME}/episodes?limit=100"))["index"]["complete"]:
            asked = time.monotonic()
            await get(f"/api/r/{NAME}/episodes?limit=100&order=reward")
            slowest = max(slowest, time.monotonic() - asked)
            await asyncio.sleep(0.2)
        figures["build_index_s"] = time.monotonic() - began
        figures["slowest_page_meanwhile_ms"] = 1000 * slowest
        figures["memory_mb_after_build"] = _memory(process)
        assert found["total"] == episodes, found["total"]
        cpu_ms: dict[str, float] = {}
        median_ms: dict[str, float] = {}
        for name, path in (await _paths(get)).items():
            times = []
            used = _cpu_seconds(process)
            for _ in range(rounds):
                asked = time.monotonic()
                await get(path)
                times.append(1000 * (time.monotonic() - asked))
            cpu_ms[name] = 1000 * (_cpu_seconds(process) - used) / rounds
            median_ms[name] = statistics.median(times)
        figures |= {"median_ms": median_ms, "cpu_ms": cpu_ms, "memory_mb": _memory(process)}
    return figures


async def _paths(get: Any) -> dict[str, str]:
    """Return the routes to measure by name; the last episodes are the long ones."""
    page = await get(f"/api/r/{NAME}/episodes?limit=20&order=tokens&descending=true")
    row = page["rows"][0]
    base, episode = f"/api/r/{NAME}", f"/api/r/{NAME}/episode/{quote(row['id'], safe='')}"
    later = await get(f"{base}/episodes?limit=1000")
    return {
        "sources": "/api/sources",
        "run": base,
        "metrics": f"{base}/metrics",
        "outcomes": f"{base}/outcomes",
        "episodes_newest": f"{base}/episodes?descending=true",
        "episodes_next_page": f"{base}/episodes?cursor={later['cursor']}",
        "episodes_by_reward": f"{base}/episodes?order=reward&descending=true",
        "episodes_of_a_step": f"{base}/episodes?step_from=40&step_to=40",
        "episodes_filtered": f"{base}/episodes?success=false&invalid=true&turns_from=3&reward_from=0.1&order=tokens",
        "text_frequent": f"{base}/episodes?text=go to shelf",
        "text_rare": f"{base}/episodes?text=bottle number 99123 ",
        "text_missing": f"{base}/episodes?text=no such words here&order=reward",
        "episode_8000": episode,
        "tokens_8000": f"{episode}/tokens?to=8000",
        "raw_8000": f"{episode}/raw",
        "prompt_8000": f"{episode}/prompt?turn=19",
        "group_of_8": f"{base}/group/{quote(row['group_id'], safe='')}",
        "compare": f"/api/compare?a={NAME}&b={NAME}",
        "compare_two_episodes": f"/api/compare/episodes?a={NAME}&b={NAME}&task=train-40",
        "notes": f"{base}/notes",
        "in_flight": f"{base}/in-flight",
    }


def _cpu_seconds(process: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(process: int) -> float:
    """Return the peak memory of a process in MB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
