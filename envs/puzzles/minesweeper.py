"""Minesweeper: reveal all cells without a mine."""

from __future__ import annotations

import re
from random import Random

from .bounds import within
from .environment import puzzle_spec
from .minesweeper_solver import MinesweeperExpert, deduce, neighbours
from .rules import Illegal, Played, Puzzle

HIDDEN, FLAG, MINE = ".", "F", "*"
_ACTION = re.compile(r"(reveal|flag) (\d{1,2}) (\d{1,2})", re.ASCII)
MILESTONE_REWARD = 0.1
"""Reward of an action that reveals something, as in GEM."""


class Minesweeper(Puzzle):
    """The rules of Minesweeper. An opening is shown at the start, and no cell ever has to be guessed.

    Args:
        rows: Number of rows.
        columns: Number of columns.
        mines: Number of mines; at most a fifth of the cells, so that boards without guessing are found quickly.
    """

    name = "minesweeper"
    fields = ("counts", "shown")
    action_hint = "reveal or flag, then row and column, for example: reveal 3 2"
    max_steps = 100
    actions_per_turn = 5

    counts: list[int]
    """Number of mines next to each place; -1 for a mine."""
    shown: list[str]

    def __init__(self, *, rows: int = 8, columns: int = 8, mines: int = 10) -> None:
        self.rows = within("rows of minesweeper", rows, 4, 12)
        self.columns = within("columns of minesweeper", columns, 4, 12)
        self.mines = within("mines of minesweeper", mines, 1, rows * columns // 5)
        self.near = neighbours(rows, columns)
        self.heading = f"Mines: {mines}\n  {' '.join([f'{column:2}' for column in range(columns)])}\n"

    @property
    def task_type(self) -> str:
        """Size and number of mines."""
        return f"{self.rows}x{self.columns} with {self.mines}"

    def start(self, rng: Random) -> None:
        """Draw mines around an opening until deduction reveals everything."""
        places = range(self.rows * self.columns)
        while True:
            opening = rng.choice(places)
            free = {opening, *self.near[opening]}
            mines = set(rng.sample([place for place in places if place not in free], self.mines))
            self.counts = [-1 if place in mines else len(mines.intersection(self.near[place])) for place in places]
            self.shown = [HIDDEN] * len(places)
            self._reveal(opening)
            if not self._is_clear() and self._needs_no_guess():
                break

    def play(self, action: str) -> Played:
        """Reveal a place (and its surroundings as long as no mine is near), or set or remove a flag."""
        match = _ACTION.fullmatch(action)
        if match is None:
            raise Illegal("Answer with reveal or flag, a row and a column, for example: reveal 3 2")
        row, column = int(match[2]), int(match[3])
        if row >= self.rows or column >= self.columns:
            raise Illegal(f"There is no cell in row {row}, column {column}.")
        place = row * self.columns + column
        shown = self.shown[place]
        if match[1] == "flag":
            if shown not in (HIDDEN, FLAG):
                raise Illegal("This cell is already revealed.")
            self.shown[place] = HIDDEN if shown == FLAG else FLAG
            return Played()
        if shown != HIDDEN:
            raise Illegal("There is a flag on this cell." if shown == FLAG else "This cell is already revealed.")
        if self.counts[place] < 0:
            self.shown[place] = MINE
            return Played(0.0, "That was a mine.", over=True)
        self._reveal(place)
        if self._is_clear():
            return Played(1.0, "All cells without a mine are revealed.", over=True, won=True)
        return Played(MILESTONE_REWARD)

    def progress(self) -> float:
        """Return the share of the mine-free places that are revealed."""
        hidden = self.shown.count(HIDDEN) + self.shown.count(FLAG)
        return (len(self.shown) - hidden) / (len(self.shown) - self.mines)

    def text(self) -> str:
        """Return the board, with numbers of rows and columns."""
        width, shown = self.columns, self.shown
        return self.heading + "\n".join(
            [f"{row:2} {'  '.join(shown[row * width : row * width + width])}" for row in range(self.rows)]
        )

    def actions(self) -> list[str]:
        """Return an action to reveal each hidden place, and to flag each place that is not revealed."""
        places = [(*divmod(place, self.columns), shown) for place, shown in enumerate(self.shown)]
        revealing = [f"reveal {row} {column}" for row, column, shown in places if shown == HIDDEN]
        return revealing + [f"flag {row} {column}" for row, column, shown in places if shown in (HIDDEN, FLAG)]

    def expert(self) -> MinesweeperExpert:
        """Return a policy that reveals places that cannot be mines."""
        return MinesweeperExpert()

    def _reveal(self, place: int) -> None:
        queue = [place]
        while queue:
            place = queue.pop()
            if self.shown[place] == HIDDEN:
                self.shown[place] = str(self.counts[place])
                if not self.counts[place]:
                    queue += self.near[place]

    def _is_clear(self) -> bool:
        return self.shown.count(HIDDEN) + self.shown.count(FLAG) == self.mines

    def _needs_no_guess(self) -> bool:
        """Return True if the shown places suffice to deduce all others; they are left unchanged."""
        before = self.shown.copy()
        while not self._is_clear():
            safe = deduce(self.shown, self.near)
            if not safe:
                break
            for place in safe:
                self._reveal(place)
        is_clear, self.shown = self._is_clear(), before
        return is_clear


SPEC = puzzle_spec(
    Minesweeper,
    description=(
        "Minesweeper that never needs a guess: 10 mines on 8 by 8 cells, an opening shown at the start. Options: rows,"
        " columns (4 to 12), mines (up to a fifth of the cells)."
    ),
    instructions=(
        "You play Minesweeper. Reveal every cell that has no mine. Rows and columns are numbered from 0. A dot is"
        " a hidden cell, a number is how many of the neighboring cells have a mine, and F is a cell that you"
        " flagged. To reveal a cell, write reveal, its row and its column: reveal 3 2. To flag a cell, write flag,"
        " its row and its column: flag 3 2. Flagging it again removes the flag. If you reveal a mine, you lose."
        " You never have to guess: the numbers always show at least one safe cell."
    ),
    reward_range=(0.0, 15.0),
    scores={"random": 0.0, "expert": 1.0},
)
make = SPEC.make
