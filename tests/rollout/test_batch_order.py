"""Which groups a batch contains, windowed or greedy, when some are slow."""

import asyncio
import json

import pytest
from groups_here import Player, make, positions

from agentrl.errors import Outcome
from agentrl.task import SeedTasks, TaskCursor

__all__ = ["make"]


class Slow(Player):
    """Groups of the given positions end when they are released."""

    def __init__(self, *positions):
        super().__init__()
        self.held = {position: asyncio.Event() for position in positions}

    async def run(self, task, *, group_id, member, seed, in_group=False):
        trajectory = await super().run(task, group_id=group_id, member=member, seed=seed, in_group=in_group)
        held = self.held.get(int(group_id.partition("-")[0]))
        if held is not None:
            await held.wait()
        return trajectory


async def settle():
    for _ in range(30):
        await asyncio.sleep(0)


async def next_version(scheduler):
    """Take a batch and train on it."""
    found = positions(await scheduler.next_batch())
    scheduler.runners[""].version = scheduler.version + 1
    scheduler.set_version(scheduler.version + 1)
    return found


async def test_a_windowed_batch_waits_for_groups_that_would_be_too_stale(make):
    player = Slow(0)
    scheduler = make(player, max_staleness=1, batch=2, group_size=1)
    assert await next_version(scheduler) == [1, 2]
    waiting = asyncio.create_task(next_version(scheduler))
    await settle()
    assert not waiting.done()
    player.held[0].set()
    assert await waiting == [0, 3]
    assert player.counters.groups_stale == 0


async def test_a_greedy_batch_takes_what_ends_first(make):
    player = Slow(0)
    scheduler = make(player, max_staleness=1, batch=2, group_size=1, batch_order="greedy")
    assert [await next_version(scheduler), await next_version(scheduler)] == [[1, 2], [3, 4]]
    player.held[0].set()
    await settle()
    assert await next_version(scheduler) == [5, 6]
    assert player.counters.groups_stale == 1


async def test_no_more_groups_become_due_than_fit_into_a_batch(make):
    """Four slow groups of the first version, two of which must train before the version at which all are due."""
    player = Slow(2, 3, 4, 5)
    scheduler = make(player, max_staleness=2, batch=2, group_size=1)
    assert await next_version(scheduler) == [0, 1]
    waiting = asyncio.create_task(next_version(scheduler))
    await settle()
    assert not waiting.done(), "else four groups would be due at version 2, of which a batch holds two"
    assert len(scheduler.state_dict()["finished"]) == 2
    player.held[5].set()
    await settle()
    assert not waiting.done()
    player.held[3].set()
    assert await waiting == [3, 5]
    waiting = asyncio.create_task(next_version(scheduler))
    await settle()
    player.held[2].set()
    player.held[4].set()
    assert await waiting == [2, 4]
    assert player.counters.groups_stale == 0


async def test_a_failed_or_filtered_group_is_not_waited_for(make):
    player = Slow(0, 1)
    player.decide = lambda task_id, member: (
        (Outcome.ENGINE_ERROR, None) if task_id == first else (Outcome.FINISHED, float(task_id == second))
    )
    cursor = TaskCursor(SeedTasks("w", size=1000), seed=0)
    first, second = cursor.next().id, cursor.next().id
    scheduler = make(
        player, max_staleness=1, batch=2, group_size=1, keep=lambda group: not any(t.reward for t in group.trainable)
    )
    assert await next_version(scheduler) == [2, 3]
    waiting = asyncio.create_task(next_version(scheduler))
    await settle()
    assert not waiting.done()
    player.held[0].set()
    player.held[1].set()
    assert await waiting == [4, 5]
    assert (player.counters.groups_failed, player.counters.groups_filtered) == (1, 1)
    assert player.counters.discarded_engine_s == 2.0, "the failed episode counts as a failed attempt"


async def test_a_resumed_scheduler_waits_for_the_groups_that_were_due(make):
    scheduler = make(Slow(0), max_staleness=1, batch=2, group_size=1)
    await next_version(scheduler)
    state = json.loads(json.dumps(scheduler.state_dict()))
    player = Slow(0)
    player.version = 1
    restored = make(player, max_staleness=1, batch=2, group_size=1)
    restored.load_state_dict(state)
    waiting = asyncio.create_task(next_version(restored))
    await settle()
    assert not waiting.done()
    player.held[0].set()
    assert await waiting == [0, 3]


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_a_resumed_scheduler_may_allow_less_staleness(make, staleness):
    """More groups than a batch are due then; they train one batch after the other."""
    player = Slow(*range(1, 8))
    scheduler = make(player, max_staleness=3, batch=2, group_size=1, batch_order="greedy")
    scheduler.start_episodes()
    await settle()
    state = json.loads(json.dumps(scheduler.state_dict()))
    restored = make(Player(), max_staleness=staleness, batch=2, group_size=1)
    restored.load_state_dict(state)
    assert [await next_version(restored) for _ in range(5)] == [[2 * step, 2 * step + 1] for step in range(5)]
