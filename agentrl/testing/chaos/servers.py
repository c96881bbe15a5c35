"""Servers of environments and engines that a run attaches to, which the campaign kills, stops and restarts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from agentrl.errors import TrainingError
from agentrl.sandbox.orphan_guard import marked_processes
from agentrl.sandbox.supervisor import send_signal
from agentrl.serving.launch.guard import descendants
from agentrl.serving.launch.resources import reserve_port
from agentrl.testing.chaos.processes import MARK, kill_left, send, wait_until

AGENTRL = (sys.executable, "-c", "from agentrl.cli import main; main()")
"""The program `agentrl` of this interpreter, whatever ``PATH`` says."""
HEALTH = "/health"
"""Route of all servers that answers when they are ready."""
ANSWER_S = 10.0
END_S = 30.0
ENVIRONMENT_START_S = 180.0
ENGINE_START_S = 600.0
LOST_S = 3.0
"""Seconds between the loss of a server and its restart."""
STOPPED_S = 10.0
"""Seconds for which a server stays stopped before it is killed and restarted."""


class FaultyServer:
    """A server command, its address, and its processes.

    Args:
        words: Words of the command after ``agentrl``, without the port.
        folder: Folder of its outputs.
        start_s: Seconds for its start.
        unpause: Route that resumes a paused engine; empty for environments.
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
        """Resume an engine that a killed run has paused, as the error of the next run asks its user to do."""
        if self._unpause:
            asking = urllib.request.Request(
                self.url + self._unpause, data=b"{}", headers={"Content-Type": "application/json"}, method="POST"
            )
            with suppress(OSError), urllib.request.urlopen(asking, timeout=ANSWER_S):
                pass

    def hit(self, way: str) -> str:
        """Send signals to one of the server's processes; restart the server unless it goes on."""
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
        """Tell the server to end, and kill what is left of it: some programs overwrite their environment variables."""
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
