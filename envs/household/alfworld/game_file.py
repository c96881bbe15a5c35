"""Reader of the original's game files ``game.tw-pddl``: JSON with rules, a grammar and a planning problem."""

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
"""Placeholder of the goal in the original's grammar."""
MOVE_COMMAND = "move {o} to {r}"
"""Command for putting an object down in grammars since ALFWorld 0.4, and in the household engine."""
_GOAL = re.compile(r'Your task is to: ((?:[^"\\]|\\.)*)\."')
_SCENE = re.compile(r"-(\d+)$")
_KEPT = 512
"""Maximum number of cached houses, of some 20 KB each: the episodes of a group play the same game."""


@functools.lru_cache(maxsize=_KEPT)
def load_house(path: Path) -> House:
    """Return the house of a game file.

    Raises:
        UsageError: the file is not a game, or the household engine cannot play it as the original does.
    """
    try:
        game = json.loads(path.read_text(encoding="utf-8"))
        problem, grammar = str(game["pddl_problem"]), str(game["grammar"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not an ALFWorld game", got=error, expected="JSON with pddl_problem, grammar"
        ) from error
    if MOVE_COMMAND not in grammar:
        raise UsageError(
            f"{path} is a game of an old ALFWorld version with other commands",
            expected=f"a grammar with {MOVE_COMMAND!r}, as in the data of ALFWorld 0.4 and later",
            hint="download the data again with alfworld-download, or choose engine=original",
        )
    goal = _GOAL.search(grammar)
    if goal is None:
        raise UsageError(f"{path} states no goal", expected="a grammar with 'Your task is to: …'")
    return read_house(problem, goal_text=json.loads(f'"{goal[1]}"'), scene=scene_of(path))


def scene_of(path: Path) -> int:
    """Return the number of the floor plan at the end of the task folder's name; 0 if it has none.

    >>> scene_of(Path("pick_heat_then_place_in_recep-Egg-None-Fridge-13/trial_1/game.tw-pddl"))
    13
    """
    found = _SCENE.search(path.parent.parent.name)
    return int(found[1]) if found else 0
