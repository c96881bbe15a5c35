"""Speed and memory of the web shop, in one process on one core.

agentrl bench webshop
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from agentrl.envs.webshop.cache import ENVIRONMENT_VARIABLE
from agentrl.envs.webshop.environment import WebShopEnv
from agentrl.envs.webshop.generator import generate_product
from agentrl.envs.webshop.goals import GoalKind
from agentrl.envs.webshop.shop import CatalogueSource, open_shop

SIZES = (1_000, 100_000)
EPISODES = 400
INSTANCES = 256
LONG = (1_000, 5_000, 10_000)
"""Numbers of episodes after which the memory of a process is read."""


def run() -> dict[str, Any]:
    """Return figures for a small and a large generated catalogue."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[ENVIRONMENT_VARIABLE] = folder
        figures = {f"{size} products": _measure(size) for size in SIZES}
        return {**figures, "official": {str(limit): _run_in_new_process(_measure_files, limit) for limit in SIZES}}


def _measure(size: int) -> dict[str, Any]:
    return {
        "first_open": _run_in_new_process(_open, size),
        "open_again": _run_in_new_process(_open, size),
        "play": _run_in_new_process(_play, size),
        "instances": _run_in_new_process(_many, size),
        "long": _run_in_new_process(_measure_growth, size),
    }


def _run_in_new_process(target: Callable[[int], dict[str, float]], size: int) -> dict[str, float]:
    """Measure in a new process, which has no warm caches and only the memory of the shop."""
    command = [sys.executable, __file__, target.__name__, str(size)]
    figures: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return figures


def _open(size: int) -> dict[str, float]:
    before, start, cpu = private_megabytes(), time.perf_counter(), time.process_time()
    shop = open_shop(CatalogueSource(data=None, products=size))
    goals = len(shop.goals(GoalKind.HUMAN))
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "private_megabytes": private_megabytes() - before,
        "goals": goals,
    }


def _measure_files(limit: int) -> dict[str, float]:
    """Measure time and peak memory of the first use of files in WebShop's format, limited to some products."""
    with tempfile.TemporaryDirectory() as folder:
        _write_official(Path(folder), SIZES[-1])
        before, cpu = _peak_megabytes(), time.process_time()
        shop = open_shop(CatalogueSource(data=Path(folder), products=limit))
        shop.goals(GoalKind.HUMAN)
        return {"cpu_seconds": time.process_time() - cpu, "peak_megabytes": _peak_megabytes(), "peak_before": before}


def _write_official(folder: Path, size: int) -> None:
    names = ("items_shuffle.json", "items_ins_v2.json", "items_human_ins.json")
    with contextlib.ExitStack() as stack:
        products, synthetic, human = (stack.enter_context((folder / name).open("w")) for name in names)
        for file, first in ((products, "["), (synthetic, "{"), (human, "{")):
            file.write(first)
        for number in range(size):
            made, comma = generate_product(number), "," if number else ""
            asin = json.dumps(made.row["asin"])
            products.write(comma + json.dumps(made.row))
            synthetic.write(f"{comma}{asin}:{json.dumps(made.synthetic)}")
            human.write(f"{comma}{asin}:{json.dumps(list(made.human))}")
        for file, last in ((products, "]"), (synthetic, "}"), (human, "}")):
            file.write(last)


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _play(size: int) -> dict[str, float]:
    before = private_megabytes()
    env = WebShopEnv(products=size)
    scripts = [_expert_actions(env, number) for number in range(min(EPISODES, len(env.goals)))]
    env.close()
    open_shop.cache_clear()
    env = WebShopEnv(products=size)  # excludes the expert's caches
    steps, resets, cpu = 0, [], time.process_time()
    for number, actions in enumerate(scripts):
        start = time.perf_counter()
        env.reset(options={"goal": number})
        resets.append(1000 * (time.perf_counter() - start))
        for action in actions:
            env.step(action)
        steps += len(actions)
    return {
        "expert_steps_per_cpu_s": steps / (time.process_time() - cpu),
        "searches": sum(action.startswith("search") for actions in scripts for action in actions),
        "steps": steps,
        "random_steps_per_cpu_s_with_admissible": _random_steps_per_second(env),
        "reset_ms_median": statistics.median(resets),
        "private_megabytes": private_megabytes() - before,
    }


def _expert_actions(env: WebShopEnv, number: int) -> list[str]:
    observation, _ = env.reset(options={"goal": number})
    expert, actions, done = env.expert(), [], False
    while not done:
        actions.append(expert.act(observation))
        observation, _, terminated, truncated, _ = env.step(actions[-1])
        done = terminated or truncated
    return actions


def _random_steps_per_second(env: WebShopEnv) -> float:
    random, steps, start = Random(0), 0, time.process_time()
    for number in range(EPISODES // 2):
        env.reset(options={"goal": number})
        done = False
        while not done:
            _, _, terminated, truncated, _ = env.step(random.choice(env.admissible_actions()))
            done, steps = terminated or truncated, steps + 1
    return steps / (time.process_time() - start)


def _many(size: int) -> dict[str, float]:
    before = private_megabytes()
    environments = [WebShopEnv(products=size) for _ in range(INSTANCES)]
    for number, env in enumerate(environments):
        env.reset(options={"goal": number})
        env.step(env.admissible_actions()[0])
    return {"count": len(environments), "private_megabytes": private_megabytes() - before}


def _measure_growth(size: int) -> dict[str, float]:
    """Measure the memory after a thousand random episodes and after ten thousand."""
    env, random, megabytes = WebShopEnv(products=size), Random(0), dict[int, float]()
    for number in range(LONG[-1]):
        env.reset(options={"goal": number % len(env.goals)})
        done = False
        while not done:
            _, _, terminated, truncated, _ = env.step(random.choice(env.admissible_actions()))
            done = terminated or truncated
        if number + 1 in LONG:
            megabytes[number + 1] = private_megabytes()
    return {f"private_megabytes_after_{count}": value for count, value in megabytes.items()}


def private_megabytes() -> float:
    """Return the memory of an additional process like this one, in MB (Linux).

    Pages of the mapped tables are in the system's file cache, which all processes share. With only one process, they
    also count as private, but as clean.
    """
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](int(sys.argv[2]))))
