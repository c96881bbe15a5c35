"""Servers that fail or are late in operations on all servers."""

import asyncio
from types import SimpleNamespace

import pytest

from agentrl.engine import Capabilities, ServerLoad
from agentrl.errors import EngineError, TrainingError, UsageError
from agentrl.serving.pool import PoolSettings
from agentrl.serving.pool.group import PoolGroup


def a_server(name):
    async def nothing(**_):
        return

    async def healthy(**_):
        return True

    return SimpleNamespace(
        url=name,
        capabilities=Capabilities(max_context=10, vocab_size=10),
        connect=nothing,
        close=nothing,
        is_healthy=healthy,
    )


@pytest.fixture
async def group():
    settings = PoolSettings(check_every_s=600, retry_s=600)
    servers = [a_server("a"), a_server("b")]
    group = PoolGroup(
        servers,
        settings,
        restart=None,
        version=0,
        on_change=lambda: None,
        on_failure=lambda error: None,
        say=lambda text: None,
    )
    await group.start()
    yield group
    await group.stop()
    await group.close()


async def test_a_call_that_is_given_up_has_cleaned_up_before_anything_else_happens(group):
    order = []

    async def slow(server):
        if server.url == "a":
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(5):
                    await asyncio.sleep(0)
                order.append("cleaned")

    await group.each(slow, what="it", deadline_s=0.05)
    order.append("over")
    assert order == ["cleaned", "over"]
    assert [server.url for server in group.servers] == ["b"]
    assert "missed its deadline" in group.members[0].why


@pytest.mark.parametrize("kind", [TrainingError, UsageError])
async def test_what_a_person_must_change_loses_no_server_and_is_told_when_all_are_done(group, kind):
    done = []

    async def act(server):
        if server.url == "a":
            raise kind("remove engine.sleep")
        for _ in range(5):
            await asyncio.sleep(0)
        done.append(server.url)

    with pytest.raises(kind, match=r"remove engine\.sleep"):
        await group.each(act, what="it", deadline_s=30)
    assert done == ["b"]
    assert len(group.servers) == 2


async def test_a_server_that_fails_is_taken_out(group):
    async def act(server):
        if server.url == "a":
            raise EngineError("out of memory")

    await group.each(act, what="it", deadline_s=30)
    assert [server.url for server in group.servers] == ["b"]


async def test_a_server_that_cannot_be_closed_keeps_no_other_open(group):
    closed = []

    def closes(name):
        async def close():
            closed.append(name)
            if name == "a":
                raise EngineError("the connection was reset")

        return close

    for member in group.members:
        member.server.close = closes(member.server.url)
    await group.close()
    assert closed == ["a", "b"]


async def test_a_server_with_a_queue_gets_fewer_requests_unless_a_pause_made_the_queue(group):
    counts = {"preemptions": 0, "prompt_tokens": 0, "cached_tokens": 0, "sampled_tokens": 0}
    crowded = ServerLoad(running=8, waiting=50, cache_used=0.95, **counts)

    async def load():
        return crowded

    member = group.members[0]
    member.server.load, before = load, member.limit
    group.is_paused = True
    for _ in range(3):
        await group.monitor._check(member)
    assert (member.reading, member.limit) == (None, before)
    group.is_paused = False
    for _ in range(3):
        await group.monitor._check(member)
    assert member.reading is crowded
    assert 8 <= member.limit < before


async def test_a_health_check_that_fails_at_once_is_no_late_answer(group):
    async def unreachable(**_):
        raise EngineError("the connection was reset")

    server = group.members[0].server
    server.is_healthy = unreachable
    assert await group.monitor._find_fault(server) == "its health route cannot be reached, or reports a failure"
