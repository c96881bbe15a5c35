"""Several servers: started together, restarted one by one, ended together."""

import asyncio
import os
import re
import signal
import socket
from collections.abc import Sequence

import aiohttp
import pytest

from agentrl.errors import EngineError, UsageError
from agentrl.serving.launch import LaunchCommand, Launcher, ServerExited
from agentrl.serving.launch import resources as launch_ports
from agentrl.serving.launch.process import PORT_ATTEMPTS
from agentrl.serving.launch.resources import is_free, reserve_port


@pytest.fixture
def launcher_of(fakes, tmp_path):
    """A launcher of fake servers."""

    def build(count: int, **settings) -> Launcher:
        settings = {"gpus": [()] * count, "make_command": fakes.command, "start_timeout_s": 60, **settings}
        return Launcher(settings.pop("make_command"), logs=tmp_path / "logs", **settings)

    return build


async def environment_of(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as answer:
        return await answer.text()


async def test_servers_start_on_ports_of_their_own_and_end_together(launcher_of, fakes, alive_of, tmp_path):
    told = set()
    async with launcher_of(3, on_progress=lambda progress: told.add(progress.name)) as launcher:
        servers = await launcher.start()
        assert [server.name for server in servers] == ["server-0", "server-1", "server-2"]
        assert launcher.servers == {server.name: server for server in servers}
        assert len({server.port for server in servers}) == 3
        assert len(alive_of(fakes.pids())) == 9
        assert told == set(launcher.servers)
    assert alive_of(fakes.pids()) == set()
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {f"server-{i}.log" for i in range(3)}


async def test_each_server_sees_its_own_gpus(launcher_of, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5,7,9")
    async with launcher_of(2, gpus=[(0, 1), (3,)]) as launcher:
        servers = await launcher.start()
        seen = [await environment_of(server.url) for server in servers]
    assert [re.findall(r"'CUDA_VISIBLE_DEVICES': '([^']*)'", text) for text in seen] == [["3,GPU-5"], ["9"]]


async def test_servers_share_the_cores_of_the_engine(launcher_of):
    cores = sorted(os.sched_getaffinity(0))
    async with launcher_of(2, cpus=[cores[0], cores[-1]]) as launcher:
        servers = await launcher.start()
        assert [os.sched_getaffinity(server.pid) for server in servers] == [{cores[0]}, {cores[-1]}]
        again = await launcher.restart("server-1")
        assert os.sched_getaffinity(again.pid) == {cores[-1]}
    assert os.sched_getaffinity(0) == set(cores)


async def test_a_dead_server_comes_back_under_its_name_on_another_port(launcher_of, fakes, alive_of):
    async with launcher_of(2) as launcher:
        first, second = await launcher.start()
        os.kill(first.pid, signal.SIGKILL)
        await first.wait()
        again = await launcher.restart("server-0")
        assert (again.name, again.log) == (first.name, first.log)
        assert len({first.port, second.port, again.port}) == 3
        assert await environment_of(again.url)
        assert again.last_lines() == ["loading"]
        assert again.log.read_text() == "loading\nloading\n"
        assert second.code is None
    assert alive_of(fakes.pids()) == set()


async def test_a_stopped_server_is_killed_by_a_restart(launcher_of, fakes, alive_of):
    async with launcher_of(1) as launcher:
        (hung,) = await launcher.start()
        os.kill(hung.pid, signal.SIGSTOP)
        again = await launcher.restart("server-0")
        assert hung.code == 128 + signal.SIGKILL
        assert alive_of(fakes.pids(0)) == set()
        assert len(alive_of(fakes.pids(1))) == 3
        assert await environment_of(again.url)


@pytest.mark.parametrize("flag", ["exits", "hangs"])
async def test_when_one_does_not_start_none_is_left(launcher_of, fakes, alive_of, flag):
    fakes.flags[1] = (flag,)
    launcher = launcher_of(3, start_timeout_s=60 if flag == "exits" else 3)
    with pytest.raises(EngineError, match="did not start"):
        await launcher.start()
    assert alive_of(fakes.pids()) == set()
    with pytest.raises(EngineError, match="a launcher that is closed"):
        await launcher.restart("server-0")


async def test_an_interrupted_start_leaves_nothing(launcher_of, fakes, alive_of, until):
    fakes.flags = {0: ("hangs",), 1: ("hangs",)}
    start = asyncio.create_task(launcher_of(2).start())
    await until(lambda: len(fakes.pids()) == 2 or start.done())
    assert not start.done()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert alive_of(fakes.pids()) == set()


async def test_an_exception_in_the_block_ends_the_servers(launcher_of, fakes, alive_of):
    launcher = launcher_of(1)

    async def use() -> None:
        async with launcher:
            await launcher.start()
            assert len(alive_of(fakes.pids())) == 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await use()
    assert alive_of(fakes.pids()) == set()


async def test_closing_ends_a_server_that_is_being_restarted(launcher_of, fakes, alive_of, until):
    fakes.flags[1] = ("hangs",)
    launcher = launcher_of(1)
    await launcher.start()
    restart = asyncio.create_task(launcher.restart("server-0"))
    await until(lambda: len(fakes.pids(1)) == 1)
    await launcher.close()
    with pytest.raises(ServerExited):
        await restart
    assert len(fakes.ports) == 2
    assert alive_of(fakes.pids()) == set()


@pytest.mark.slow
async def test_a_server_that_does_not_come_back_leaves_nothing(launcher_of, fakes, alive_of):
    fakes.flags[1] = ("hangs",)
    async with launcher_of(1, start_timeout_s=3) as launcher:
        await launcher.start()
        with pytest.raises(EngineError, match="no answer"):
            await launcher.restart("server-0")
        assert alive_of(fakes.pids()) == set()
        assert await launcher.restart("server-0")


async def test_servers_listen_where_they_are_asked_to(launcher_of):
    reservations = [reserve_port(), reserve_port()]
    ports = [reservation.port for reservation in reservations]
    for reservation in reservations:
        reservation.release()
    async with launcher_of(2, ports=ports) as launcher:
        assert [server.url for server in await launcher.start()] == [f"http://127.0.0.1:{port}" for port in ports]


async def test_a_port_in_use_is_refused_before_anything_starts(launcher_of, fakes):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} is in use"):
            await launcher_of(1, ports=[port]).start()
    assert fakes.ports == []


async def test_when_another_program_takes_the_port_first_the_next_is_tried(launcher_of, fakes):
    thieves: list[socket.socket] = []

    def command(port: int, gpus: Sequence[int]) -> LaunchCommand:
        if not thieves:
            thieves.append(socket.socket())
            thieves[0].bind(("127.0.0.1", port))
        return fakes.command(port, gpus)

    try:
        async with launcher_of(1, make_command=command) as launcher:
            (server,) = await launcher.start()
            assert server.port == fakes.ports[1] != fakes.ports[0]
            assert not is_free(server.port)
    finally:
        for thief in thieves:
            thief.close()


async def test_a_port_that_is_always_taken_first_ends_the_attempts(launcher_of, fakes):
    thieves: list[socket.socket] = []

    def command(port: int, gpus: Sequence[int]) -> LaunchCommand:
        if len(thieves) < 2 * PORT_ATTEMPTS:
            thieves.append(socket.socket())
            thieves[-1].bind(("127.0.0.1", port))
        return fakes.command(port, gpus)

    try:
        with pytest.raises(ServerExited):
            await launcher_of(1, make_command=command).start()
        assert len(thieves) == PORT_ATTEMPTS
    finally:
        for thief in thieves:
            thief.close()


@pytest.mark.parametrize(
    ("ephemeral", "expected"),
    [
        ("32768 60999", [*range(20_000, 32_768), *range(61_000, 65_536)]),
        ("20000\t65535", [*range(20_000, 65_536)]),
    ],
)
def test_candidates_are_the_ports_that_the_system_does_not_use_itself(tmp_path, monkeypatch, ephemeral, expected):
    (tmp_path / "range").write_text(ephemeral)
    monkeypatch.setattr(launch_ports, "EPHEMERAL_PORTS", tmp_path / "range")
    found = launch_ports._candidates()
    assert sorted(found) == expected
    assert found == [*range(found[0], 65_536), *range(20_000, found[0])] or len(expected) < 45_536
