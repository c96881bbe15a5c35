"""Steps per second of the retail desk, in one process on one core.

agentrl bench retail
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from typing import Any

from agentrl.envs.retail.environment import RetailDesk
from agentrl.envs.retail.generator import store_of
from agentrl.envs.retail.tasks import case_of

EPISODES = 300


def run() -> dict[str, Any]:
    """Measure the CPU time of creating the shop and its tasks, and of the expert's episodes."""
    start = time.process_time()
    store_of("train")
    made = time.process_time()
    for number in range(EPISODES):
        case_of(f"train-{number}")
    drawn = time.process_time()
    return {
        "shop_s": made - start,
        "task_ms": 1000 * (drawn - made) / EPISODES,
        **_episodes(),
        "kilobytes_per_environment": _kilobytes(),
    }


def _episodes() -> dict[str, float]:
    """Replay the expert's recorded steps, with and without `state_key()` after each."""
    env = RetailDesk()
    scripts = [_script(env, f"train-{number}") for number in range(EPISODES)]
    steps = sum(map(len, scripts))
    resets, seconds, with_keys = [], 0.0, 0.0
    for number, actions in enumerate(scripts):
        start = time.process_time()
        env.reset(options={"task_id": f"train-{number}"})
        begun = time.process_time()
        for action in actions:
            env.step(action)
        seconds += time.process_time() - begun
        resets.append(1000 * (begun - start))
    for number, actions in enumerate(scripts):
        env.reset(options={"task_id": f"train-{number}"})
        begun = time.process_time()
        for action in actions:
            env.step(action)
            env.state_key()
        with_keys += time.process_time() - begun
    return {
        "steps_per_s": steps / seconds,
        "steps_per_s_with_state_key": steps / with_keys,
        "steps_per_episode": steps / EPISODES,
        "reset_ms": statistics.mean(resets),
    }


def _script(env: RetailDesk, task_id: str) -> list[str]:
    observation, _ = env.reset(options={"task_id": task_id})
    expert, actions, done = env.expert(), list[str](), False
    while not done:
        actions.append(expert.act(observation))
        observation, _, done, _, _ = env.step(actions[-1])
    return actions


def _kilobytes() -> float:
    """Return the memory of an additional environment; the shop is shared."""
    tracemalloc.start()
    environments = [RetailDesk() for _ in range(100)]
    for number, env in enumerate(environments):
        env.reset(options={"task_id": f"train-{number}"})
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / 1024 / len(environments)


if __name__ == "__main__":
    for name, value in run().items():
        print(name, round(value, 3))
