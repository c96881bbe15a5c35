"""Comparison of the household engine with the original on a published or generated data folder.

python -m agentrl.envs.household.alfworld.compare FOLDER --split train --games 300 --report parity.jsonl

Each game is played in both engines at once (see `parity`). The report has a line of JSON per game; games that it
already contains are not played again, so a comparison can be stopped and resumed. The exit code is 1 if there is a
difference.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .data import SPLITS, TRAIN, Games
from .environment import AlfworldEnv
from .original import OriginalAlfworldEnv
from .parity import GameParity, compare_game


def compare_games(data: Path, games: Iterable[str]) -> Iterator[GameParity]:
    """Play games in both engines, one after the other.

    Args:
        data: The data folder.
        games: Ids of the games.
    """
    native = AlfworldEnv(data=str(data))
    with contextlib.closing(OriginalAlfworldEnv(data=str(data))) as original:
        for game in games:
            yield compare_game(native, original, game)


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description="Compare the household engine with the original ALFWorld.")
    parser.add_argument("folder", type=Path, help="the data folder")
    parser.add_argument("--split", default=TRAIN, choices=SPLITS, help="split of the games (default: train)")
    parser.add_argument("--games", type=int, help="maximum number of games (default: all)")
    parser.add_argument("--report", type=Path, required=True, help="file to which a line per game is added")
    chosen = parser.parse_args()
    ids = [row.game for row in Games(str(chosen.folder)).rows(chosen.split)][: chosen.games]
    known = {row["game"] for row in _read(chosen.report)}
    with chosen.report.open("a", encoding="utf-8") as report:
        for parity in compare_games(chosen.folder, [game for game in ids if game not in known]):
            report.write(json.dumps(asdict(parity)) + "\n")
            report.flush()
    rows = [row for row in _read(chosen.report) if row["game"] in ids]
    different = [difference for row in rows for difference in row["differences"]]
    print(
        f"{len(rows)} games, {sum(row['steps'] for row in rows):,} steps in each engine, {len(different)} differences"
    )
    for difference in different[:5]:
        print(json.dumps(difference, indent=1))
    return 1 if different else 0


def _read(report: Path) -> list[dict[str, Any]]:
    lines = report.read_text(encoding="utf-8").split("\n") if report.exists() else []
    return [json.loads(line) for line in lines if line]


if __name__ == "__main__":
    sys.exit(main())
