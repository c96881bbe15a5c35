"""Steps per second of the search environment, in one process on one core.

agentrl bench search_qa
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from typing import Any

from agentrl.envs.search_qa.environment import SearchQA
from agentrl.envs.search_qa.spec import SPEC
from agentrl.envs.search_qa.world import World

from agentrl.remote.retrieval import BM25Index

SPLIT = "train"
EPISODES = 300


def run() -> dict[str, Any]:
    """Measure the CPU time of creating a world and its index, of the expert's episodes, and of searches."""
    start = time.process_time()
    world = World(SPLIT)
    made = time.process_time()
    index = BM25Index(world.passages)
    indexed = time.process_time()
    return {
        "passages": len(world.passages),
        "world_s": made - start,
        "index_s": indexed - made,
        "searches_per_s": _searches_per_second(index, world),
        **_episodes(),
        "kilobytes_per_environment": _kilobytes(),
    }


def _searches_per_second(index: BM25Index, world: World) -> float:
    queries = [f"{passage.title} birthplace" for passage in world.passages[:1000]]
    start = time.process_time()
    for query in queries:
        index.search(query, 3)
    return len(queries) / (time.process_time() - start)


def _episodes() -> dict[str, float]:
    """Replay the expert's recorded searches and answers."""
    env, tasks = SearchQA(), SPEC.tasks(SPLIT)
    scripts = [_script(env, dict(tasks[i].options)) for i in range(EPISODES)]
    resets, steps, seconds = [], 0, 0.0
    for i, actions in enumerate(scripts):
        start = time.process_time()
        env.reset(options=dict(tasks[i].options))
        begun = time.process_time()
        for action in actions:
            env.step(action)
        seconds += time.process_time() - begun
        resets.append(1000 * (begun - start))
        steps += len(actions)
    return {"steps_per_s": steps / seconds, "steps_per_episode": steps / EPISODES, "reset_ms": statistics.mean(resets)}


def _script(env: SearchQA, options: dict[str, Any]) -> list[str]:
    observation, _ = env.reset(options=options)
    expert, actions, done = env.expert(), list[str](), False
    while not done:
        actions.append(expert.act(observation))
        observation, _, done, _, _ = env.step(actions[-1])
    return actions


def _kilobytes() -> float:
    """Return the memory of an additional environment; the index is shared."""
    tracemalloc.start()
    environments = [SearchQA() for _ in range(100)]
    for seed, env in enumerate(environments):
        env.reset(seed=seed)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / 1024 / len(environments)


if __name__ == "__main__":
    for name, value in run().items():
        print(name, round(value, 3))
