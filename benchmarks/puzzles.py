"""Steps and resets per second of all puzzles, one process on one core, and the scores of scripted policies.

agentrl bench puzzles

Prints a table of its own as well, as Markdown. Seconds are of this process on the CPU, the least of several rounds:
other processes on the machine then count little.
"""

from __future__ import annotations

import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from agentrl.envs.puzzles.environment import PuzzleEnv
from agentrl.envs.puzzles.manifest import puzzle_names, puzzle_spec_of

EPISODES = 40
ROUNDS = 5
COLUMNS = ("expert steps/s", "random steps/s", "reset ms", "reset ms, 95 %", "expert", "random", "steps", "KiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """An episode that can be played again."""

    seed: int
    actions: tuple[str, ...]
    won: bool


def run() -> dict[str, Any]:
    """Figures per puzzle."""
    figures = {name: measure(name) for name in puzzle_names()}
    print(f"| puzzle | {' | '.join(COLUMNS)} |\n|---{'|---' * len(COLUMNS)}|", file=sys.stderr)
    for name, found in figures.items():
        print(f"| `{name}` | {' | '.join(f'{value:,.3g}' for value in found.values())} |", file=sys.stderr)
    return figures


def measure(name: str) -> dict[str, float]:
    """Figures of one puzzle with its own options, over the first training tasks."""
    env = puzzle_spec_of(name).make()
    assert isinstance(env, PuzzleEnv)
    played = [record(env, seed, expert_of(env)) for seed in range(EPISODES)]
    random = [record(env, seed, random_of(env, seed)) for seed in range(EPISODES)]
    resets = sorted(reset_ms(env, seed) for seed in range(200))
    figures = (
        steps_per_second(env, played),
        steps_per_second(env, random),
        statistics.median(resets),
        resets[int(0.95 * len(resets))],
        statistics.fmean(script.won for script in played),
        statistics.fmean(script.won for script in random),
        statistics.fmean(len(script.actions) for script in played),
        kilobytes(name),
    )
    return dict(zip(COLUMNS, figures, strict=True))


def expert_of(env: PuzzleEnv) -> Callable[[str], str]:
    """The expert's policy."""
    expert = env.expert()
    return lambda observation: expert.act(observation)


def random_of(env: PuzzleEnv, seed: int) -> Callable[[str], str]:
    """The random policy."""
    random = Random(seed)
    return lambda _: random.choice(env.admissible_actions() or [env.game.guess(random)])


def record(env: PuzzleEnv, seed: int, policy: Callable[[str], str]) -> Script:
    """An episode by a policy."""
    observation, _ = env.reset(seed=seed)
    actions = []
    while True:
        actions.append(policy(observation))
        observation, _, terminated, truncated, info = env.step(actions[-1])
        if terminated or truncated:
            return Script(seed=seed, actions=tuple(actions), won=info["success"])


def steps_per_second(env: PuzzleEnv, scripts: list[Script]) -> float:
    """The best of some rounds, in each of which all episodes are played again from snapshots of their starts."""
    starts = []
    for script in scripts:
        env.reset(seed=script.seed)
        starts.append(env.snapshot())
    repeats = max(1, 2000 // sum(len(script.actions) for script in scripts))
    return max(_round(env, scripts, starts, repeats) for _ in range(ROUNDS))


def _round(env: PuzzleEnv, scripts: list[Script], starts: list[dict[str, Any]], repeats: int) -> float:
    """Steps per second; what restoring takes is measured alone, and taken off."""
    began = time.process_time()
    for _ in range(repeats):
        for start in starts:
            env.restore(start)
    restoring = time.process_time() - began
    began = time.process_time()
    for _ in range(repeats):
        for start, script in zip(starts, scripts, strict=True):
            env.restore(start)
            for action in script.actions:
                env.step(action)
    seconds = time.process_time() - began - restoring
    return repeats * sum(len(script.actions) for script in scripts) / seconds


def reset_ms(env: PuzzleEnv, seed: int) -> float:
    """Milliseconds of a reset."""
    began = time.process_time()
    env.reset(seed=seed)
    return 1000 * (time.process_time() - began)


def kilobytes(name: str) -> float:
    """What an environment in an episode takes."""
    tracemalloc.start()
    environments: list[Any] = [puzzle_spec_of(name).make() for _ in range(50)]
    for seed, env in enumerate(environments):
        env.reset(seed=seed)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / 1024 / len(environments)


if __name__ == "__main__":
    run()
