"""Wait times of episodes, with a simulated clock."""

import asyncio
import contextlib
import re
import threading

import pytest

from agentrl.rollout.waits import EngineSeconds, WaitKind, WaitTracker


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
    first = waits.on(WaitKind.ENGINE, "episode 1", "an answer", 600.0)
    first.__enter__()
    clock.now += 5
    tool = waits.on(WaitKind.TOOL, "episode 3", "search", None, "my fix")
    with waits.on(WaitKind.ENGINE, "episode 2", "an answer", 600.0), tool:
        clock.now += 54
        assert waits.stall_report(60.0) is None
        clock.now += 6
        report = waits.stall_report(60.0)
    assert report.splitlines() == [
        "no progress for 65 s; 3 waiting:",
        "      2  engine       an answer; longest 65 s (deadline 600 s): episode 1; unblocked by engine.timeout_s",
        "      1  tool         search; longest 60 s (no deadline): episode 3; unblocked by my fix",
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
        with waits.report_stalls(0.01, reports.put_nowait):
            assert "an answer" in await asyncio.wait_for(reports.get(), 60)
            (watch,) = watches()
    watch.join(60)
    assert not watch.is_alive()


def watches():
    return [thread for thread in threading.enumerate() if thread.name == "stall watch"]


@pytest.mark.parametrize("is_registered", [True, False])
async def test_a_blocked_event_loop_is_reported_while_it_is_blocked(is_registered):
    waits, reported, reports = WaitTracker(), threading.Event(), []

    def report(text):
        reports.append((text, threading.current_thread().name))
        reported.set()

    wait = waits.on(WaitKind.TRAINER, "step 3", "trainer.step") if is_registered else contextlib.nullcontext()
    with waits.report_stalls(0.2, report):
        await asyncio.sleep(0)
        with wait:
            assert reported.wait(30)  # blocks the event loop, as a training step does
    text, thread = reports[0]
    assert thread == "stall watch"
    name = "trainer.step" if is_registered else asyncio.current_task().get_name()
    assert re.match(rf"the event loop has been blocked for \d+ s by {name} \(.*threading.py line \d+\)", text)
    assert ("1  trainer      trainer.step; longest 0 s (no deadline): step 3" in text) == is_registered


async def test_an_event_loop_that_runs_is_not_called_blocked():
    waits, reports = WaitTracker(), asyncio.Queue()
    with waits.on(WaitKind.TRAINER, "step 3", "trainer.step"), waits.report_stalls(0.2, reports.put_nowait):
        assert (await asyncio.wait_for(reports.get(), 60)).startswith("no progress for 0 s; 1 waiting:")


async def test_a_report_that_cannot_be_shown_does_not_end_the_watch(caplog):
    waits, shown = WaitTracker(), asyncio.Queue()

    def report(text):
        shown.put_nowait(text)
        raise OSError("the terminal is gone")

    with waits.on(WaitKind.ENGINE, "e", "an answer"), waits.report_stalls(0.02, report):
        for _ in range(2):
            await asyncio.wait_for(shown.get(), 60)
    assert "the terminal is gone" in caplog.text


def test_an_agent_loop_is_listed_only_if_its_episode_waits_for_nothing_else(clock):
    waits = WaitTracker(clock)
    with (
        waits.on(WaitKind.LOOP, "e", "MyLoop"),
        waits.on(WaitKind.LOOP, "f", "MyLoop"),
        waits.on(WaitKind.TOOL, "e", "search"),
    ):
        clock.now += 60
        report = waits.stall_report(60.0)
    assert "; 2 waiting:" in report
    assert "      1  loop         MyLoop; longest 60 s (no deadline): f; unblocked by agent.max_seconds" in report


@pytest.mark.parametrize("kind", WaitKind)
def test_every_row_says_what_unblocks_it(clock, kind):
    waits = WaitTracker(clock)
    with waits.on(kind, "e", "it"):
        clock.now += 60
        assert f"{kind:<12} it; longest 60 s (no deadline): e; unblocked by " in waits.stall_report(60.0)


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


async def test_a_lockstep_engine_waits_for_working_episodes_but_not_for_those_that_wait_for_it():
    waits = WaitTracker()
    step, tool = (waits.on(kind, who, "x") for kind, who in ((WaitKind.ENVIRONMENT, "a"), (WaitKind.TOOL, "b")))
    place, question = (waits.on(kind, who, "x") for kind, who in ((WaitKind.CAPACITY, "c"), (WaitKind.ENGINE, "b")))
    for wait in (step, tool, place):
        wait.__enter__()
    asked = asyncio.create_task(waits.wait_for_episodes())
    await asyncio.sleep(0)
    before = waits.changes
    step.__exit__(None, None, None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not asked.done()  # the tool of b
    question.__enter__()
    assert waits.changes == before + 2
    await asyncio.wait_for(asked, timeout=60)
    question.__exit__(None, None, None)
    again = asyncio.create_task(waits.wait_for_episodes())
    await asyncio.sleep(0)
    assert not again.done()
    tool.__exit__(None, None, None)
    await asyncio.wait_for(again, timeout=60)
    place.__exit__(None, None, None)


def test_seconds_of_the_engine_by_hand(clock):
    """Four slots: 10 s with two answers and an episode in two tools, 4 s with six answers, 2 s with nothing."""
    waits = WaitTracker(clock)
    waits.engine_use.slots = 4
    began = waits.engine_use.read(clock.now)
    asking = [waits.on(WaitKind.ENGINE, f"e{number}", "an answer") for number in range(6)]
    tools = [waits.on(WaitKind.TOOL, "e7", name) for name in ("search", "fetch")]
    with contextlib.ExitStack() as stack:
        for wait in (*asking[:2], *tools):
            stack.enter_context(wait)
        with waits.on(WaitKind.CAPACITY, "e8", "a slot"):
            clock.now += 10
        for wait in asking[2:]:
            stack.enter_context(wait)
        clock.now += 4
    clock.now += 2
    found = waits.engine_use.read(clock.now) - began
    assert found == EngineSeconds(whole=16, used=5 + 4, elsewhere=2.5)
    assert found.empty == 4.5
