"""Lists of episodes with bounded concurrency."""

import asyncio
import itertools

import pytest

from agentrl.errors import Outcome, UsageError
from agentrl.rollout import runner as runner_module
from agentrl.rollout.runner import Assignment, play_all
from agentrl.rollout.turns import derive_seed
from agentrl.serving.scripted import Failure, ScriptedAnswer
from agentrl.task import Task


def assignments(count, **fields):
    return [
        Assignment(task=Task(id=str(n), environment="world", **fields), group_id=str(n), member=0, seed=n)
        for n in range(count)
    ]


@pytest.mark.parametrize(("count", "concurrency", "most"), [(7, 3, 3), (2, 5, 2), (0, 4, 0)])
async def test_all_are_played_and_no_more_at_once_than_allowed(make_runner, worlds, count, concurrency, most):
    runner = make_runner(worlds.Corridor, "forward")
    seen, running = [], []
    async for trajectory in play_all(runner, assignments(count), concurrency=concurrency):
        seen.append(trajectory.id)
        running.append(runner.counters.running)
        assert trajectory.outcome is Outcome.FINISHED
    assert sorted(seen) == [f"{n}/0.0" for n in range(count)]
    assert max(running, default=0) <= most


async def test_episodes_start_in_several_passes(make_runner, worlds, make_engine, monkeypatch):
    monkeypatch.setattr(runner_module, "TASKS_PER_PASS", 3)
    runner = make_runner(worlds.Corridor, engine=make_engine(ScriptedAnswer(token_ids=[1], failure=Failure.HANG)))
    episodes = play_all(runner, assignments(8), concurrency=7)
    first = asyncio.ensure_future(anext(episodes))
    counts = [0]
    while counts[-1] < 7:
        assert len(counts) < 10_000, "some episodes never start"
        await asyncio.sleep(0)
        counts.append(sum(getattr(task.get_coro(), "__name__", "") == "play" for task in asyncio.all_tasks()))
    assert max(after - before for before, after in itertools.pairwise(counts)) == 3
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await episodes.aclose()


async def test_leaving_early_cancels_the_rest(make_runner, worlds, make_engine):
    runner = make_runner(worlds.Corridor, engine=make_engine(ScriptedAnswer(token_ids=[1], failure=Failure.HANG)))
    episodes = play_all(runner, assignments(4), concurrency=4)
    first = asyncio.ensure_future(anext(episodes))
    for _ in range(20):
        await asyncio.sleep(0)
    assert runner.counters.running == 4
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await episodes.aclose()
    assert runner.counters.running == 0
    assert runner.counters.outcomes == {Outcome.CANCELLED: 4}


async def test_what_the_user_must_change_is_raised(make_runner, worlds, make_engine):
    runner = make_runner(worlds.Corridor, engine=make_engine([9999]))

    def script(request):
        raise UsageError("no such script")

    runner.policy.engine.script = script
    with pytest.raises(UsageError, match="no such script"):
        async for _ in play_all(runner, assignments(3), concurrency=2):
            pass
    assert runner.counters.running == 0


def test_seeds_depend_on_every_part_and_its_place():
    seeds = [derive_seed(*parts) for parts in [(0,), (1,), (0, 1), (1, 0), ("0", 1), (0, "1"), ("01",)]]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < 2**53
    assert derive_seed(0, "episode", 7) == 1615331152110679  # saved runs go on with the same seeds
