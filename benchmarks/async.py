"""Asynchronous and synchronous training: steps per hour, dropped groups, bias, success, and the physical limit.

A small model learns to write vowels. Three loads:

- ``tails``: one episode in ten has a step of `slow_s` seconds, the other steps take some tenths of a second. A
  synchronous step waits for the slowest of its episodes; a larger staleness lets several steps wait at the same time.
- ``waits``: all steps take lognormal times with mean `wait_s`. With enough staleness, the busier of trainer and engine
  limits the duration of a training step.
- ``busy``: steps take a fifth of that, and a larger model makes trainer and engine the bottleneck. Each needs its own
  core: ``OMP_NUM_THREADS=1`` on an idle machine.

The first ``max_staleness + 1`` steps fill the pipeline and are not timed.

    agentrl bench async --json async.json
    agentrl bench async steps=8 slow_s=20 staleness=[0,2]
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch

import agentrl
from agentrl.env import AsyncEnv
from agentrl.observe.metrics import read_metrics
from agentrl.observe.run_folder import RunDirectory

VOWELS = "aeiou"
COMMON = (
    "agent={loop: react_text, options: {format: plain, explain: false}, max_answer_tokens: 8, max_tokens: 256}",
    "model.scratch={layers: 1, hidden_size: 32, heads: 2, kv_heads: 1, vocab_size: 300, max_context: 256}",
    "model.scratch.initializer_range=0.2",
    "engine={max_num_seqs: 64, cache_tokens: 65536}",
    "algorithm.group_size=4",
    "trainer={tasks_per_step: 16, learning_rate: 1e-2, mini_batches: 2}",
    "rollout={max_concurrent: 2000, stall_report_s: 600}",
    "environment.max_concurrent=2000",
    "environment.step_timeout_s=600",
    "checkpoint.every=1000",
)


class WaitingVowels(AsyncEnv):
    """Three answers of letters; the reward of each is its share of vowels.

    Args:
        wait_s: Mean seconds of a step; lognormal with shape 1.
        slow_s: Seconds of the second step of a slow episode.
        slow_share: Probability that an episode is slow.
    """

    action_space = gym.spaces.Text(100)
    action_hint = "some letters"

    def __init__(self, wait_s: float = 0.2, slow_s: float = 0.0, slow_share: float = 0.0) -> None:
        self._wait_s, self._slow_s, self._slow_share = wait_s, slow_s, slow_share

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Draw the letter, and decide whether the episode is slow."""
        self._random, self._turn, self._reward = random.Random(seed), 0, 0.0
        self._is_slow = random.random() < self._slow_share  # differs between the members of a group
        return f"Write {self._random.choice(VOWELS)}.", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Wait, and return the share of vowels as the reward."""
        self._turn += 1
        is_slow = self._is_slow and self._turn == 2
        await asyncio.sleep(self._slow_s if is_slow else self._wait_s * random.lognormvariate(-0.5, 1.0))
        reward = sum(letter in VOWELS for letter in action) / (1 + len(action)) / 3
        self._reward += reward
        return "More.", reward, self._turn == 3, False, {"success": self._reward > 1 / 4}


def run(
    *,
    staleness: list[int] | None = None,
    steps: int = 12,
    slow_s: float = 60.0,
    slow_share: float = 0.1,
    wait_s: float = 0.2,
    tasks: int = 256,
    seed: int = 0,
    hidden: int = 256,
    loads: list[str] | None = None,
) -> dict[str, Any]:
    """Return the figures of each load and staleness.

    Args:
        staleness: Values of ``rollout.max_staleness``; 0, 2 and 4 by default.
        steps: Timed training steps of each run.
        slow_s: Seconds of the slow step in ``tails``.
        slow_share: Share of slow episodes in ``tails``.
        wait_s: Mean seconds of the other steps.
        tasks: Tasks of the evaluation after training, which does not wait.
        seed: Seed of model, tasks and sampling.
        hidden: Width of the model in ``busy``.
        loads: Some of ``tails``, ``waits`` and ``busy``; by default the first two.
    """
    options = {
        "tails": [f"wait_s={wait_s}", f"slow_s={slow_s}", f"slow_share={slow_share}"],
        "waits": [f"wait_s={5 * wait_s}"],
        "busy": [f"wait_s={wait_s}"],
    }
    overrides = {load: [f"environment.options.{option}" for option in found] for load, found in options.items()}
    overrides["busy"] += [f"model.scratch.hidden_size={hidden}", "trainer.learning_rate=1e-3"]
    figures: dict[str, Any] = {"torch_threads": torch.get_num_threads(), "steps": steps, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        for load in loads or ("tails", "waits"):
            found = {
                k: _train(Path(folder) / load, k, steps, tasks, seed, overrides[load]) for k in staleness or (0, 2, 4)
            }
            slowest = found.get(0)
            for k, measured in found.items():
                if slowest is not None:
                    measured["speedup"] = measured["steps_per_hour"] / slowest["steps_per_hour"]
                figures[f"{load}_{k}"] = measured
                print(f"{load}, staleness {k}: {measured}", file=sys.stderr)
    return figures


def _train(folder: Path, staleness: int, steps: int, tasks: int, seed: int, own: list[str]) -> dict[str, Any]:
    """Train all runs for the same number of steps, and time the last `steps` of them."""
    warm = 1 + max(4, staleness)
    overrides = [
        *COMMON,
        f"run.seed={seed}",
        f"run.directory={folder}",
        f"run.name=staleness-{staleness}",
        f"rollout.max_staleness={staleness}",
        *own,
    ]
    trained = agentrl.train(
        env=WaitingVowels,
        steps=warm + steps,
        overrides=overrides,
        progress=False,
    )
    lines = read_metrics(RunDirectory(trained.folder).metrics_file)
    timed = lines[warm:]
    seconds = [line["time/step_s"] for line in timed]
    busy = [max(line["time/train_s"], line["time/engine_busy_s"]) for line in timed]
    after = agentrl.evaluate(
        model=trained.checkpoint,
        tasks=tasks,
        seed=seed,
        overrides=["environment.options={wait_s: 0.0}"],
        progress=False,
    )
    return {
        "steps_per_hour": 3600 * len(timed) / sum(seconds),
        "step_s_median": statistics.median(seconds),
        "over_limit": sum(seconds) / sum(busy),
        "both_s": statistics.mean(line["time/train_s"] + line["time/engine_busy_s"] for line in timed),
        "groups_dropped": sum(line["rollout/groups_stale"] for line in lines),
        "bias_turns": lines[-1].get("bias/turns", 0.0),
        "bias_seconds": lines[-1].get("time/bias/seconds", 0.0),
        "staleness_mean": statistics.mean(line["staleness/mean"] for line in timed),
        "success": None if after.success is None else [after.success.mean, after.success.low, after.success.high],
        "training_reward": [line["reward/mean"] for line in lines],
    }
