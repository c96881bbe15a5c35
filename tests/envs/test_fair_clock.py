"""Deadlines of the environment check on a machine that is too busy to run the environment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref

import pytest

from agentrl.testing import fair_clock
from agentrl.testing.env_rules import resources
from agentrl.testing.env_session import CallFailed, asking, run_watched
from agentrl.testing.fair_clock import LEAST_SHARE, FairClock


class Machine:
    """A machine on which threads wait for cores for a share of the time."""

    def __init__(self, share: float) -> None:
        self.share, self.now = share, 100.0

    def waits(self) -> list[tuple[tuple[int, str], float]]:
        return [((1, "1"), self.share * self.now), ((1, "2"), 7.0), ((2, "3"), 0.5 * self.share * self.now)]


@pytest.mark.parametrize(("share", "speed"), [(0.0, 1.0), (0.75, 0.25), (1.0, LEAST_SHARE), (3.0, LEAST_SHARE)])
def test_the_clock_leaves_out_the_longest_wait_but_never_stops(
    share: float, speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(share)
    monkeypatch.setattr(fair_clock, "_waits", machine.waits)
    monkeypatch.setattr(time, "monotonic", lambda: machine.now)
    clock = FairClock()
    assert clock.tick() == 0
    machine.now += 10
    assert clock.read() == 10, "a call that begins now has at least its whole time"
    assert clock.tick() == clock.read() == pytest.approx(10 * speed)
    machine.now += 10
    assert clock.tick() == pytest.approx(20 * speed)


def test_a_correct_call_may_take_longer_on_a_busy_machine_and_one_that_never_returns_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(seconds: float) -> str:
        with asking("step"):
            time.sleep(seconds)
        return "returned"

    with pytest.raises(CallFailed, match=r"step did not return within 0\.2 s"):
        run_watched(lambda: call(0.6), 0.2)
    monkeypatch.setattr(fair_clock, "_waits", lambda: [((1, "1"), time.monotonic())])
    assert run_watched(lambda: call(0.6), 0.2) == "returned"
    with pytest.raises(CallFailed, match=r"step did not return within 0\.02 s"):
        run_watched(lambda: call(60), 0.02)


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="needs Linux's counts of waits")
def test_the_waits_of_children_count() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in {pid for (pid, _), _ in fair_clock._waits()}
    finally:
        child.communicate(b"\n")


def test_the_thread_of_the_last_call_may_let_go_of_an_environment_late(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [Machine(0.0)]
    reference = weakref.ref(held[0])
    monkeypatch.setattr(time, "sleep", lambda _: held.clear())
    assert resources._await_freed([None, reference]) == 0
    kept = Machine(0.0)
    monkeypatch.setattr(resources, "_RELEASE_S", 0.0)
    assert resources._await_freed([weakref.ref(kept), None]) == 1
