"""A small program that behaves like an inference server, also like those that misbehave, and a look at processes."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentrl.serving.launch import LaunchCommand

LIMIT_S = 90

PROGRAM = """
import http.server, mmap, os, signal, sys, time
from pathlib import Path

folder, port, flags = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]

def live():
    (folder / str(os.getpid())).touch()
    while True:
        signal.pause()

def fork(*, leave=False):
    if os.fork():
        return
    if leave:
        os.setsid()
        if os.fork():
            os._exit(0)
    live()

print("loading", flush=True)
if "ignores_term" in flags:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "exits" in flags:
    sys.exit("there is no such model")
if "dies" in flags:
    os.kill(os.getpid(), signal.SIGKILL)
if "hangs" in flags:
    print("bar 1\\rbar 2\\r\\x1b[32mbar 3\\x1b[0m", flush=True)
    live()

mapped = []
for flag in flags:
    if flag.startswith("maps="):
        with open("/dev/shm/" + flag[5:], "a+b") as file:
            file.truncate(4096)
            mapped.append(mmap.mmap(file.fileno(), 4096))

fork()
fork(leave=True)
(folder / str(os.getpid())).touch()
until = time.monotonic() + 240
while len(list(folder.iterdir())) < 3:
    assert time.monotonic() < until, "the forks do not start"
    time.sleep(0.01)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(repr({k: os.environ.get(k) for k in ("CUDA_VISIBLE_DEVICES", "COLOUR")}).encode())

    def log_message(self, *words):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@dataclass
class FakeServers:
    """Makes commands of fake servers, and knows the processes that they started."""

    folder: Path
    program: Path
    flags: dict[int, Sequence[str]] = field(default_factory=dict)
    """How the nth command's server misbehaves."""
    ports: list[int] = field(default_factory=list)

    def command(self, port: int, gpus: Sequence[int] = ()) -> LaunchCommand:
        number = len(self.ports)
        self.ports.append(port)
        self.pids_folder(number).mkdir(parents=True)
        words = [str(self.program), str(self.pids_folder(number)), str(port), *self.flags.get(number, ())]
        return LaunchCommand(argv=[sys.executable, *words], env={"COLOUR": "blue"})

    def pids_folder(self, number: int) -> Path:
        return self.folder / "pids" / str(number)

    def pids(self, number: int | None = None) -> set[int]:
        """The processes of the nth server: itself, a child, and one that left its session; or of all."""
        pattern = "*" if number is None else str(number)
        return {int(path.name) for path in (self.folder / "pids").glob(f"{pattern}/*")}


@pytest.fixture
def fakes(tmp_path: Path) -> FakeServers:
    program = tmp_path / "server.py"
    program.write_text(PROGRAM)
    return FakeServers(tmp_path / "fakes", program)


def alive(pids: set[int]) -> set[int]:
    """Those that run; dead ones that nobody has reaped do not."""
    return {pid for pid in pids if state(pid)[:1] not in ("", "Z", "X")}


def state(pid: int) -> str:
    """State and parent of a process, from the system; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.fixture
def alive_of() -> Callable[[set[int]], set[int]]:
    return alive


@pytest.fixture
def parent_of() -> Callable[[int], int]:
    return lambda pid: int(state(pid).split()[1])


@pytest.fixture
def all_gone() -> Callable[[set[int]], bool]:
    """Wait until all these processes are gone; ``False`` when some never go, which are killed then."""

    def wait(pids: set[int]) -> bool:
        deadline = time.monotonic() + LIMIT_S
        while alive(pids):
            if time.monotonic() > deadline:
                for pid in alive(pids):
                    os.kill(pid, 9)
                return False
            time.sleep(0.02)
        return True

    return wait


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], object]:
    """Wait in the loop until something holds."""

    async def wait(holds: Callable[[], bool]) -> None:
        for _ in range(50 * LIMIT_S):
            if holds():
                return
            await asyncio.sleep(0.02)
        assert holds()

    return wait
