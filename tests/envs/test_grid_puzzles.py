"""The rules of the puzzles on a grid: Sokoban, Minesweeper, 2048, Sudoku, the 15-puzzle, the maze, and Hanoi."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from agentrl.envs.puzzles.environment import PuzzleEnv
from agentrl.envs.puzzles.fifteen_puzzle import FifteenPuzzle
from agentrl.envs.puzzles.game_2048 import Game2048, merge, slide
from agentrl.envs.puzzles.hanoi import Hanoi, solve
from agentrl.envs.puzzles.maze import Maze
from agentrl.envs.puzzles.minesweeper import Minesweeper
from agentrl.envs.puzzles.minesweeper_solver import deduce, neighbours
from agentrl.envs.puzzles.rules import Puzzle
from agentrl.envs.puzzles.sokoban import Sokoban
from agentrl.envs.puzzles.sudoku import Sudoku, candidates, peers
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import UsageError


def started(rules: type[Puzzle], **options: Any) -> PuzzleEnv:
    env = PuzzleEnv(rules, **options)
    env.reset(seed=0)
    return env


def solves(env: PuzzleEnv, seed: int) -> bool:
    observation, _ = env.reset(seed=seed)
    expert = env.expert()
    while True:
        observation, _, terminated, truncated, info = env.step(expert.act(observation))
        if terminated or truncated:
            return bool(info["success"])


@pytest.mark.parametrize(
    ("rules", "options"),
    [
        (Sokoban, {"size": 5, "boxes": 2}),
        (Sokoban, {"size": 8, "boxes": 3}),
        (Minesweeper, {"rows": 5, "columns": 9, "mines": 6}),
        (Minesweeper, {"rows": 4, "columns": 4, "mines": 1}),
        (Game2048, {"target": 32}),
        (Sudoku, {"size": 4}),
        (Sudoku, {"empty": 40}),
        (Hanoi, {"disks": 6}),
        (FifteenPuzzle, {"size": 3, "shuffle": 40}),
        (FifteenPuzzle, {"size": 4, "shuffle": 40}),
        (Maze, {"size": 8, "max_steps": 200}),
    ],
)
def test_experts_solve_other_sizes(rules: type[Puzzle], options: dict[str, Any]) -> None:
    env = PuzzleEnv(rules, **options)
    assert all(solves(env, seed) for seed in range(4))


def test_options_out_of_range_are_rejected() -> None:
    for rules, options in (
        (Sokoban, {"size": 4}),
        (Sokoban, {"boxes": 5}),
        (Minesweeper, {"mines": 13}),
        (Game2048, {"target": 100}),
        (Sudoku, {"size": 6}),
        (Sudoku, {"empty": 41}),
        (Hanoi, {"disks": 7}),
        (FifteenPuzzle, {"size": 2}),
        (Maze, {"size": 13}),
    ):
        with pytest.raises(UsageError, match="expected"):
            PuzzleEnv(rules, **options)


SOKOBAN = "# # # # #\n# P X O #\n# _ _ _ #\n# _ # _ #\n# # # # #"


def sokoban(picture: str, **options: Any) -> PuzzleEnv:
    env = started(Sokoban, size=len(picture.splitlines()), **options)
    board = picture.split()
    env.game.load({"board": board, "player": next(i for i, cell in enumerate(board) if cell in "PS")})
    return env


def test_pushing_the_last_box_onto_its_target_pays_as_in_gym_sokoban() -> None:
    env = sokoban(SOKOBAN)
    observation, reward, terminated, _, info = env.step("right")
    assert observation == "All boxes are on targets.\n# # # # #\n# _ P √ #\n# _ _ _ #\n# _ # _ #\n# # # # #"
    assert (reward, terminated, info["success"]) == (pytest.approx(10.9), True, True)


def test_moving_a_box_off_its_target_costs_its_reward() -> None:
    env = sokoban("# # # # #\n# O X O #\n# P √ _ #\n# _ # _ #\n# # # # #", boxes=2)
    observation, reward, *_ = env.step("right")
    assert reward == pytest.approx(-1.1)
    assert "# _ S X #" in observation


def test_walls_and_boxes_stop_the_player() -> None:
    env = sokoban("# # # # #\n# P X X #\n# O O _ #\n# _ # _ #\n# # # # #", boxes=2)
    for move, note in (("right", "The box cannot be pushed there."), ("up", "A wall is in the way.")):
        observation, reward, _, _, info = env.step(move)
        assert observation.startswith(note)
        assert (reward, info["valid"]) == (-0.1, True)
    assert env.admissible_actions() == ["down"]
    assert env.step("down || left")[0].startswith("A wall is in the way.")


@given(seed=st.integers(0, 10_000), boxes=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_a_level_of_sokoban_is_as_ordered(seed: int, boxes: int) -> None:
    game = Sokoban(size=7, boxes=boxes)
    game.start(Random(seed))
    cells = game.text().split()
    assert cells.count("X") == boxes
    assert "√" not in cells
    assert cells.count("O") + cells.count("S") == boxes
    assert cells.count("P") + cells.count("S") == 1


def minesweeper(mines: set[int], rows: int = 4, columns: int = 4) -> PuzzleEnv:
    env = started(Minesweeper, rows=rows, columns=columns, mines=len(mines))
    near = neighbours(rows, columns)
    counts = [-1 if place in mines else len(mines.intersection(near[place])) for place in range(rows * columns)]
    env.game.load({"counts": counts, "shown": ["."] * (rows * columns)})
    return env


def test_revealing_spreads_where_no_mine_is_near() -> None:
    env = minesweeper({15, 3})
    observation, reward, terminated, _, _ = env.step("reveal 0 0")
    assert observation.splitlines() == [
        "Mines: 2",
        "   0  1  2  3",
        " 0 0  0  1  .",
        " 1 0  0  1  .",
        " 2 0  0  1  .",
        " 3 0  0  1  .",
    ]
    assert (reward, terminated) == (0.1, False)
    assert env.step("reveal 1 3")[1] == 0.1
    assert env.step("reveal 2 3")[1:3] == (1.0, True)


def test_mines_flags_and_what_is_revealed() -> None:
    env = minesweeper({15, 3})
    assert env.step("flag 3 3")[0].endswith(" 3 .  .  .  F")
    for action, note in (
        ("reveal 3 3", "There is a flag on this cell."),
        ("reveal 4 0", "There is no cell in row 4, column 0."),
        ("dig 1 1", "Answer with reveal or flag"),
    ):
        observation, reward, _, _, info = env.step(action)
        assert observation.startswith(note)
        assert (reward, info["valid"]) == (0.0, False)
    env.step("reveal 0 0")
    assert env.step("flag 0 0")[4]["valid"] is False
    env.step("flag 3 3")
    observation, reward, terminated, _, info = env.step("reveal 3 3")
    assert observation.endswith(" 3 0  0  1  *")
    assert (reward, terminated, info["success"]) == (0.0, True, False)


def begin_here(env: PuzzleEnv) -> None:
    """Make the state that a test has loaded the first one of the episode."""
    env.restore(env.snapshot() | {"progress_at_start": env.game.progress()})


def test_the_limit_pays_the_share_that_was_revealed_since_the_start() -> None:
    env = minesweeper({15, 3})
    env.max_steps = 2
    env.step("reveal 1 3")
    begin_here(env)
    assert env.step("reveal 0 0")[1] == pytest.approx(0.1 + 12 / 13)


def test_deduction_uses_one_number_within_another() -> None:
    shown = ["1", "1", "0", ".", ".", "."]  # (0,0) sees the first two hidden places, (0,1) all three
    assert deduce(shown, neighbours(2, 3)) == [5]


def test_lines_of_2048_merge_once() -> None:
    assert merge((2, 2, 2, 2)) == ((4, 4, 0, 0), 8)
    assert merge((4, 2, 2, 0)) == ((4, 4, 0, 0), 4)
    board = [2, 0, 0, 2] + [0] * 8 + [4, 0, 0, 2]
    assert slide(board, "right") == ([0, 0, 0, 4] + [0] * 8 + [0, 0, 4, 2], 4)
    assert slide(board, "down") == ([0] * 8 + [2, 0, 0, 0, 4, 0, 0, 4], 4)


def test_reaching_the_target_wins_and_pays_shares() -> None:
    env = started(Game2048, target=32)
    env.game.load({"board": [16, 16, 4, 4] + [0] * 12, "score": 100, "dice": 1})
    observation, reward, terminated, _, info = env.step("left")
    assert observation.startswith("There is a tile of 32.\nScore: 140\n  32   8   .   .")
    assert (reward, terminated, info["success"]) == (pytest.approx(40 / 128), True, True)


def test_2048_ends_where_nothing_slides() -> None:
    env = started(Game2048)
    env.game.load({"board": [2, 4, 2, 4, 4, 2, 4, 2, 8, 4, 2, 4, 8, 16, 32, 0], "score": 0, "dice": 3})
    observation, _, terminated, _, info = env.step("right")
    assert observation.startswith("No move is left.")
    assert (terminated, info["success"]) == (True, False)
    assert env.admissible_actions() == []


SUDOKU = [1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1]


def small_sudoku(grid: list[int]) -> PuzzleEnv:
    env = started(Sudoku, size=4, empty=2)
    env.game.load({"grid": grid.copy(), "given": grid.copy(), "solution": SUDOKU})
    return env


def test_sudoku_pays_for_right_digits_and_takes_back() -> None:
    env = small_sudoku([0, 2, 3, 4, 0, *SUDOKU[5:]])
    assert env.game.text().splitlines()[:3] == [". 2 | 3 4", ". 4 | 1 2", ""]
    assert env.step("2 1 3")[1] == 0.5
    assert env.step("2 1 0")[1] == -0.5
    observation, reward, terminated, _, _ = env.step("1 1 1 || 2 1 3")
    assert (reward, terminated) == (1.0, True)
    assert observation.startswith("The grid is complete and correct.")


def test_sudoku_refuses_clashes_and_given_cells() -> None:
    env = small_sudoku([0, 2, 3, 4, 0, *SUDOKU[5:]])
    for action, note in (
        ("1 1 2", "There is a 2 in this row"),
        ("1 2 1", "This cell was given."),
        ("1 1 0", "This cell is already empty."),
        ("5 1 1", "Answer with a row"),
        ("1 1 5", "Answer with a row"),
        ("one", "Answer with a row"),
    ):
        observation, _, _, _, info = env.step(action)
        assert observation.startswith(note)
        assert info["valid"] is False
    assert env.admissible_actions() == ["1 1 1", "2 1 3"]


@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_a_sudoku_has_one_solution(seed: int) -> None:
    game = Sudoku()
    game.start(Random(seed))
    assert game.grid.count(0) == 31
    for cell, digit in enumerate(game.solution):
        assert digit not in [game.solution[other] for other in peers(9)[cell]]
    assert _solutions(game.grid) == [game.solution]


def _solutions(grid: list[int]) -> list[list[int]]:
    if 0 not in grid:
        return [grid]
    empty = [cell for cell, digit in enumerate(grid) if not digit]
    cell = min(empty, key=lambda place: len(candidates(grid, place, peers(9))))
    found = []
    for digit in sorted(candidates(grid, cell, peers(9))):
        found += _solutions([*grid[:cell], digit, *grid[cell + 1 :]])
    return found


def test_disks_move_by_the_rules() -> None:
    env = started(Hanoi, disks=2, min_moves=1)
    env.game.load({"pegs": [[2, 1], [], []], "target": 2})
    assert env.game.text() == "A: 2 1\nB: \nC: \nAll disks belong on C."
    assert env.admissible_actions() == ["a b", "a c"]
    for action, note in (("B A", "There is no disk on peg B."), ("A", "Answer with two pegs")):
        assert env.step(action)[0].startswith(note)
    env.step("move A to B")
    assert env.step("A B")[0].startswith("Disk 2 cannot be put on disk 1.")
    assert env.step("a c || b c")[1:3] == (1.0, True)


@given(places=st.lists(st.integers(0, 2), min_size=1, max_size=5), target=st.integers(0, 2))
@settings(deadline=None)
def test_hanoi_is_solved_in_the_fewest_moves(places: list[int], target: int) -> None:
    pegs: list[list[int]] = [[], [], []]
    for disk in range(len(places), 0, -1):
        pegs[places[disk - 1]].append(disk)
    assert len(solve(pegs, target)) == _fewest_moves(tuple(places), target)


def _fewest_moves(places: tuple[int, ...], target: int) -> int:
    seen, frontier, moves = {places}, [places], 0
    while (target,) * len(places) not in seen:
        moves += 1
        following = []
        for state in frontier:
            for disk, peg in enumerate(state):
                for goal in {0, 1, 2} - {peg, *state[:disk]} if peg not in state[:disk] else ():
                    after = (*state[:disk], goal, *state[disk + 1 :])
                    if after not in seen:
                        seen.add(after)
                        following.append(after)
        frontier = following
    return moves


def test_tiles_slide_into_the_gap() -> None:
    env = started(FifteenPuzzle, size=3)
    env.game.load({"tiles": [1, 2, 3, 4, 0, 5, 7, 8, 6], "gap": 4})
    assert env.game.text() == " 1  2  3\n 4 __  5\n 7  8  6"
    assert env.step("left")[0] == " 1  2  3\n 4  5 __\n 7  8  6"
    assert env.step("left")[0].startswith("No tile can slide left.")
    assert env.step("up")[1:3] == (1.0, True)


@pytest.mark.parametrize(("move", "reward"), [("left", 1 / 3), ("right", 0.0), ("sideways", 0.0)])
def test_the_limit_pays_the_share_of_misplaced_tiles_that_were_placed(move: str, reward: float) -> None:
    env = started(FifteenPuzzle, size=3, max_steps=1)
    env.game.load({"tiles": [1, 2, 3, 4, 0, 5, 7, 8, 6], "gap": 4})
    begin_here(env)
    assert env.step(move)[1] == pytest.approx(reward)


def test_a_walk_through_a_maze() -> None:
    env = started(Maze, size=3)
    env.game.load({"cells": list("########P....######.##....E##.######.....########"), "player": 8})
    assert env.admissible_actions() == ["right"]
    assert env.step("up")[0].startswith("A wall is in the way.")
    env.step("right || right || right || right")
    observation, reward, terminated, _, _ = env.step("down || down")
    assert observation.splitlines()[4] == "#....P#"
    assert (reward, terminated) == (1.0, True)


@given(seed=st.integers(0, 10_000), size=st.integers(3, 7))
@settings(max_examples=15, deadline=None)
def test_a_maze_is_a_tree_over_all_rooms(seed: int, size: int) -> None:
    game = Maze(size=size)
    game.start(Random(seed))
    free = len(game.cells) - game.cells.count("#")
    assert free == 2 * size * size - 1
    assert game.cells.count("E") == game.cells.count("P") == 1
