"""Which experts of a mixture each token was routed to, as engines tell it.

Routes of tokens are an array of small unsigned numbers, [tokens, layers x chosen]: layer after layer, and of each layer
the experts that a token went to. Engines tell all layers of the model, or only those that have experts.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.errors import LedgerError

Routes = npt.NDArray[np.unsignedinteger[Any]]
"""uint8 or uint16 [tokens, layers x chosen]."""


def small(experts: npt.NDArray[np.integer[Any]]) -> Routes:
    """The same numbers, none of which is negative, in as few bytes as they need."""
    return experts.astype(np.uint8 if experts.max(initial=0) <= np.iinfo(np.uint8).max else np.uint16)


def joined(first: Routes | None, second: Routes | None) -> Routes | None:
    """Routes of tokens and of those that follow them."""
    if first is None or second is None:
        return second if first is None else first
    if first.shape[1] != second.shape[1]:
        raise LedgerError(
            "experts of the same sequence are told for different numbers of layers",
            got=f"{second.shape[1]} numbers per token, after {first.shape[1]}",
            hint="all servers must serve the same model",
        )
    return np.concatenate([first, second])


def routes_record(start: int, routes: Routes) -> dict[str, Any]:
    """Routes of the tokens from an index on as plain JSON types."""
    return {
        "start": start,
        "shape": list(routes.shape),
        "type": routes.dtype.name,
        "data": base64.b64encode(zlib.compress(routes.tobytes(), level=1)).decode("ascii"),
    }


def routes_from_record(record: Mapping[str, Any]) -> Routes:
    """What `routes_record` was given."""
    data = zlib.decompress(base64.b64decode(record["data"]))
    found: Routes = np.frombuffer(data, dtype=record["type"]).reshape(record["shape"])
    return found
