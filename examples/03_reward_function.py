"""Rewards without an environment: prompts from a file, and two plain functions.

    python examples/03_reward_function.py                                                  a small new model, on the CPU
    python examples/03_reward_function.py --model Qwen/Qwen2.5-0.5B-Instruct --steps 100   a real one

Prints the mean of each reward component in the last step, and the reward on prompts that were not trained.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import agentrl
from agentrl.task import Task
from agentrl.trajectory import Trajectory


def exact(trajectory: Trajectory, task: Task) -> float:
    """Return 1 if the last number of the answer is the right one, else 0."""
    return float(agentrl.parse_int(trajectory.final_text) == task.ground_truth)


def brief(trajectory: Trajectory, task: Task) -> float:
    """Return a penalty of 1 for every 200 characters."""
    return -len(trajectory.final_text) / 200


def write_sums(file: Path, count: int, seed: int) -> None:
    """Write a data set of sums."""
    rng = random.Random(seed)
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(count)]
    rows = [{"prompt": f"What is {a} + {b}? Answer with a number.", "ground_truth": a + b} for a, b in pairs]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="scratch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    write_sums(Path("sums_train.jsonl"), 200, seed=0)
    write_sums(Path("sums_test.jsonl"), 20, seed=1)
    reward = [exact, (brief, 0.1)]
    run = agentrl.train(
        tasks="sums_train.jsonl", reward=reward, model=given.model, steps=given.steps, overrides=given.overrides
    )
    print({name: value for name, value in run.metrics.items() if name.startswith("reward/component/")})
    print(agentrl.evaluate(prompts="sums_test.jsonl", reward=reward, model=run.checkpoint))


if __name__ == "__main__":
    main()
