"""Deduction in Minesweeper, and the expert that uses it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from .planner import Planner

HIDDEN = ".F"
_Clues = dict[frozenset[int], int]
"""Number of mines in sets of hidden places."""


@functools.cache
def neighbours(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """Return the neighbours of each place, up to eight; places are counted row by row."""
    return tuple(
        tuple(
            other_row * columns + other_column
            for other_row in range(max(row - 1, 0), min(row + 2, rows))
            for other_column in range(max(column - 1, 0), min(column + 2, columns))
            if (other_row, other_column) != (row, column)
        )
        for row in range(rows)
        for column in range(columns)
    )


def deduce(shown: Sequence[str], near: Sequence[Sequence[int]]) -> list[int]:
    """Return the hidden places that cannot be mines, sorted.

    They follow from single numbers, or from pairs in which the hidden places of one number include those of the other.

    Args:
        shown: Visible state of each place; flags count as hidden.
        near: The neighbours of each place.
    """
    clues = _clues(shown, near)
    safe, mines = _conclude(clues, {})
    if not safe:
        safe, _ = _conclude(_differences(clues), mines)
    return sorted(safe)


def _clues(shown: Sequence[str], near: Sequence[Sequence[int]]) -> _Clues:
    return {
        hidden: int(seen)
        for place, seen in enumerate(shown)
        if "1" <= seen <= "8" and (hidden := frozenset(other for other in near[place] if shown[other] in HIDDEN))
    }


def _conclude(clues: _Clues, mines: dict[int, bool]) -> tuple[set[int], dict[int, bool]]:
    """Return the safe places and the mines that follow from single clues, applied repeatedly."""
    safe: set[int] = set()
    known = dict(mines)
    while True:
        before = len(known)
        for places, count in clues.items():
            left = [place for place in places if place not in known]
            here = count - sum(known.get(place, False) for place in places)
            if left and here in (0, len(left)):
                known.update(dict.fromkeys(left, here > 0))
        if len(known) == before:
            safe = {place for place, is_mine in known.items() if not is_mine}
            return safe, known


def _differences(clues: _Clues) -> _Clues:
    """Return the clues, and the difference of each pair in which one set of places includes the other."""
    found = dict(clues)
    by_place: dict[int, list[frozenset[int]]] = {}
    for places in clues:
        for place in places:
            by_place.setdefault(place, []).append(places)
    for places, count in clues.items():
        for other in {other for place in places for other in by_place[place]}:
            if places < other:
                found[other - places] = clues[other] - count
    return found


class MinesweeperExpert(Planner):
    """Expert that reveals safe places, one at a time."""

    def plan(self, text: str) -> list[str]:
        """Return one safe action; none if only a guess is left."""
        lines = text.splitlines()
        first = next((number for number, line in enumerate(lines) if line.startswith("Mines:")), 0) + 2
        rows = [line.split()[1:] for line in lines[first:]]
        columns = len(rows[0]) if rows else 0
        safe = deduce([seen for row in rows for seen in row], neighbours(len(rows), columns))
        return ["reveal {} {}".format(*divmod(place, columns)) for place in safe[:1]]
