"""Means over the tokens of a step, added up micro-batch by micro-batch."""

from __future__ import annotations

from collections import defaultdict

import torch


class Tally:
    """Sums and counts by name."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, int] = defaultdict(int)

    def add(self, name: str, values: torch.Tensor) -> None:
        """Take in values of any shape."""
        self._sums[name] += float(values.detach().double().sum())
        self._counts[name] += values.numel()

    def merge(self, other: Tally) -> None:
        """Take in what another one has added up."""
        for name, total in other._sums.items():
            self._sums[name] += total
            self._counts[name] += other._counts[name]

    def means(self) -> dict[str, float]:
        """The mean of everything added under each name."""
        return {name: self._sums[name] / count for name, count in self._counts.items() if count}
