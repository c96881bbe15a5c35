"""Routed experts of the tokens of a mixture-of-experts model, as engines report them and the ledger stores them."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.errors import LedgerError

RoutedExperts = npt.NDArray[np.unsignedinteger[Any]]
"""Indices of experts: uint8 or uint16 [tokens, layers x chosen]."""


def small(experts: npt.NDArray[np.integer[Any]]) -> RoutedExperts:
    """Convert non-negative indices to the smallest sufficient integer type."""
    return experts.astype(np.uint8 if experts.max(initial=0) <= np.iinfo(np.uint8).max else np.uint16)


def concatenate(first: RoutedExperts | None, second: RoutedExperts | None) -> RoutedExperts | None:
    """Concatenate the routed experts of consecutive tokens."""
    if first is None or second is None:
        return second if first is None else first
    if first.shape[1] != second.shape[1]:
        raise LedgerError(
            "routed experts of one sequence have different numbers of layers",
            got=f"{second.shape[1]} numbers per token, after {first.shape[1]}",
            hint="all servers must serve the same model",
        )
    return np.concatenate([first, second])


class SequenceRoutes:
    """Routed experts of a sequence's first tokens, as reported by engines; the length is the number of these tokens.

    A fork uses the routed experts of the tokens that it shares with its parent until it has its own:

    >>> routes = SequenceRoutes()
    >>> routes.append(np.array([[0, 3], [1, 2]], dtype=np.uint8), computed=4)      # of 5 tokens
    >>> fork = SequenceRoutes(routes, shared=1)
    >>> len(routes), len(fork), fork.experts.tolist()
    (2, 1, [[0, 3]])
    """

    __slots__ = ("_parent", "_parts", "_shared", "_start")

    def __init__(self, parent: SequenceRoutes | None = None, shared: int = 0) -> None:
        self._parent, self._shared = parent, shared
        self._parts: list[RoutedExperts] = []
        self._start = 0

    def __len__(self) -> int:
        if self._parts:
            return self._start + sum(map(len, self._parts))
        return 0 if self._parent is None else min(len(self._parent), self._shared)

    @property
    def experts(self) -> RoutedExperts | None:
        """Experts of these tokens: [tokens, layers x chosen]; ``None`` if there are none."""
        found = None
        if self._parent is not None and (before := self._parent.experts) is not None:
            found = before[: self._start if self._parts else self._shared]
        for part in self._parts:
            found = concatenate(found, part)
        return found

    def append(self, experts: RoutedExperts, *, computed: int) -> None:
        """Append the experts of the next tokens: [tokens, layers x chosen].

        Args:
            experts: Experts of the tokens from index ``len(routes)`` on.
            computed: Number of tokens that the engine has computed: all tokens of the sequence but the last.

        Raises:
            LedgerError: the engine has not computed some of the tokens.
        """
        start = len(self)
        if experts.ndim != 2 or start + len(experts) > computed:
            raise LedgerError(
                "experts reported for tokens not yet computed",
                got=f"shape {experts.shape}, from token {start} on",
                expected=f"at most {computed - start} tokens",
            )
        if len(experts):
            self._append(start, experts)

    def _append(self, start: int, experts: RoutedExperts) -> None:
        self._start = self._start if self._parts else start
        self._parts.append(experts)

    def records(self, start: int) -> list[dict[str, Any]]:
        """Return the parts with tokens after index `start` as plain JSON types.

        Each part ends at the second-to-last token at its time, and so after all earlier parts.
        """
        found, first = [], self._start
        for part in self._parts:
            if first + len(part) >= start:
                found.append(routed_experts_record(first, part))
            first += len(part)
        return found

    def load(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append parts from `records`, up to the first part whose predecessors are missing."""
        for record in records:
            if record["start"] > len(self):
                break
            self._append(record["start"], routed_experts_from_record(record))


def routed_experts_record(start: int, routed_experts: RoutedExperts) -> dict[str, Any]:
    """Return the routed experts of tokens from an index on as plain JSON types."""
    return {
        "start": start,
        "shape": list(routed_experts.shape),
        "type": routed_experts.dtype.name,
        "data": base64.b64encode(zlib.compress(routed_experts.tobytes(), level=1)).decode("ascii"),
    }


def routed_experts_from_record(record: Mapping[str, Any]) -> RoutedExperts:
    """Restore routed experts from `routed_experts_record`."""
    data = zlib.decompress(base64.b64decode(record["data"]))
    found: RoutedExperts = np.frombuffer(data, dtype=record["type"]).reshape(record["shape"])
    return found
