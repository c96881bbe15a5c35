"""Comparison of formulas in a separate process, which ends if a comparison takes too long."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from agentrl.errors import EnvironmentFailure

COMMAND = (sys.executable, "-P", "-m", f"{__package__}.verify_main")


class Verifier:
    """Process that compares two formulas; threads may share it.

    Args:
        command: Command of the process. It prints "ready", then answers each line, a JSON list of two texts, with
            "true" or "false"; a comparison that takes too long ends it with the signal SIGPROF.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._alone = threading.Lock()

    def is_same(self, right: str, answer: str) -> bool:
        """Return True if two formulas are the same; False if the comparison takes too long.

        Raises:
            EnvironmentFailure: the process does not start, or died for another reason.
        """
        with self._alone:
            process = self._process = self._process or self._start()
            reply = _ask(process, json.dumps([right, answer]))
            if reply:
                return reply == "true"
            self._process = None
            code = _wait(process)
            if code != -signal.SIGPROF:
                raise EnvironmentFailure("the judge math_verify died", got=f"exit code {code}")
            return False

    def close(self) -> None:
        """End the process; the next comparison would start a new one."""
        with self._alone:
            process, self._process = self._process, None
            if process is not None:
                process.kill()
                _wait(process)

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            process.kill()
            raise EnvironmentFailure("the judge math_verify does not start", got=f"exit code {_wait(process)}")
        return process


def _ask(process: subprocess.Popen[str], question: str) -> str:
    """Return the process's answer; empty if it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{question}\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline().strip()


def _wait(process: subprocess.Popen[str]) -> int:
    """Close the process's pipes and return its exit code."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):  # it ended while a question was written
        process.stdin.close()
    return process.wait()
