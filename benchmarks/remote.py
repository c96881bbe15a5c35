"""Steps per second of an environment behind `agentrl env serve`: one episode at a time, and many concurrently.

agentrl bench remote
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any

from agentrl.env import AsyncEnv
from agentrl.env.lookup import resolve_environment
from agentrl.task import Task

STEPS = 2000
AT_ONCE = (1, 16, 256)
PROGRAM = "from agentrl.cli import main; main()"


def run() -> dict[str, Any]:
    """Measure steps of household (tiny) over HTTP on 127.0.0.1, with server and client in separate processes."""
    words = [sys.executable, "-c", PROGRAM, "env", "serve", "household", "size=tiny"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert server.stdout is not None
    try:
        url = server.stdout.readline().strip()
        return {f"{count}_at_once": asyncio.run(_measure(url, count)) for count in AT_ONCE}
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


async def _measure(url: str, count: int) -> dict[str, float]:
    spec = resolve_environment(url)
    tasks = spec.tasks("train")
    envs = [spec.make() for _ in range(count)]
    await asyncio.gather(*(_play(env, tasks[0], 2) for env in envs))
    steps = max(10, STEPS // count)
    began, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(_play(env, tasks[number % 100], steps) for number, env in enumerate(envs)))
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    await asyncio.gather(*(env.close() for env in envs))
    return {"steps_per_s": steps * count / seconds, "client_cpu_ms_per_step": 1000 * cpu / (steps * count)}


async def _play(env: Any, task: Task, steps: int) -> None:
    assert isinstance(env, AsyncEnv)
    for number in range(steps):
        if number % 40 == 0:
            await env.reset(seed=task.seed, options=dict(task.options))
        else:
            await env.step("look" if number % 2 else "inventory")
