"""One server process: ready, log, exit code, and that nothing of it is left."""

import asyncio
import mmap
import os
import signal
import sys
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest

from agentrl.errors import EngineError, UsageError
from agentrl.serving.launch import LaunchCommand, ServerExited, ServerProcess
from agentrl.serving.launch.resources import reserve_port


@pytest.fixture
def start(fakes, tmp_path):
    """Start a fake server that misbehaves as the words say."""

    def begin(*flags: str, grace_s: float = 20.0) -> ServerProcess:
        number = len(fakes.ports)
        fakes.flags[number] = flags
        reservation = reserve_port()
        reservation.release()
        command = fakes.command(reservation.port)
        log = tmp_path / "logs" / f"server-{number}.log"
        return ServerProcess(command, name=f"server-{number}", port=fakes.ports[-1], log=log, grace_s=grace_s)

    return begin


async def test_a_server_becomes_ready_and_leaves_nothing_behind(start, fakes, alive_of):
    told = []
    async with start() as server:
        await server.wait_ready(deadline_s=60, on_progress=told.append)
        assert server.code is None
        assert len(fakes.pids()) == 3
        assert alive_of(fakes.pids()) == fakes.pids()
        assert server.pid in fakes.pids()
        async with aiohttp.ClientSession() as session, session.get(f"{server.url}/health") as answer:
            assert "'COLOUR': 'blue'" in await answer.text()
    assert alive_of(fakes.pids()) == set()
    assert server.code == 128 + signal.SIGTERM
    assert server.log.read_text() == "loading\n"
    assert told
    assert {(progress.name, progress.line) for progress in told} <= {("server-0", ""), ("server-0", "loading")}


async def test_closing_twice_is_closing_once(start, fakes, alive_of):
    server = start()
    await server.wait_ready(deadline_s=60)
    await asyncio.gather(server.close(), server.close())
    await server.close(at_once=True)
    assert alive_of(fakes.pids()) == set()


async def test_a_server_that_exits_at_once_is_told_with_its_last_words(start):
    server = start("exits")
    with pytest.raises(ServerExited, match=r"(?s)server-0 did not start: got exit code 1.*there is no such model"):
        await server.wait_ready(deadline_s=60)
    assert server.code == 1
    await server.close()


async def test_a_server_that_is_killed_tells_the_signal(start):
    server = start("dies")
    with pytest.raises(ServerExited, match="exit code 137"):
        await server.wait_ready(deadline_s=60)
    assert await server.wait() == 137


async def test_a_server_that_never_becomes_ready_misses_its_deadline(start, fakes, until):
    async with start("hangs") as server:
        await until(lambda: server.last_lines(1) == ["bar 3"])
        with pytest.raises(EngineError, match=r"(?s)no answer from http.*expected one within 0.3 s.*bar 3"):
            await server.wait_ready(deadline_s=0.3)
        assert server.code is None


async def test_a_server_that_ignores_sigterm_is_killed(start, fakes, alive_of):
    server = start("ignores_term", grace_s=0.2)
    await server.wait_ready(deadline_s=60)
    await server.close()
    assert server.code == 128 + signal.SIGKILL
    assert alive_of(fakes.pids()) == set()


async def test_a_server_that_is_stopped_can_still_be_ended(start, fakes, alive_of):
    server = start()
    await server.wait_ready(deadline_s=60)
    for pid in fakes.pids():
        os.kill(pid, signal.SIGSTOP)
    await server.close()
    assert server.code == 128 + signal.SIGTERM
    assert alive_of(fakes.pids()) == set()


async def test_killing_at_once_asks_nobody(start, fakes, alive_of):
    server = start()
    await server.wait_ready(deadline_s=60)
    await server.close(at_once=True)
    assert server.code == 128 + signal.SIGKILL
    assert alive_of(fakes.pids()) == set()


async def test_when_the_first_process_dies_the_others_follow(start, fakes, alive_of):
    server = start()
    await server.wait_ready(deadline_s=60)
    os.kill(server.pid, signal.SIGKILL)
    assert await server.wait() == 137
    assert alive_of(fakes.pids()) == set()


async def test_when_the_guard_is_killed_the_servers_session_follows(start, fakes, alive_of, parent_of, until):
    server = start()
    await server.wait_ready(deadline_s=60)
    session = {pid for pid in fakes.pids() if os.getsid(pid) == server.pid}
    (escaped,) = fakes.pids() - session
    assert len(session) == 2
    os.kill(parent_of(server.pid), signal.SIGKILL)
    assert await server.wait() == 137
    await until(lambda: not alive_of(session))
    os.kill(escaped, signal.SIGKILL)  # without the guard, nobody can find the one that left


@pytest.fixture
def segments():
    """Three names in the memory file system, of which nothing is left in the end."""
    folder = Path("/dev/shm")
    names = [f"agentrl-test-{uuid4().hex}" for _ in range(3)]
    yield [folder / name for name in names]
    for name in names:
        (folder / name).unlink(missing_ok=True)


@pytest.mark.parametrize("dies", [True, False])
async def test_shared_memory_that_killed_processes_leave_is_removed(start, segments, alive_of, fakes, dies):
    own, shared, older = segments
    older.write_bytes(bytes(4096))
    server = start(*(f"maps={path.name}" for path in segments))
    await server.wait_ready(deadline_s=60)
    assert own.exists()
    with shared.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        if dies:
            os.kill(server.pid, signal.SIGKILL)
        else:
            await server.close(at_once=True)
        assert await server.wait() == 128 + signal.SIGKILL
    assert not own.exists()
    assert shared.exists(), "another process had it"
    assert older.exists(), "it was there before"


async def test_many_may_wait_for_the_end(start):
    server = start("hangs")
    waiting = [asyncio.create_task(server.wait()) for _ in range(3)]
    await server.close(at_once=True)
    assert await asyncio.gather(*waiting) == [137, 137, 137]


def test_a_program_that_is_not_there_is_told(tmp_path):
    command = LaunchCommand(argv=[str(tmp_path / "python")])
    with pytest.raises(UsageError, match=r"server-0 cannot be started: got .*No such file.*expected a program at"):
        ServerProcess(command, name="server-0", port=1, log=tmp_path / "server-0.log")


def test_other_systems_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match=r"Linux only: got darwin\. Start the servers yourself"):
        ServerProcess(LaunchCommand(argv=["true"]), name="server-0", port=1, log=tmp_path / "server-0.log")
