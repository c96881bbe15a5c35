"""Reads the game files of the original: ``game.tw-pddl``, whose JSON holds rules, words and a planning problem."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from agentrl.errors import UsageError

from ..state import House
from .problem import read_house

GAME_FILE = "game.tw-pddl"
TRAJECTORY_FILE = "traj_data.json"
UNKNOWN_GOAL = "Your task is to: UNKNOWN GOAL."
"""What stands in the original's grammar in place of the goal."""
MOVE_COMMAND = "move {o} to {r}"
"""How a grammar since ALFWorld 0.4 words putting an object down; the household engine speaks as it does."""
_GOAL = re.compile(r'Your task is to: ((?:[^"\\]|\\.)*)\."')
_SCENE = re.compile(r"-(\d+)$")
_KEPT = 512
"""Houses kept in memory, of some 20 KB each: the episodes of a group play the same game."""


@functools.lru_cache(maxsize=_KEPT)
def load_house(path: Path) -> House:
    """Return the house of a game file.

    Raises:
        UsageError: the file is no game, or not one that the household engine plays as the original does.
    """
    try:
        game = json.loads(path.read_text(encoding="utf-8"))
        problem, grammar = str(game["pddl_problem"]), str(game["grammar"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no ALFWorld game", got=error, expected="JSON with pddl_problem, grammar"
        ) from error
    if MOVE_COMMAND not in grammar:
        raise UsageError(
            f"{path} is a game of an old ALFWorld, whose words differ",
            expected=f"a grammar with {MOVE_COMMAND!r}, as in the data of ALFWorld 0.4 and later",
            hint="download the data again with alfworld-download, or choose engine=original",
        )
    goal = _GOAL.search(grammar)
    if goal is None:
        raise UsageError(f"{path} states no goal", expected="a grammar with 'Your task is to: …'")
    return read_house(problem, goal_text=json.loads(f'"{goal[1]}"'), scene=scene_of(path))


def scene_of(path: Path) -> int:
    """Return the number of the floor plan, which ends the name of the folder above the trial's; 0 where there is none.

    >>> scene_of(Path("pick_heat_then_place_in_recep-Egg-None-Fridge-13/trial_1/game.tw-pddl"))
    13
    """
    found = _SCENE.search(path.parent.parent.name)
    return int(found[1]) if found else 0
