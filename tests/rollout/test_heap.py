"""The heap that the garbage collector leaves alone while episodes run."""

import gc
import weakref
from gc import get_freeze_count

import pytest

from agentrl.rollout.waits import settled_heap


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


def test_what_was_alive_before_is_left_alone_until_the_end():
    before = Node()
    gone = weakref.ref(before)
    with settled_heap():
        del before
        gc.collect()
        assert gone() is not None
    gc.collect()
    assert gone() is None


def test_what_comes_later_is_collected():
    with settled_heap():
        later = weakref.ref(Node())
        gc.collect()
        assert later() is None


def test_an_outer_block_decides():
    with settled_heap():
        left_out = gc.get_freeze_count()
        with settled_heap():
            assert 0 < gc.get_freeze_count() <= left_out, "other threads may free some"
        assert 0 < gc.get_freeze_count() <= left_out
    assert gc.get_freeze_count() == 0
