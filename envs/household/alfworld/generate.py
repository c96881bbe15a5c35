"""Generator of a data folder with games in the original's format.

python -m agentrl.envs.household.alfworld.generate FOLDER --games 300 --odd

The games are of all six task types and all sizes of houses.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..generator import generate
from ..goals import TaskType
from ..scenes import Size
from ..state import House
from ..tasks import scenes_of
from .data import RELEASE, SPLITS, TRAIN
from .oddities import make_odd
from .original import package_rules
from .writing import GameRules, write_game


def write_games(
    folder: Path, games: int, *, split: str = TRAIN, odd: bool = False, rules: GameRules | None = None
) -> list[str]:
    """Write games into a data folder, and return their ids.

    Args:
        folder: A data folder like ``$ALFWORLD_DATA``.
        games: Number of games.
        split: Split of the games.
        odd: Make every second game as unusual as the format allows (see `oddities`); not all of them can be solved.
        rules: The original's rules and grammar; without them only the household engine plays the games.
    """
    ids = []
    for number, house in enumerate(_houses(games, odd=odd)):
        goal = house.goal
        task = f"{goal.task_type}-{goal.object_type.capitalize()}-None-{goal.target_type.capitalize()}-{house.scene}"
        ids.append(f"{split}/{task}/trial_{number:04}")
        write_game(folder / RELEASE / ids[-1], house, rules)
    return ids


def _houses(count: int, *, odd: bool) -> Iterator[House]:
    sizes, types = tuple(Size), tuple(TaskType)
    for number in range(count):
        task_type = types[number // 2 % len(types)]
        scenes = scenes_of(TRAIN, task_type)
        scene = scenes[number % len(scenes)]
        house = generate(scene, task_type, number, sizes[number // 2 % len(sizes)])
        yield make_odd(house, number) if odd and number % 2 else house


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Write a data folder of generated ALFWorld games.")
    parser.add_argument("folder", type=Path, help="the data folder")
    parser.add_argument("--games", type=int, default=300, help="number of games (default: 300)")
    parser.add_argument("--split", default=TRAIN, choices=SPLITS, help="split of the games (default: train)")
    parser.add_argument("--odd", action="store_true", help="make every second game as unusual as the format allows")
    chosen = parser.parse_args()
    written = write_games(chosen.folder, chosen.games, split=chosen.split, odd=chosen.odd, rules=package_rules())
    print(f"wrote {len(written)} games into {chosen.folder}")


if __name__ == "__main__":
    main()
