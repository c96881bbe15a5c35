"""Which of a step's sequences are computed in which lane (`agentrl.lanes`)."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.config.engines import FEWEST_PER_LANE
from agentrl.serving.local.step import Piece

TOKEN_COST = 24
"""Cached tokens whose attention costs as much as taking one new token through the model, for small models."""


def split_pieces(pieces: Sequence[Piece], lanes: int) -> list[list[Piece]]:
    """Neighbouring pieces in as many parts as are worth it, of about the same cost."""
    count = max(1, min(lanes, len(pieces) // FEWEST_PER_LANE))
    if count == 1:
        return [list(pieces)]
    ordered = sorted(pieces, key=lambda piece: (piece.row.shelf.capacity, piece.row.index))
    costs = [piece.count * TOKEN_COST + piece.end for piece in ordered]
    share, spent = sum(costs) / count, 0.0
    parts: list[list[Piece]] = [[] for _ in range(count)]
    for piece, cost in zip(ordered, costs, strict=True):
        parts[min(int((spent + cost / 2) / share), count - 1)].append(piece)
        spent += cost
    return [part for part in parts if part]
