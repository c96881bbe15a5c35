"""Compares formulas in a process of its own, which ends where a comparison takes too long."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from agentrl.errors import EnvironmentFailure

COMMAND = (sys.executable, "-m", f"{__package__}.verify_main")


class Verifier:
    """A process that is asked whether two formulas are the same. May be shared by threads.

    Args:
        command: Starts the process. It says "ready", then answers each line, a JSON list of two texts, by "true" or
            "false"; what takes too long ends it by the signal SIGPROF.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._alone = threading.Lock()

    def is_same(self, right: str, said: str) -> bool:
        """Return True if two formulas are the same; no where that takes too long to find out.

        Raises:
            EnvironmentFailure: the process does not start, or died of something else.
        """
        with self._alone:
            process = self._process = self._process or self._start()
            answer = _asked(process, json.dumps([right, said]))
            if answer:
                return answer == "true"
            self._process = None
            code = _ended(process)
            if code != -signal.SIGPROF:
                raise EnvironmentFailure("the judge math_verify died", got=f"exit code {code}")
            return False

    def close(self) -> None:
        """End the process; another question would start another."""
        with self._alone:
            process, self._process = self._process, None
            if process is not None:
                process.kill()
                _ended(process)

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            process.kill()
            raise EnvironmentFailure("the judge math_verify does not start", got=f"exit code {_ended(process)}")
        return process


def _asked(process: subprocess.Popen[str], question: str) -> str:
    """What it answers; empty when it ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{question}\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline().strip()


def _ended(process: subprocess.Popen[str]) -> int:
    """Its exit code, once its pipes are closed."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):  # it ended with a question half read
        process.stdin.close()
    return process.wait()
