"""Sudoku: fill a grid so that no row, column or box contains a digit twice."""

from __future__ import annotations

import functools
import re
from random import Random

from agentrl.errors import UsageError

from .bounds import within
from .environment import puzzle_spec
from .planner import Planner
from .rules import Illegal, Played, Puzzle

_ACTION = re.compile(r"(\d) (\d) (\d)", re.ASCII)
EMPTY = 0
SHOWN = ".123456789"
BOX_SIDES = {4: 2, 9: 3}


@functools.cache
def peers(size: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each cell, the other cells of its row, column and box."""
    side, cells = BOX_SIDES[size], range(size * size)

    def meets(one: int, other: int) -> bool:
        (row, column), (row2, column2) = divmod(one, size), divmod(other, size)
        return row == row2 or column == column2 or (row // side, column // side) == (row2 // side, column2 // side)

    return tuple(tuple(other for other in cells if other != cell and meets(cell, other)) for cell in cells)


def picture(size: int) -> str:
    """Return the frame of the grid, with a placeholder for each digit."""
    side = BOX_SIDES[size]
    line = " | ".join([" ".join(["{}"] * side)] * side)
    return "\n\n".join(["\n".join([line] * side)] * side)


class Sudoku(Puzzle):
    """The rules of Sudoku. Every grid can be solved step by step: some empty cell always allows only one digit.

    Args:
        size: 9, or 4 for a small grid with boxes of two by two.
        empty: Number of empty cells at the start; 31 by default (8 for the small grid).
    """

    name = "sudoku"
    fields = ("grid", "solution", "given")
    action_hint = "row, column and digit, for example: 1 3 7"
    max_steps = 100
    actions_per_turn = 5

    grid: list[int]
    solution: list[int]
    given: list[int]
    """The grid at the start."""

    def __init__(self, *, size: int = 9, empty: int | None = None) -> None:
        if size not in BOX_SIDES:
            raise UsageError("size of sudoku is not valid", got=size, expected="9 or 4")
        self.size, self.side = size, BOX_SIDES[size]
        usual = 31 if size == 9 else 8
        self.empty = within("empty of sudoku", usual if empty is None else empty, 1, size * size // 2)
        self.peers, self.picture = peers(size), picture(size)

    @property
    def task_type(self) -> str:
        """Number of empty cells, in words."""
        return f"{self.empty} empty"

    def start(self, rng: Random) -> None:
        """Empty cells of a full grid, one by one, if each allows only one digit."""
        while True:
            self.solution = self._full_grid(rng)
            self.grid = self.solution.copy()
            for cell in rng.sample(range(len(self.grid)), len(self.grid)):
                if self.grid.count(EMPTY) == self.empty:
                    break
                self.grid[cell] = EMPTY
                if len(candidates(self.grid, cell, self.peers)) > 1:
                    self.grid[cell] = self.solution[cell]
            if self.grid.count(EMPTY) == self.empty:
                break
        self.given = self.grid.copy()

    def play(self, action: str) -> Played:
        """Write a digit, or 0 to empty a cell; only the reward, not the text, shows if the digit is right."""
        match = _ACTION.fullmatch(action)
        row, column, digit = (int(number) for number in match.groups()) if match else (0, 0, 0)
        if not (1 <= row <= self.size and 1 <= column <= self.size and digit <= self.size):
            raise Illegal(f"Answer with a row, a column and a digit, 1 to {self.size} each; digit 0 empties a cell.")
        cell = (row - 1) * self.size + column - 1
        if self.given[cell]:
            raise Illegal("This cell was given.")
        if digit == self.grid[cell]:
            raise Illegal("This cell already has this digit." if digit else "This cell is already empty.")
        if digit and digit in [self.grid[other] for other in self.peers[cell]]:
            raise Illegal(f"There is a {digit} in this row, column or box.")
        right = self.solution[cell]
        reward = ((digit == right) - (self.grid[cell] == right)) / self.empty
        self.grid[cell] = digit
        if EMPTY in self.grid:
            return Played(reward)
        return Played(reward, "The grid is complete and correct.", over=True, won=True)

    def text(self) -> str:
        """Return the grid, with its boxes separated."""
        return self.picture.format(*[SHOWN[digit] for digit in self.grid])

    def actions(self) -> list[str]:
        """Return the possible digits of the empty cells; if there are none, the actions that empty a cell."""
        return [
            f"{cell // self.size + 1} {cell % self.size + 1} {digit}"
            for cell, present in enumerate(self.grid)
            if present == EMPTY
            for digit in sorted(candidates(self.grid, cell, self.peers))
        ] or [
            f"{cell // self.size + 1} {cell % self.size + 1} 0"
            for cell, present in enumerate(self.grid)
            if present and not self.given[cell]
        ]

    def expert(self) -> SudokuExpert:
        """Return a policy that fills cells that allow only one digit."""
        return SudokuExpert()

    def _full_grid(self, rng: Random) -> list[int]:
        """Return a valid pattern with its rows, columns and digits shuffled so that it stays valid."""
        size, side = self.size, self.side
        digits = rng.sample(range(1, size + 1), size)
        rows, columns = (
            [band * side + line for band in rng.sample(range(side), side) for line in rng.sample(range(side), side)]
            for _ in range(2)
        )
        return [digits[(side * (row % side) + row // side + column) % size] for row in rows for column in columns]


def candidates(grid: list[int], cell: int, near: tuple[tuple[int, ...], ...]) -> set[int]:
    """Return the digits that the row, column and box of a cell allow."""
    size = 9 if len(grid) == 81 else 4
    return set(range(1, size + 1)).difference([grid[other] for other in near[cell]])


class SudokuExpert(Planner):
    """Expert that fills the cells that allow only one digit, one after the other."""

    def plan(self, text: str) -> list[str]:
        """Return the actions for all digits that follow."""
        rows = [line.replace("|", " ").split() for line in text.splitlines()[-11:] if re.match(r"[\d.] [\d.]", line)]
        grid = [0 if cell == "." else int(cell) for row in rows for cell in row]
        actions: list[str] = []
        size, near = len(rows), peers(len(rows))
        while True:
            sure = [cell for cell, digit in enumerate(grid) if not digit and len(candidates(grid, cell, near)) == 1]
            if not sure:
                return actions
            (grid[sure[0]],) = candidates(grid, sure[0], near)
            actions.append(f"{sure[0] // size + 1} {sure[0] % size + 1} {grid[sure[0]]}")


SPEC = puzzle_spec(
    Sudoku,
    description=(
        "Sudoku with 31 empty cells, each of which follows from the others in some order. Options: size (9 or 4), empty"
        " (up to half of the cells)."
    ),
    instructions=(
        "You solve a Sudoku. Fill the empty cells (dots) so that no row, no column and no box has the same digit"
        " twice. An action is three numbers: the row, the column and the digit. Rows and columns are numbered from"
        " 1, so 1 3 7 writes a 7 in row 1, column 3. The digit 0 empties a cell that you filled."
    ),
    reward_range=(0.0, 1.001),
    scores={"random": 0.28, "expert": 1.0},
)
make = SPEC.make
