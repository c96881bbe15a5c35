"""Random numbers for foreign code that draws from Python's and NumPy's global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


class GlobalRandom:
    """Random stream that replaces the global generators while installed, and continues when installed again.

    The generators belong to the process, so an environment that uses this must not run in threads: see
    `Isolation.PROCESS`.

    Args:
        seed: Seed of the stream.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Restart the stream with a seed."""
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Use this stream in the global generators; restore their state afterwards."""
        python, numpy = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(python)
            np.random.set_state(numpy)
