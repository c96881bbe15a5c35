"""Garbage collection while thousands of episodes run: it visits each object once, and few objects at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from agentrl.rollout.waits import Wait, WaitTracker

FULL_COLLECTION = 2
"""Number of collections of the middle generation after which all objects that are not excluded are collected."""
CHECKED_WAITS = 64
"""Number of ended waits, such as steps of environments, after which the objects that are not excluded are counted."""
MAX_OBJECTS = 10_000
"""Number of these objects that starts a collection, which takes about 10 ms."""
_frozen_before = 0
"""Number of excluded objects after the last collection of all objects."""


@contextmanager
def settled_heap(waits: WaitTracker) -> Iterator[None]:
    """Exclude all objects that exist now, and later those that survive a full collection, from garbage collections.

    Libraries and models consist of hundreds of thousands of objects, and so do thousands of episodes. A full collection
    visits each of them and stops the event loop for so long that inference servers run out of requests. Python starts a
    collection when more objects were made than freed. That is rare while each turn of an episode replaces the objects
    of the previous turn, and such a late collection visits too many objects at once. Therefore the objects that are not
    excluded are also counted from time to time. `collect_settled_heap` collects the garbage among the excluded objects.
    Nested blocks have no effect.

    Args:
        waits: Waits of the episodes.
    """
    if gc.get_freeze_count():
        yield
        return
    young, middle, old = gc.get_threshold()
    _collect_and_freeze()
    watch = _ObjectLimit()
    gc.callbacks.append(_freeze_survivors)
    waits.listeners.append(watch)
    gc.set_threshold(young, middle, FULL_COLLECTION)  # each object is visited once, so fewer at a time cost no more
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        waits.listeners.remove(watch)
        gc.callbacks.remove(_freeze_survivors)
        gc.unfreeze()


def collect_settled_heap() -> None:
    """Collect the garbage among the objects that `settled_heap` excludes, if they have doubled since the last time."""
    if gc.get_freeze_count() > 2 * _frozen_before:
        gc.unfreeze()
        _collect_and_freeze()


class _ObjectLimit:
    """Listener that starts a full collection, whose survivors are excluded, once there are many objects."""

    def __init__(self) -> None:
        self._waits = 0

    def __call__(self, wait: Wait) -> None:
        """Note that a wait has ended."""
        self._waits += 1
        if self._waits % CHECKED_WAITS == 0 and count_objects() > MAX_OBJECTS:
            gc.collect()


def count_objects() -> int:
    """Return the number of objects that are not excluded; takes about 10 ns for each."""
    return sum(len(gc.get_objects(generation)) for generation in range(3))


def _collect_and_freeze() -> None:
    global _frozen_before
    gc.collect()
    gc.freeze()
    _frozen_before = gc.get_freeze_count()


def _freeze_survivors(phase: str, details: Mapping[str, int]) -> None:
    if phase == "stop" and details["generation"] == 2:
        gc.freeze()
