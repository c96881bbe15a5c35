"""Garbage collection during rollouts: long-lived objects are frozen, so that no collection blocks the event loop."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from agentrl.rollout.waits import Wait, WaitTracker

FULL_COLLECTION = 2
"""Number of collections of the middle generation that trigger a full one: the third value of `gc.set_threshold`."""
CHECKED_WAITS = 256
"""Number of completed waits (environment steps, engine requests) between two counts of the unfrozen objects."""
MAX_OBJECTS = 10_000
"""Number of unfrozen objects above which a full collection is triggered; it takes about 10 ms."""
_frozen_before = 0
"""Number of frozen objects after the last collection that included them."""


@contextmanager
def settled_heap(waits: WaitTracker) -> Iterator[None]:
    """Freeze long-lived objects in this block, so that garbage collections do not traverse them.

    Libraries, models and thousands of episodes make up hundreds of thousands of objects. A full collection traverses
    all of them and blocks the event loop so long that inference servers run out of requests. Therefore this block
    freezes (`gc.freeze`) the objects that exist at its start, and those that survive each later full collection.

    Python triggers a collection by the number of allocations minus deallocations, which hardly grows while each turn of
    an episode replaces the objects of the turn before. When it does trigger, there is too much to traverse. This block
    therefore also counts the unfrozen objects at regular intervals. `collect_settled_heap` collects the garbage among
    frozen objects. Nested blocks have no effect.

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
    gc.set_threshold(young, middle, FULL_COLLECTION)  # survivors are frozen, so frequent collections are cheap
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        waits.listeners.remove(watch)
        gc.callbacks.remove(_freeze_survivors)
        gc.unfreeze()


def collect_settled_heap() -> None:
    """Collect the garbage among the frozen objects if their number has doubled since the last call that did so."""
    if gc.get_freeze_count() > 2 * _frozen_before:
        gc.unfreeze()
        _collect_and_freeze()


class _ObjectLimit:
    """Wait listener that triggers a full collection when there are more than `MAX_OBJECTS` unfrozen objects."""

    def __init__(self) -> None:
        self._waits = 0

    def __call__(self, wait: Wait) -> None:
        """Count a completed wait; check the number of objects at every `CHECKED_WAITS`-th."""
        self._waits += 1
        if self._waits % CHECKED_WAITS == 0 and count_objects() > MAX_OBJECTS:
            gc.collect()


def count_objects() -> int:
    """Count the unfrozen objects; takes about 10 ns per object."""
    return sum(len(gc.get_objects(generation)) for generation in range(3))


def _collect_and_freeze() -> None:
    global _frozen_before
    gc.collect()
    gc.freeze()
    _frozen_before = gc.get_freeze_count()


def _freeze_survivors(phase: str, details: Mapping[str, int]) -> None:
    if phase == "stop" and details["generation"] == 2:
        gc.freeze()
