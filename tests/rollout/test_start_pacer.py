"""Starts of episodes are spread over passes of the event loop, in order."""

import asyncio

import pytest

from agentrl.rollout.env_pool import StartPacer


async def started_per_pass(pacer, count, *, cancelled=()):
    """Return the numbers of the tasks that went on, pass after pass."""
    passes = [[]]

    async def start(number):
        await pacer.wait()
        passes[-1].append(number)

    tasks = [asyncio.create_task(start(number)) for number in range(count)]
    await asyncio.sleep(0)
    for number in cancelled:
        tasks[number].cancel()
    while not all(task.done() for task in tasks):
        assert len(passes) < 100, "some tasks never go on"
        passes.append([])
        await asyncio.sleep(0)
    return [found for found in passes if found]


async def test_few_tasks_start_at_once():
    assert await started_per_pass(StartPacer(4), 4) == [[0, 1, 2, 3]]


async def test_many_tasks_start_in_order_over_several_passes():
    passes = await started_per_pass(StartPacer(3), 10)
    assert [number for found in passes for number in found] == list(range(10))
    assert all(len(found) <= 3 for found in passes)


async def test_cancelled_tasks_leave_their_turn_to_others():
    assert await started_per_pass(StartPacer(2), 8, cancelled=(2, 3, 5)) == [[0, 1], [4, 6], [7]]


async def test_later_tasks_start_at_once_again():
    pacer = StartPacer(2)
    await started_per_pass(pacer, 5)
    await asyncio.sleep(0)
    assert await started_per_pass(pacer, 2) == [[0, 1]]
    await asyncio.sleep(0)
    with pytest.raises(StopIteration):  # without waiting for another pass
        pacer.wait().send(None)
