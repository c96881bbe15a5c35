"""The Sokoban expert: a search guided by the distances of the boxes to the targets."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from agentrl.errors import UsageError

from .planner import Planner

GREED = 2
"""Weight of the estimated remaining cost: solutions may be longer than the shortest, but are found much sooner."""

_State = tuple[int, frozenset[int]]


class SokobanExpert(Planner):
    """Expert that reads the room and plays a solution."""

    def plan(self, text: str) -> list[str]:
        """Return moves that bring all boxes onto targets.

        Raises:
            UsageError: the room can no longer be solved.
        """
        return SokobanRoom(text).solve()


class SokobanRoom:
    """State of a room, read from its text."""

    def __init__(self, text: str) -> None:
        rows = [line.split() for line in text.splitlines() if line.startswith("#")]
        self.width = len(rows[0]) if rows else 0
        cells = [cell for row in rows for cell in row]
        self.floor = {place for place, cell in enumerate(cells) if cell != "#"}
        self.targets = {place for place, cell in enumerate(cells) if cell in "O√S"}
        self.boxes = frozenset(place for place, cell in enumerate(cells) if cell in "X√")
        self.player = next((place for place, cell in enumerate(cells) if cell in "PS"), -1)
        self.moves = {"up": -self.width, "down": self.width, "left": -1, "right": 1}
        self.distance = self._distances()

    def solve(self) -> list[str]:
        """Search with A* over single moves, with a weighted heuristic (Pohl, 1970)."""
        start: _State = (self.player, self.boxes)
        came: dict[_State, tuple[_State, str] | None] = {start: None}
        costs, order = {start: 0}, 0
        queue = [(self._estimate(self.boxes), order, start)]
        while queue:
            _, _, state = heapq.heappop(queue)
            if state[1] <= self.targets:
                return _way(came, state)
            for name, after in self._after(state):
                cost = costs[state] + 1
                if cost < costs.get(after, cost + 1):
                    costs[after], came[after], order = cost, (state, name), order + 1
                    heapq.heappush(queue, (cost + GREED * self._estimate(after[1]), order, after))
        raise UsageError("this room of Sokoban cannot be solved", got=f"{len(costs)} situations tried")

    def _after(self, state: _State) -> Iterator[tuple[str, _State]]:
        player, boxes = state
        for name, offset in self.moves.items():
            place, behind = player + offset, player + 2 * offset
            if place in boxes:
                if behind in self.distance and behind not in boxes:
                    yield name, (place, boxes - {place} | {behind})
            elif place in self.floor:
                yield name, (place, boxes)

    def _estimate(self, boxes: frozenset[int]) -> int:
        return sum(self.distance[box] for box in boxes)

    def _distances(self) -> dict[int, int]:
        """Return the number of pushes from each place to the nearest target, without places that cannot reach one."""
        distance, queue = dict.fromkeys(self.targets, 0), sorted(self.targets)
        for place in queue:
            for offset in self.moves.values():
                before = place - offset
                if before in self.floor and before - offset in self.floor and before not in distance:
                    distance[before] = distance[place] + 1
                    queue.append(before)
        return distance


def _way(came: dict[_State, tuple[_State, str] | None], state: _State) -> list[str]:
    names = []
    while (step := came[state]) is not None:
        state = step[0]
        names.append(step[1])
    return names[::-1]
