"""2048: slide and merge equal tiles until one is large enough."""

from __future__ import annotations

import functools
from random import Random

from agentrl.errors import UsageError
from agentrl.message import Content

from .environment import puzzle_spec
from .planner import read
from .rules import ChancePuzzle, Illegal, Played

SIDE = 4
CELLS = SIDE * SIDE
LINES: dict[str, tuple[tuple[int, ...], ...]] = {
    "left": tuple(tuple(range(row * SIDE, row * SIDE + SIDE)) for row in range(SIDE)),
    "right": tuple(tuple(range(row * SIDE + SIDE - 1, row * SIDE - 1, -1)) for row in range(SIDE)),
    "up": tuple(tuple(range(column, CELLS, SIDE)) for column in range(SIDE)),
    "down": tuple(tuple(range(CELLS - SIDE + column, -1, -SIDE)) for column in range(SIDE)),
}
"""Cells of each line by move, from the edge to which tiles slide."""
TARGETS = (16, 32, 64, 128, 256, 512, 1024, 2048)
FOURS = 10
"""One of this many new tiles is a 4."""


class Game2048(ChancePuzzle):
    """The rules of 2048 on four by four cells.

    Merging pays the new tile's value, as a share of the total for making the target.

    Args:
        target: The tile that wins.
    """

    name = "game_2048"
    fields = ("board", "score", "dice")
    action_hint = "up, down, left or right, for example: left"
    max_steps = 300
    actions_per_turn = 5

    board: list[int]
    score: int

    def __init__(self, *, target: int = 256) -> None:
        if target not in TARGETS:
            raise UsageError("the target of 2048 is not valid", got=target, expected=", ".join(map(str, TARGETS)))
        self.target = target
        self.whole = target * (target.bit_length() - 2)
        """Total value of merging 2s into the target."""

    @property
    def task_type(self) -> str:
        """The target."""
        return f"to {self.target}"

    def start(self, rng: Random) -> None:
        """Put two tiles on an empty board."""
        self.dice, self.board, self.score = rng.getrandbits(48), [0] * CELLS, 0
        self._add_tile()
        self._add_tile()

    def play(self, action: str) -> Played:
        """Slide all tiles, and add a new one."""
        if action not in LINES:
            raise Illegal("That is not a move. Moves are up, down, left and right.")
        board, gained = slide(self.board, action)
        if board == self.board:
            raise Illegal(f"Nothing can slide {action}.")
        self.board, self.score = board, self.score + gained
        reward = gained / self.whole
        if gained >= self.target and self.target in board:
            return Played(reward, f"There is a tile of {self.target}.", over=True, won=True)
        self._add_tile()
        if 0 not in self.board and not self.actions():
            return Played(reward, "No move is left.", over=True)
        return Played(reward)

    def text(self) -> str:
        """Return the score and the board."""
        cells = [f"{tile:4}" if tile else "   ." for tile in self.board]
        return f"Score: {self.score}\n" + "\n".join(["".join(cells[row : row + SIDE]) for row in range(0, CELLS, SIDE)])

    def actions(self) -> list[str]:
        """Return the moves that slide something."""
        return [move for move in LINES if slide(self.board, move)[0] != self.board]

    def introduction(self) -> str:
        """Return the target, the score and the board."""
        return f"Make a tile of {self.target}.\n{self.text()}"

    def expert(self) -> Expert2048:
        """Return a policy that looks one move ahead and keeps large tiles in a corner."""
        return Expert2048()

    def _add_tile(self) -> None:
        empty = [cell for cell, tile in enumerate(self.board) if not tile]
        self.board[empty[self.roll(len(empty))]] = 2 if self.roll(FOURS) else 4


def slide(board: list[int], move: str) -> tuple[list[int], int]:
    """Return the board after a move, without a new tile, and the gain of the move."""
    after, gained = [0] * CELLS, 0
    for line in LINES[move]:
        a, b, c, d = line
        tiles, gain = merge((board[a], board[b], board[c], board[d]))
        after[a], after[b], after[c], after[d] = tiles
        gained += gain
    return after, gained


@functools.cache
def merge(line: tuple[int, int, int, int]) -> tuple[tuple[int, ...], int]:
    """Slide a line's tiles to its front; return it with the sum of the merged tiles.

    >>> merge((2, 0, 2, 4))
    ((4, 4, 0, 0), 4)
    """
    tiles: list[int] = []
    gained, may_merge = 0, False
    for tile in filter(None, line):
        if may_merge and tiles[-1] == tile:
            tiles[-1] += tile
            gained, may_merge = gained + 2 * tile, False
        else:
            tiles.append(tile)
            may_merge = True
    return (*tiles, *[0] * (SIDE - len(tiles))), gained


SNAKE = tuple(3.0**weight for weight in (15, 14, 13, 12, 8, 9, 10, 11, 7, 6, 5, 4, 0, 1, 2, 3))
"""Weights of the cells: large tiles belong on a snake-like path from a corner."""
EMPTY_BONUS = 50 * 3.0**8
"""Value of an empty cell."""


class Expert2048:
    """Expert that takes the move whose best next move gives the board with the highest weighted value."""

    def act(self, observation: Content) -> str:
        """Return a move.

        Raises:
            UsageError: nothing can slide.
        """
        cells = " ".join(read(observation).splitlines()[-SIDE:]).split()
        board = [0 if cell == "." else int(cell) for cell in cells]
        promises = {move: _promise(after) for move in LINES if (after := slide(board, move)[0]) != board}
        if not promises:
            raise UsageError("no move is left", got=repr(observation))
        return max(promises, key=lambda move: promises[move])


def _promise(board: list[int]) -> float:
    following = [slide(board, move)[0] for move in LINES]
    return max(_value(after) for after in following) if board.count(0) else -1.0


def _value(board: list[int]) -> float:
    placed = sum([tile * weight for tile, weight in zip(board, SNAKE, strict=True) if tile])
    return placed + EMPTY_BONUS * board.count(0)


SPEC = puzzle_spec(
    Game2048,
    description=(
        "2048 up to a tile of 256, in 300 moves: left, down, left, up, repeated without looking, wins three games in"
        " four, so compare with that. Option: target (16 to 2048)."
    ),
    instructions=(
        "You play 2048. A move slides all tiles up, down, left or right as far as they can go. Two equal tiles"
        " that meet become one tile of twice the value. After each move a new 2, or sometimes a 4, appears on an"
        " empty cell (a dot). You win when you make the tile that the first message names."
    ),
    reward_range=(0.0, 5.0),
    scores={"random": 0.09, "blind": 0.75, "expert": 0.97},
    version=1,
)
make = SPEC.make
