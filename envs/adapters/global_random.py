"""A stream of random numbers for code of others that draws from Python's and NumPy's global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


class GlobalRandom:
    """Stands in for the global generators while it is installed, and goes on where it was when it is installed again.

    The generators belong to the process, so what uses this must not run in threads: see `Isolation.PROCESS`.

    Args:
        seed: Of the stream.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Start the stream of a seed."""
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The global generators give this stream; afterwards they are as they were."""
        python, numpy = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(python)
            np.random.set_state(numpy)
