"""A maze: find the way to the exit."""

from __future__ import annotations

from collections import deque
from random import Random

from ..pictures import Colour, Field, Fields, Shape
from .bounds import within
from .environment import puzzle_spec
from .planner import Planner
from .rules import Illegal, Played, Puzzle

WALL, FLOOR, PLAYER, EXIT = "#", ".", "P", "E"
LOOKS: Fields = {
    WALL: Field(legend="a wall is dark grey", ground=Colour.DARK_GREY),
    FLOOR: Field(legend="a free cell is white", ground=Colour.WHITE),
    PLAYER: Field(legend="you are a blue disc", ground=Colour.WHITE, shapes=((Shape.DISC, Colour.BLUE),)),
    EXIT: Field(legend="the exit is a green square", ground=Colour.WHITE, shapes=((Shape.SQUARE, Colour.GREEN),)),
}


class Maze(Puzzle):
    """The rules of a walk through a maze without loops.

    Args:
        size: Number of rooms along a side.
    """

    name = "maze"
    fields = ("cells", "player")
    action_hint = "up, down, left or right, for example: left"
    max_steps = 100
    actions_per_turn = 5
    looks = LOOKS

    cells: list[str]
    player: int

    def __init__(self, *, size: int = 5) -> None:
        self.size = within("size of maze", size, 3, 12)
        self.width = 2 * size + 1
        self.moves = {"up": -self.width, "down": self.width, "left": -1, "right": 1}

    @property
    def task_type(self) -> str:
        """The size."""
        return f"{self.size}x{self.size}"

    def start(self, rng: Random) -> None:
        """Dig passages from room to room with backtracking; the player and the exit are far apart."""
        width = self.width
        self.cells = [WALL] * (width * width)
        rooms = [row * width + column for row in range(1, width, 2) for column in range(1, width, 2)]
        first = rng.choice(rooms)
        self.cells[first], path, ends = FLOOR, [first], dict.fromkeys([first], 0)
        while path:
            ways = [offset for offset in self.moves.values() if self._is_undug(path[-1], offset)]
            if not ways:
                path.pop()
                continue
            offset = rng.choice(ways)
            self.cells[path[-1] + offset] = self.cells[path[-1] + 2 * offset] = FLOOR
            path.append(path[-1] + 2 * offset)
            ends[path[-1]] = len(path)
        self.player, exit_ = first, max(ends, key=lambda room: ends[room])
        self.cells[self.player], self.cells[exit_] = PLAYER, EXIT

    def play(self, action: str) -> Played:
        """Take one step."""
        offset = self.moves.get(action)
        if offset is None:
            raise Illegal("That is not a move. Moves are up, down, left and right.")
        place = self.player + offset
        if self.cells[place] == WALL:
            raise Illegal("A wall is in the way.")
        won = self.cells[place] == EXIT
        self.cells[self.player], self.cells[place], self.player = FLOOR, PLAYER, place
        return Played(1.0, "You are at the exit.", over=True, won=True) if won else Played()

    def text(self) -> str:
        """Return the maze, row by row."""
        cells, width = self.cells, self.width
        return "\n".join(["".join(cells[row : row + width]) for row in range(0, width * width, width)])

    def actions(self) -> list[str]:
        """Return the moves that no wall blocks."""
        return [move for move, offset in self.moves.items() if self.cells[self.player + offset] != WALL]

    def expert(self) -> MazeExpert:
        """Return a policy that takes the shortest way."""
        return MazeExpert()

    def _is_undug(self, room: int, offset: int) -> bool:
        row, column = divmod(room, self.width)
        down, right = {-1: (0, -2), 1: (0, 2)}.get(offset, (2 if offset > 0 else -2, 0))
        inside = 0 < row + down < self.width and 0 < column + right < self.width
        return inside and self.cells[room + 2 * offset] == WALL


class MazeExpert(Planner):
    """Expert that takes the shortest way."""

    def plan(self, text: str) -> list[str]:
        """Return the moves of the shortest way."""
        rows = [line for line in text.splitlines() if line.startswith(WALL)]
        cells, width = "".join(rows), len(rows)
        moves = {"up": -width, "down": width, "left": -1, "right": 1}
        start = cells.find(PLAYER)
        came: dict[int, list[str]] = {start: []}
        queue = deque([start])
        while queue:
            place = queue.popleft()
            if cells[place] == EXIT:
                return came[place]
            for move, offset in moves.items():
                if cells[place + offset] != WALL and place + offset not in came:
                    came[place + offset] = [*came[place], move]
                    queue.append(place + offset)
        return []


SPEC = puzzle_spec(
    Maze,
    description=(
        "A maze without loops, fully visible. Options: size (3 to 12 rooms along a side), observation (text or image)."
    ),
    instructions=(
        "You walk through a maze to its exit. On the map, # is a wall, a dot is free, P is you, and E is the"
        " exit. Each move takes you one step up, down, left or right. You cannot walk through walls."
    ),
    reward_range=(0.0, 1.0),
    scores={"random": 0.0, "expert": 1.0},
)
make = SPEC.make
