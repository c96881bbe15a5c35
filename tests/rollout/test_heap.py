"""The heap that the garbage collector leaves alone while episodes run."""

import gc
import weakref
from gc import get_freeze_count

import pytest

from agentrl.rollout import heap
from agentrl.rollout.heap import collect_settled_heap, settled_heap
from agentrl.rollout.waits import WaitKind, WaitTracker


@pytest.fixture(autouse=True)
def _nothing_is_left_out(monkeypatch):
    """Tests begin with libraries left out, which do not count here: to look at all of them again takes long."""
    before = get_freeze_count()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: max(0, get_freeze_count() - before))
    yield
    gc.freeze()


class Node:
    def __init__(self) -> None:
        self.me = self


class Observation:
    pass


@pytest.mark.slow
def test_what_was_alive_before_is_left_alone_until_the_end():
    before = Node()
    gone = weakref.ref(before)
    with settled_heap(WaitTracker()):
        del before
        gc.collect()
        assert gone() is not None
    gc.collect()
    assert gone() is None


def test_what_comes_later_is_collected():
    with settled_heap(WaitTracker()):
        later = weakref.ref(Node())
        gc.collect()
        assert later() is None


def test_an_outer_block_decides():
    with settled_heap(WaitTracker()):
        left_out = gc.get_freeze_count()
        with settled_heap(WaitTracker()):
            assert 0 < gc.get_freeze_count() <= left_out, "other threads may free some"
        assert 0 < gc.get_freeze_count() <= left_out
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_what_survives_a_full_collection_is_visited_once():
    with settled_heap(WaitTracker()):
        kept = [Node() for _ in range(1000)]
        before = gc.get_freeze_count()
        gc.collect()
        assert gc.get_freeze_count() >= before + 1000
        gone = [weakref.ref(node) for node in kept]
        del kept
        gc.collect()
        assert gone[0]() is not None, "it is not visited again"
    gc.collect()
    assert not any(reference() for reference in gone)


@pytest.mark.slow
def test_garbage_among_frozen_objects_is_collected_when_they_have_doubled(monkeypatch):
    with settled_heap(WaitTracker()):
        kept = [Node() for _ in range(1000)]
        gc.collect()
        gone = [weakref.ref(node) for node in kept]
        del kept
        monkeypatch.setattr(heap, "_frozen_before", gc.get_freeze_count())
        collect_settled_heap()
        assert gone[0]() is not None
        monkeypatch.setattr(heap, "_frozen_before", gc.get_freeze_count() // 2 - 1)
        collect_settled_heap()
        assert not any(reference() for reference in gone)
        assert gc.get_freeze_count() > 0


def test_the_collectors_settings_come_back():
    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    with settled_heap(WaitTracker()):
        assert gc.get_threshold() != before
    assert (gc.get_threshold(), gc.callbacks) == (before, callbacks)


def test_objects_are_collected_before_they_are_many(monkeypatch):
    """Each turn replaces the objects of the turn before, so Python itself begins no collection."""
    monkeypatch.setattr(heap, "MAX_OBJECTS", 2000)
    tracker = WaitTracker()
    turns = [[Observation() for _ in range(4)] for _ in range(5000)]
    with settled_heap(tracker):
        counts = []
        for turn in range(5000):
            turns[turn] = [Observation() for _ in range(4)]
            with tracker.on(WaitKind.ENVIRONMENT, "episode", "step"):
                pass
            if turn % 10 == 0:
                counts.append(heap.count_objects())
        assert max(counts) < 3000
    assert tracker.listeners == []
