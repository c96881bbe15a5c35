"""One fork of this process with limits on its time, whatever it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable


def in_fork(work: Callable[[], str], expected_s: float) -> dict[str, str]:
    """Run a function in a fork: `noticed` with the test's name, `ended` if it dies or runs too long, or `survived`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(reading)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        if expected_s < 1e6:
            seconds = int(30 + 5 * expected_s)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        try:
            by = work()
            os.write(writing, json.dumps({"status": "noticed" if by else "survived", "by": by}).encode())
        finally:
            os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + 30 + 5 * expected_s
    ended, limit = False, False
    while not ended:
        ended = os.waitpid(child, os.WNOHANG)[0] != 0
        if not ended and time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            ended = limit = True
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.set_blocking(reading, False)  # a process that the tests left behind may hold the other end
    with os.fdopen(reading, "rb") as pipe:
        output = pipe.read()
    return json.loads(output) if output else {"status": "ended", "by": "the time limit" if limit else "the process"}
