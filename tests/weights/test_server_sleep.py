"""Servers that sleep while the trainer trains."""

import torch

from agentrl.errors import EngineError


def asleep(world):
    return [server.is_asleep for server in world.servers]


async def test_servers_sleep_until_the_next_sync_and_then_serve_its_weights(world_of, monkeypatch):
    world = await world_of(sleeps=True)
    await world.next_version()
    free = iter([1000, 1800])
    monkeypatch.setattr("agentrl.weights.naps.free_bytes", lambda: next(free))
    await world.sync.release_memory()
    assert (asleep(world), world.pool.group.is_paused) == ([True, True], True)
    report = await world.next_version()
    assert (asleep(world), world.pool.group.is_paused) == ([False, False], False)
    assert (report.servers, report.released_bytes) == (2, 800)
    assert report.probe_difference < 1e-5
    assert (await world.pool.generate(world.request("r", max_tokens=4))).versions == [2] * 4


async def test_servers_that_share_nothing_stay_awake(world_of):
    world = await world_of()
    await world.next_version()
    await world.sync.release_memory()
    assert (asleep(world), world.pool.group.is_paused) == ([False, False], False)


async def test_a_server_that_cannot_sleep_is_taken_out_and_comes_back_awake(world_of, until, monkeypatch):
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
