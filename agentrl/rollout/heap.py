"""What is alive when episodes begin is alive when they end: the garbage collector need not look at it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled_heap() -> Iterator[None]:
    """Leave everything that is alive now out of garbage collections while the block runs.

    Libraries and models are hundreds of thousands of objects. A full collection looks at each of them and stops the
    event loop meanwhile, for long enough that servers run out of requests. Who has left something out before, an outer
    block or the program, has decided: nothing changes.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
