"""Experts of a mixture-of-experts model to which tokens were routed, in engines' reports and in the ledger."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.errors import LedgerError

RoutedExperts = npt.NDArray[np.unsignedinteger[Any]]
"""Indices of experts: uint8 or uint16 [tokens, layers x chosen]."""


def small(experts: npt.NDArray[np.integer[Any]]) -> RoutedExperts:
    """Convert non-negative indices to the smallest integer type that holds them."""
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
