"""Servers that sleep while the trainer trains."""

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager

import pytest
import torch
from support.local_server import LocalServer

from agentrl.errors import EngineError, UsageError
from agentrl.errors.deadlines import close_in_time
from agentrl.observe.metrics import read_metrics
from agentrl.runs.rl import train
from agentrl.serving.pool import ServerPool


def asleep(world):
    return [server.is_asleep for server in world.servers]


async def test_servers_sleep_until_the_next_sync_and_then_serve_its_weights(world_of, monkeypatch):
    world = await world_of(sleeps=True)
    assert (await world.next_version()).released_bytes == 0
    free = iter([1000, 1800])
    monkeypatch.setattr("agentrl.weights.sync.free_bytes", lambda: next(free))
    await world.sync.release_memory()
    assert (asleep(world), world.pool.group.is_paused) == ([True, True], True)
    report = await world.next_version()
    assert (asleep(world), world.pool.group.is_paused) == ([False, False], False)
    assert (report.servers, report.released_bytes) == (2, 800)
    assert report.probe_difference < 1e-5
    assert (await world.pool.generate(world.request("r", max_tokens=4))).versions == [2] * 4
    await world.pool.pause()
    await world.pool.update_weights(None, 3)
    assert world.pool.group.is_paused, "servers that are awake stay held by whoever holds them"
    await world.pool.resume()


async def test_a_server_is_woken_once(world_of, monkeypatch):
    world = await world_of(count=1, sleeps=True)
    woken, wake_up = [], world.servers[0].wake_up

    async def counted():
        woken.append(world.pool.version)
        await wake_up()

    monkeypatch.setattr(world.servers[0], "wake_up", counted)
    await world.next_version()
    await world.sync.release_memory()
    await world.next_version()
    await world.next_version()
    assert woken == [1]


async def test_servers_that_share_nothing_stay_awake(world_of):
    world = await world_of()
    await world.next_version()
    await world.sync.release_memory()
    assert (asleep(world), world.pool.group.is_paused) == ([False, False], False)
    assert (await world.next_version()).released_bytes is None


def test_a_run_puts_its_servers_to_sleep_in_every_step(tiny_run, monkeypatch):
    calls = []

    class Sleeper(LocalServer):
        async def sleep(self):
            calls.append("sleep")
            await super().sleep()

        async def wake_up(self):
            calls.append("wake")
            await super().wake_up()

    @asynccontextmanager
    async def pool_of_one(section, model, folder, *, version, trainer_gpus, say):
        pool = ServerPool([Sleeper(model.path, name="0")], version=version)
        await pool.start()
        yield pool
        await pool.close()

    monkeypatch.setattr("agentrl.builders.processes.open_pool", pool_of_one)
    run = tiny_run("engine={type: vllm, sleep: true}", "trainer.steps=2")
    train(run)
    lines = read_metrics(run.folder.metrics_file)
    assert calls == ["sleep", "wake"] * 2
    assert [line["sync/released_bytes"] for line in lines] == [0, 0]
    assert max(line["mismatch/prob_abs_mean"] for line in lines) < 1e-4


@pytest.mark.parametrize("where", ["sleep", "wake_up"])
def test_ctrl_c_ends_a_run_whose_sleeping_server_hangs(tiny_run, monkeypatch, where):
    monkeypatch.setattr("agentrl.runs.rl.SYNC_GRACE_S", 0.2)
    monkeypatch.setattr("agentrl.errors.deadlines.INTERRUPTED_CLOSING_S", 0.2)
    asked = []

    async def hang(server):
        if not asked:
            os.kill(os.getpid(), signal.SIGINT)
        asked.append(server)
        await asyncio.Event().wait()

    @asynccontextmanager
    async def pool_of_one(section, model, folder, *, version, trainer_gpus, say):
        pool = ServerPool([LocalServer(model.path, name="0")], version=version)
        await pool.start()
        yield pool
        await pool.close()

    monkeypatch.setattr("agentrl.builders.processes.open_pool", pool_of_one)
    monkeypatch.setattr(LocalServer, where, hang)
    if where == "sleep":
        monkeypatch.setattr(LocalServer, "wake_up", hang)
    began = time.monotonic()
    result = train(tiny_run("engine={type: vllm, sleep: true}", "trainer.steps=2"))
    assert (result.step, result.interrupted, len(asked)) == (1, True, 2)
    assert time.monotonic() - began < 60


async def test_server_that_cannot_sleep_is_removed_and_returns_awake(world_of, until, monkeypatch):
    world = await world_of(sleeps=True)
    await world.next_version()

    async def cannot():
        raise EngineError("not now")

    monkeypatch.setattr(world.servers[0], "sleep", cannot)
    await world.sync.release_memory()
    await until(lambda: len(world.pool.servers) == 2)
    assert [server.is_asleep for server in world.pool.servers] == [False, True]
    report = await world.next_version()
    assert (report.servers, asleep(world)[1]) == (2, False)
    states = [server.model.state_dict() for server in world.pool.servers]
    assert all(torch.equal(state[name], value) for state in states for name, value in world.trainer.past[2].items())


async def test_an_attached_server_that_fell_asleep_late_is_woken_before_it_gets_weights(world_of, until, monkeypatch):
    world = await world_of(sleeps=True, restartable=False)
    await world.next_version()
    server, real = world.servers[0], world.servers[0].sleep

    async def says_nothing():
        await real()
        raise EngineError("no answer")

    monkeypatch.setattr(server, "sleep", says_nothing)
    await world.sync.release_memory()
    await until(lambda: server in world.pool.servers)
    assert asleep(world) == [False, True]
    assert all(torch.equal(server.model.state_dict()[name], value) for name, value in world.trainer.past[1].items())
    assert (await world.next_version()).servers == 2


async def test_servers_are_left_awake_with_the_weights_that_they_had(world_of):
    world = await world_of(sleeps=True, restartable=False)
    await world.next_version()
    await world.sync.release_memory()
    world.trainer.learn()
    await world.sync.close()
    assert (asleep(world), world.pool.group.is_paused) == ([False, False], False)
    states = [server.model.state_dict() for server in world.servers]
    assert all(torch.equal(state[name], value) for state in states for name, value in world.trainer.past[1].items())


async def test_server_that_does_not_wake_at_the_end_does_not_block(world_of, until, monkeypatch):
    world = await world_of(count=1, sleeps=True, restartable=False)
    await world.next_version()
    await world.sync.release_memory()
    world.servers[0].kill()
    await until(lambda: world.pool.servers == [])
    await world.sync.close()
    assert not world.transport.path.exists()


async def test_server_that_does_not_wake_at_the_end_is_reported(world_of, monkeypatch, caplog):
    world = await world_of(count=1, sleeps=True, restartable=False)
    await world.next_version()
    await world.sync.release_memory()

    async def refuse():
        raise UsageError("this server cannot wake")

    monkeypatch.setattr(world.servers[0], "wake_up", refuse)
    await world.sync.close()
    assert "some servers stay asleep" in caplog.text
    assert not world.transport.path.exists()


async def test_a_transport_is_closed_although_a_server_cannot_be_woken_in_time(world_of):
    world = await world_of(sleeps=True, restartable=False)
    await world.next_version()
    await world.sync.release_memory()
    assert world.transport.path.exists()
    async with world.pool.group.changing:  # an abandoned sync waits for an answer
        await close_in_time(world.sync.close, "closing the weight sync", 0.05)
    assert not world.transport.path.exists()
