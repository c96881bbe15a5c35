"""The 15-puzzle: slide tiles into the gap until they are in order."""

from __future__ import annotations

import heapq
import re
from random import Random

from agentrl.errors import UsageError

from .bounds import within
from .environment import puzzle_spec
from .planner import Planner
from .rules import Illegal, Played, Puzzle

GAP = "__"
MOVES = ("up", "down", "left", "right")
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


class FifteenPuzzle(Puzzle):
    """The rules of the 15-puzzle. It starts with random moves from the end, none of which undoes the one before.

    Args:
        size: Number of rows and columns.
        shuffle: Number of random moves.
    """

    name = "fifteen_puzzle"
    fields = ("tiles", "gap")
    action_hint = "where a tile slides to, which is up, down, left or right, for example: up"
    max_steps = 100
    actions_per_turn = 5

    tiles: list[int]
    """Tiles row by row; 0 is the gap."""
    gap: int

    def __init__(self, *, size: int = 4, shuffle: int = 16) -> None:
        self.size = within("size of fifteen_puzzle", size, 3, 5)
        self.shuffle = within("shuffle of fifteen_puzzle", shuffle, 4, 100)
        self.goal = goal_of(size)
        self.sources = sources_of(size)

    @property
    def task_type(self) -> str:
        """Size and number of random moves."""
        return f"{self.size}x{self.size}, {self.shuffle} moves"

    def start(self, rng: Random) -> None:
        """Shuffle with legal moves, so that the puzzle can be solved."""
        self.tiles, self.gap = list(self.goal), len(self.goal) - 1
        while self.tiles == self.goal:
            last = ""
            for _ in range(self.shuffle):
                last = rng.choice([move for move in self.actions() if move != OPPOSITE.get(last)])
                self._slide(self.sources[self.gap][last])

    def play(self, action: str) -> Played:
        """Slide a tile next to the gap in a direction."""
        if action not in MOVES:
            raise Illegal("That is not a move. Moves are up, down, left and right.")
        source = self.sources[self.gap].get(action)
        if source is None:
            raise Illegal(f"No tile can slide {action}.")
        self._slide(source)
        if self.tiles == self.goal:
            return Played(1.0, "All tiles are in order.", over=True, won=True)
        return Played()

    def progress(self) -> float:
        """Return the share of the places with the right tile or gap."""
        return sum(one == other for one, other in zip(self.tiles, self.goal, strict=True)) / len(self.goal)

    def text(self) -> str:
        """Return the tiles, row by row."""
        cells = [f"{tile:2}" if tile else GAP for tile in self.tiles]
        return "\n".join([" ".join(cells[row : row + self.size]) for row in range(0, len(cells), self.size)])

    def actions(self) -> list[str]:
        """Return the possible moves."""
        return list(self.sources[self.gap])

    def expert(self) -> FifteenPuzzleExpert:
        """Return a policy that searches for a solution."""
        return FifteenPuzzleExpert()

    def _slide(self, source: int) -> None:
        self.tiles[self.gap], self.tiles[source], self.gap = self.tiles[source], 0, source


def goal_of(size: int) -> list[int]:
    """Return the tiles in order, with the gap at the end."""
    return [*range(1, size * size), 0]


def sources_of(size: int) -> list[dict[str, int]]:
    """Return, for each place of the gap, the place of the tile that slides into it in each direction."""
    found = []
    for place in range(size * size):
        row, column = divmod(place, size)
        steps = {"up": (row + 1, column), "down": (row - 1, column)}
        steps |= {"left": (row, column + 1), "right": (row, column - 1)}
        inside = {move: to for move, to in steps.items() if 0 <= to[0] < size and 0 <= to[1] < size}
        found.append({move: to[0] * size + to[1] for move, to in inside.items()})
    return found


class FifteenPuzzleExpert(Planner):
    """Expert that uses A* with a weighted heuristic (Pohl, 1970): fast, but not always shortest."""

    GREED = 3

    def plan(self, text: str) -> list[str]:
        """Return all moves.

        Raises:
            UsageError: the text shows no valid tiles.
        """
        rows = [line.split() for line in text.splitlines() if re.fullmatch(r"[ \d_]+", line)]
        tiles = tuple(0 if cell == GAP else int(cell) for row in rows for cell in row)
        size = len(rows)
        goal, sources = tuple(goal_of(size)), sources_of(size)
        if sorted(tiles) != sorted(goal):
            raise UsageError("the text shows no 15-puzzle", got=repr(text))
        came: dict[tuple[int, ...], tuple[tuple[int, ...], str] | None] = {tiles: None}
        queue = [(0, 0, 0, _distance(tiles, size), tiles)]
        while queue:
            _, _, moves, distance, here = heapq.heappop(queue)
            if here == goal:
                break
            gap = here.index(0)
            for move, source in sources[gap].items():
                after = list(here)
                after[gap], after[source] = after[source], 0
                there = tuple(after)
                if there not in came:
                    came[there] = (here, move)
                    left = distance + _way(here[source], gap, size) - _way(here[source], source, size)
                    heapq.heappush(queue, (moves + 1 + self.GREED * left, -len(came), moves + 1, left, there))
        found = []
        while (step := came[here]) is not None:
            here = step[0]
            found.append(step[1])
        return found[::-1]


def _distance(tiles: tuple[int, ...], size: int) -> int:
    return sum(_way(tile, place, size) for place, tile in enumerate(tiles) if tile)


def _way(tile: int, place: int, size: int) -> int:
    goal = tile - 1
    return abs(goal // size - place // size) + abs(goal % size - place % size)


SPEC = puzzle_spec(
    FifteenPuzzle,
    description="The 15-puzzle, 16 random moves from its end. Options: size (3 to 5), shuffle (4 to 100 moves).",
    instructions=(
        "You play the 15-puzzle. Put the tiles in order, row by row, starting with 1 in the upper left corner."
        " The gap (__) belongs in the lower right corner. A move slides a tile next to the gap into the gap: up"
        " moves the tile below the gap up, down moves the tile above the gap down, left moves the tile to the"
        " right of the gap left, and right moves the tile to the left of the gap right."
    ),
    reward_range=(0.0, 1.0),
    scores={"random": 0.0, "expert": 1.0},
)
make = SPEC.make
