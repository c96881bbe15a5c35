"""Work of the scheduler that is spread over several passes of the event loop."""

import asyncio
import itertools

import pytest
from groups_here import Player, make, positions

from agentrl.rollout import scheduler as scheduler_module

__all__ = ["make"]


@pytest.mark.parametrize("staleness", [0, 2])
async def test_episodes_start_in_several_passes_with_the_same_result(make, monkeypatch, staleness):
    async def play(scheduler, player):
        batches = []
        for version in range(1, 4):
            batches.append([(g.position, g.start_version) for g in await scheduler.next_batch()])
            player.version = version
            scheduler.set_version(version)
        return batches

    player = Player()
    expected = await play(make(player, max_staleness=staleness, batch=5), player)
    monkeypatch.setattr(scheduler_module, "TASKS_PER_PASS", 4)
    player = Player()
    player.blocked = asyncio.Event()
    scheduler = make(player, max_staleness=staleness, batch=5)
    playing = asyncio.create_task(play(scheduler, player))
    counts = [0]
    while counts[-1] < (1 + staleness) * 10:
        assert len(counts) < 10_000, "some episodes never start"
        await asyncio.sleep(0)
        counts.append(player.running)
    assert max(after - before for before, after in itertools.pairwise(counts)) == 4
    player.blocked.set()
    assert await playing == expected


async def test_a_large_batch_is_measured_in_several_passes_and_kept_if_cancelled(make, monkeypatch):
    monkeypatch.setattr(scheduler_module, "GROUPS_PER_PASS", 1)
    scheduler, whole = make(), make()
    expected = await whole.next_batch()
    measured, add = [], scheduler.bias.add

    def note(position, *more, **options):
        measured.append(position)
        add(position, *more, **options)

    monkeypatch.setattr(scheduler.bias, "add", note)
    cancelled = asyncio.create_task(scheduler.next_batch())
    for _ in range(1000):
        await asyncio.sleep(0)
        if measured:
            break
    assert measured == [0], "the others are measured in later passes"
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert (scheduler.used, len(scheduler.state_dict()["finished"])) == (0, len(expected))
    assert positions(await scheduler.next_batch()) == positions(expected)
    assert scheduler.bias.metrics() == whole.bias.metrics()
