"""Location of the original's data, and its games.

``alfworld-download`` writes them to ``$ALFWORLD_DATA``, or else ``~/.cache/alfworld``, as
``json_2.1.1/SPLIT/TASK/TRIAL/game.tw-pddl`` next to ``traj_data.json``. A game's id is ``SPLIT/TASK/TRIAL``.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from agentrl.errors import UsageError

from ...choices import choose_all
from ..goals import TaskType
from .game_file import GAME_FILE, TRAJECTORY_FILE

logger = logging.getLogger(__name__)

TRAIN, VALID_SEEN, VALID_UNSEEN = SPLITS = ("train", "valid_seen", "valid_unseen")
OFFICIAL_SIZES = {TRAIN: 3553, VALID_SEEN: 140, VALID_UNSEEN: 134}
"""Number of games in each split of the published data."""
RELEASE = "json_2.1.1"
"""Folder of the games in the data folder."""
VARIABLE = "ALFWORLD_DATA"
DEFAULT_FOLDER = "~/.cache/alfworld"
DOWNLOAD = "pip install alfworld && alfworld-download"
_EXCLUDED = ("movable", "Sliced")
"""Parts of the paths of ALFRED's trials that are not text games."""
_TASK_TYPE = re.compile(rb'"task_type"\s*:\s*"(\w+)"')
_SOLVABLE = re.compile(rb'"solvable"\s*:\s*true\b')


class GameRow(NamedTuple):
    """A game of a split."""

    game: str
    """Id of the game."""
    task_type: str


class Games:
    """The games that an environment may play.

    Args:
        data: The data folder; by default ``$ALFWORLD_DATA``, or else ``~/.cache/alfworld``.
        task_types: Kinds of tasks; all if left out.

    Raises:
        UsageError: a task type is unknown.
    """

    def __init__(self, data: str | None = None, task_types: Iterable[str] | None = None) -> None:
        self.folder = Path(data or os.environ.get(VARIABLE) or DEFAULT_FOLDER).expanduser()
        self.task_types = choose_all(TaskType, task_types, "alfworld task type")

    def rows(self, split: str) -> tuple[GameRow, ...]:
        """Return the games of a split, sorted by id.

        Raises:
            UsageError: the split does not exist, or the folder contains no such games.
        """
        if split not in SPLITS:
            raise UsageError("environment alfworld has no split of this name", got=split, expected=" or ".join(SPLITS))
        rows = tuple(row for row in find_games(self.folder, split) if row.task_type in self.task_types)
        if not rows:
            raise UsageError(
                f"no games of alfworld/{split} found",
                got=f"none of these task types under {self.folder / RELEASE / split}",
                expected=f"{RELEASE}/{split}/TASK/TRIAL/{GAME_FILE} next to {TRAJECTORY_FILE}",
                hint=f"download them ({DOWNLOAD}), or point ${VARIABLE} or the option data at their folder",
            )
        return rows

    def path(self, game: str) -> Path:
        """Return the file of a game.

        Raises:
            UsageError: the game does not exist.
        """
        root = self.folder / RELEASE
        inside = isinstance(game, str) and not Path(game).is_absolute() and ".." not in Path(game).parts
        path = root / str(game) / GAME_FILE
        if not inside or not path.is_file():
            raise UsageError(
                "this ALFWorld game does not exist",
                got=repr(game),
                expected=f"an id SPLIT/TASK/TRIAL of a game under {root}",
                hint=f"download the data: {DOWNLOAD}",
            )
        return path

    def path_for(self, options: Mapping[str, Any], generator: numpy.random.Generator) -> Path:
        """Return the file of the game that the options of a reset name, or else of a random training game.

        Raises:
            UsageError: an option is unknown, or the game does not exist.
        """
        if unknown := options.keys() - {"game"}:
            raise UsageError(
                "alfworld cannot reset with these options", got=", ".join(unknown), expected="game, or none"
            )
        if "game" in options:
            return self.path(options["game"])
        rows = self.rows(TRAIN)
        return self.path(rows[int(generator.integers(len(rows)))].game)


@functools.lru_cache(maxsize=16)
def find_games(folder: Path, split: str) -> tuple[GameRow, ...]:
    """Return the games of a split that the original would play: those of its six task types marked as solvable."""
    root = folder / RELEASE
    rows = []
    for path in sorted((root / split).rglob(GAME_FILE)):
        game = path.parent.relative_to(root).as_posix()
        trajectory = path.with_name(TRAJECTORY_FILE)
        if any(word in game for word in _EXCLUDED) or not trajectory.is_file():
            continue
        task_type = task_type_of(path)
        if task_type in set(TaskType) and _SOLVABLE.search(path.read_bytes()):
            rows.append(GameRow(game, task_type))
    if rows and len(rows) != OFFICIAL_SIZES[split]:
        logger.warning("alfworld/%s: %d games here, %d in the published data", split, len(rows), OFFICIAL_SIZES[split])
    return tuple(rows)


def task_type_of(path: Path) -> str:
    """Return the task type of a game, from the large trajectory file next to it, which is not parsed."""
    found = _TASK_TYPE.search(path.with_name(TRAJECTORY_FILE).read_bytes())
    return found[1].decode() if found else ""
