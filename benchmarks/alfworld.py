"""CPU time of steps and resets of ALFWorld games in the household engine, and in the original if it is installed.

agentrl bench alfworld
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from agentrl.envs.household.alfworld.environment import AlfworldEnv
from agentrl.envs.household.alfworld.game_file import load_house
from agentrl.envs.household.alfworld.original import OriginalAlfworldEnv, package_rules
from agentrl.envs.household.alfworld.writing import GameRules, write_game
from agentrl.envs.household.generator import generate
from agentrl.envs.household.goals import TaskType
from agentrl.envs.household.scenes import Size
from agentrl.envs.household.tasks import TRAIN, scenes_of

from agentrl.errors import UsageError

GAMES = 12
"""Full-size houses, two of each task type."""
WALK = 20
"""Steps of a random walk; each requests the admissible commands."""


def run() -> dict[str, Any]:
    """Return figures per engine."""
    rules, missing = GameRules(), ""
    try:
        rules = package_rules()
    except UsageError as error:
        missing = str(error)
    with tempfile.TemporaryDirectory() as folder:
        games = _write(Path(folder), rules)
        native = _measure(AlfworldEnv(data=folder), games, repeat=20)
        native["first_reset_ms_median"] = _first_resets(Path(folder))
        if missing:
            return {"native": native, "original": missing}
        return {"native": native, "original": _measure(OriginalAlfworldEnv(data=folder), games[::4], repeat=1)}


def _write(folder: Path, rules: GameRules) -> list[str]:
    types, ids = tuple(TaskType), []
    for number in range(GAMES):
        task_type = types[number % len(types)]
        house = generate(scenes_of(TRAIN, task_type)[number], task_type, number, Size.FULL)
        ids.append(f"train/{task_type}-{house.scene}/trial_{number}")
        write_game(folder / "json_2.1.1" / ids[-1], house, rules)
    return ids


def _measure(env: AlfworldEnv | OriginalAlfworldEnv, games: list[str], repeat: int) -> dict[str, float]:
    resets, steps, seconds = [], 0, 0.0
    for game in games * repeat:
        resets.append(1000 * _cpu_seconds(lambda game=game: env.reset(options={"game": game})))
        random = Random(game)
        taken, spent = _walk(env, random)
        steps, seconds = steps + taken, seconds + spent
    env.close()
    return {"steps_per_cpu_s": steps / seconds, "reset_ms_median": statistics.median(resets)}


def _walk(env: AlfworldEnv | OriginalAlfworldEnv, random: Random) -> tuple[int, float]:
    start, taken, over = time.process_time(), 0, False
    while not over and taken < WALK:
        _, _, terminated, truncated, _ = env.step(random.choice(env.admissible_actions()))
        taken, over = taken + 1, terminated or truncated
    return taken, time.process_time() - start


def _first_resets(folder: Path) -> float:
    """Return the median time of the first read of a game file, in milliseconds."""
    load_house.cache_clear()
    files = sorted(folder.rglob("game.tw-pddl"))
    return statistics.median(1000 * _cpu_seconds(lambda file=file: load_house(file)) for file in files)


def _cpu_seconds(do: Callable[[], object]) -> float:
    start = time.process_time()
    do()
    return time.process_time() - start


if __name__ == "__main__":
    for engine, figures in run().items():
        print(engine, figures)
