"""Wait times of episodes, with a simulated clock."""

import asyncio

import pytest

from agentrl.rollout.waits import WaitKind, WaitTracker


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_stall_is_a_table_of_waits(clock):
    waits = WaitTracker(clock)
    first = waits.on(WaitKind.ENGINE, "episode 1", "an answer")
    first.__enter__()
    clock.now += 5
    with waits.on(WaitKind.ENGINE, "episode 2", "an answer"), waits.on(WaitKind.TOOL, "episode 3", "search"):
        clock.now += 54
        assert waits.stall_report(60.0) is None
        clock.now += 6
        report = waits.stall_report(60.0)
    assert report.splitlines() == [
        "no progress for 65 s; 3 waiting:",
        "      2  engine       an answer; longest 65 s: episode 1",
        "      1  tool         search; longest 60 s: episode 3",
    ]


def test_a_stall_is_reported_once_per_silence(clock):
    waits = WaitTracker(clock)
    with waits.on(WaitKind.ENGINE, "e", "an answer"):
        clock.now += 10
        assert waits.stall_report(10.0)
        clock.now += 9
        assert waits.stall_report(10.0) is None
        clock.now += 1
        assert waits.stall_report(10.0)


async def test_stalls_are_reported_while_a_block_runs(clock):
    waits, reports = WaitTracker(clock), asyncio.Queue()
    with waits.on(WaitKind.ENGINE, "e", "an answer"):
        clock.now += 10
        async with waits.report_stalls(0.01, reports.put_nowait):
            assert "an answer" in await reports.get()
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "stall watch"]


def test_progress_ends_the_silence(clock):
    waits = WaitTracker(clock)
    with waits.on(WaitKind.ENGINE, "e", "an answer"):
        clock.now += 9
        with waits.on(WaitKind.ENVIRONMENT, "e", "step"):
            pass
        clock.now += 9
        assert waits.stall_report(10.0) is None


def test_nobody_waits_nothing_stalls(clock):
    waits = WaitTracker(clock)
    clock.now += 1000
    assert waits.stall_report(10.0) is None
    with waits.on(WaitKind.ENGINE, "e", "an answer"):
        assert waits.stall_report(10.0) is None


def test_seconds_are_summed_by_kind(clock):
    waits = WaitTracker(clock)
    for _ in range(2):
        with waits.on(WaitKind.TOOL, "e", "search") as wait:
            clock.now += 3
        assert wait.seconds == 3
    assert waits.seconds == {WaitKind.TOOL: 6}


async def test_the_watch_reports(clock):
    waits, reports = WaitTracker(clock), []

    async def sleep(seconds):
        clock.now += seconds
        await asyncio.sleep(0)

    with waits.on(WaitKind.ENGINE, "e", "an answer"):
        watch = asyncio.create_task(waits.watch(60.0, reports.append, sleep=sleep))
        for _ in range(12):
            await asyncio.sleep(0)
        watch.cancel()
    assert [report.splitlines()[0] for report in reports[:2]] == [
        "no progress for 60 s; 1 waiting:",
        "no progress for 120 s; 1 waiting:",
    ]


async def test_an_engine_in_lockstep_waits_for_all_who_are_at_work_and_for_nobody_who_asks_it():
    waits = WaitTracker()
    step, tool = (waits.on(kind, who, "x") for kind, who in ((WaitKind.ENVIRONMENT, "a"), (WaitKind.TOOL, "b")))
    place, question = (waits.on(kind, who, "x") for kind, who in ((WaitKind.CAPACITY, "c"), (WaitKind.ENGINE, "b")))
    for wait in (step, tool, place):
        wait.__enter__()
    asked = asyncio.create_task(waits.wait_for_callers())
    await asyncio.sleep(0)
    before = waits.changes
    step.__exit__(None, None, None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not asked.done()  # the tool of b
    question.__enter__()
    assert waits.changes == before + 2
    await asyncio.wait_for(asked, timeout=10)
    question.__exit__(None, None, None)
    again = asyncio.create_task(waits.wait_for_callers())
    await asyncio.sleep(0)
    assert not again.done()
    tool.__exit__(None, None, None)
    await asyncio.wait_for(again, timeout=10)
    place.__exit__(None, None, None)
