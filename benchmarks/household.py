"""Steps and resets per second of the household environment, in one process on one core.

agentrl bench household
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from random import Random
from typing import Any

from agentrl.envs.household.environment import HouseholdEnv
from agentrl.envs.household.options import parse_options
from agentrl.envs.household.scenes import Size
from agentrl.envs.household.tasks import TRAIN, HouseholdTasks

EPISODES = 400


def run() -> dict[str, Any]:
    """Return figures per size, from expert and random episodes of the first training tasks."""
    return {size.value: _measure(size) for size in Size}


def _measure(size: Size) -> dict[str, float]:
    tasks = HouseholdTasks(TRAIN, parse_options(size=size))
    env = HouseholdEnv(size=size)
    env.reset(seed=0)
    scripts = [_expert_actions(env, dict(tasks[i].options)) for i in range(EPISODES)]
    resets, steps = [], 0
    start = time.perf_counter()
    for i, actions in enumerate(scripts):
        before = time.perf_counter()
        env.reset(options=dict(tasks[i].options))
        resets.append(1000 * (time.perf_counter() - before))
        for action in actions:
            env.step(action)
        steps += len(actions)
    seconds = time.perf_counter() - start - sum(resets) / 1000
    return {
        "expert_steps_per_s": steps / seconds,
        "expert_steps_per_episode": steps / EPISODES,
        "random_steps_per_s_with_admissible": _random_steps_per_second(env, tasks),
        "reset_ms_median": statistics.median(resets),
        "reset_ms_worst": max(resets),
        "receptacles_mean": statistics.fmean(_house_sizes(env, tasks, "receptacles")),
        "objects_mean": statistics.fmean(_house_sizes(env, tasks, "objects")),
        "kilobytes_per_environment": _kilobytes(size),
    }


def _expert_actions(env: HouseholdEnv, options: dict[str, Any]) -> list[str]:
    observation, _ = env.reset(options=options)
    expert, actions, done = env.expert(), [], False
    while not done:
        actions.append(expert.act(observation))
        observation, _, done, _, _ = env.step(actions[-1])
    return actions


def _random_steps_per_second(env: HouseholdEnv, tasks: HouseholdTasks) -> float:
    random, steps, seconds = Random(0), 0, 0.0
    for i in range(EPISODES // 8):
        env.reset(options=dict(tasks[i].options))
        start, done = time.perf_counter(), False
        while not done:
            _, _, terminated, truncated, _ = env.step(random.choice(env.admissible_actions()))
            done, steps = terminated or truncated, steps + 1
        seconds += time.perf_counter() - start
    return steps / seconds


def _house_sizes(env: HouseholdEnv, tasks: HouseholdTasks, what: str) -> list[int]:
    sizes = []
    for i in range(EPISODES):
        env.reset(options=dict(tasks[i].options))
        sizes.append(len(getattr(env.world.house, what)))
    return sizes


def _kilobytes(size: Size) -> float:
    tracemalloc.start()
    environments = [HouseholdEnv(size=size) for _ in range(100)]
    for seed, env in enumerate(environments):
        env.reset(seed=seed)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / 1024 / len(environments)


if __name__ == "__main__":
    for size, figures in run().items():
        print(size, {name: round(value, 3) for name, value in figures.items()})
