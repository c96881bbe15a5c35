"""Whether each algorithm learns the quick start: one warm start per seed, from which all of them go on.

What is finished in the folder is not done again, so that a table can be filled bit by bit, by several processes:

    agentrl bench algorithms --json algorithms.json
    agentrl bench algorithms folder=runs/algorithms seeds=[0] algorithm=ppo
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson
import torch

import agentrl
from agentrl.builders.run import resume_run, start_run
from agentrl.config import Config, load_config
from agentrl.errors import TrainingError, UsageError
from agentrl.observe.files import replace_file
from agentrl.observe.metrics import read_metrics
from agentrl.observe.progress import RunStatus, RunWatcher
from agentrl.runs.rl import RunResult, train
from agentrl.runs.sft import warm_start

RESULT = "result.json"
EDGE = 5
"""Steps whose mean reward is told, of the first and of the last."""
PLAIN_GRPO = ("algorithm.advantage=grpo",)
ALGORITHMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ppo": ("quickstart_ppo", ()),
    "grpo": ("quickstart", PLAIN_GRPO),
    "gspo": (
        "quickstart",
        (*PLAIN_GRPO, "algorithm.loss=gspo", "algorithm.loss_options={}", "algorithm.aggregation=seq-mean-token-mean"),
    ),
    "dapo": (
        "quickstart",
        (
            *PLAIN_GRPO,
            "algorithm.loss=dapo",
            "algorithm.loss_options={}",
            "algorithm.dynamic_sampling=true",
            "algorithm.shaping={overlong: {buffer: 256}}",
        ),
    ),
    "gigpo": ("quickstart", ()),
}
"""The shipped config of each, and what it changes there."""


def run(
    *,
    algorithm: str | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = 75,
    tasks: int = 256,
    folder: str | None = None,
) -> dict[str, Any]:
    """Success on unseen tasks before and after training, with 95 % intervals, of every algorithm and seed.

    Args:
        algorithm: Which of `ALGORITHMS`; all when left out.
        seeds: Of the model, the tasks and the sampling.
        steps: Of training by reward.
        tasks: Of each evaluation.
        folder: Where the runs go, and stay; a temporary folder when left out.
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise UsageError("no algorithm of this name in the benchmark", got=algorithm, expected=", ".join(ALGORITHMS))
    chosen = list(ALGORITHMS) if algorithm is None else [algorithm]
    figures: dict[str, Any] = {"torch_threads": torch.get_num_threads(), "steps": steps, "tasks": tasks}
    with tempfile.TemporaryDirectory() as temporary:
        for seed in seeds:
            bench = _Seed(Path(folder or temporary), seed, steps, tasks)
            figures |= {f"{name}_{seed}": bench.learn(name) for name in chosen}
    return figures


class _Seed:
    """One seed's warm start, and what the algorithms make of it."""

    def __init__(self, folder: Path, seed: int, steps: int, tasks: int) -> None:
        self._folder, self._seed, self._steps, self._tasks = folder, seed, steps, tasks
        self._watcher = _Teller()

    def learn(self, name: str) -> dict[str, Any]:
        """Figures of one algorithm."""
        start = self._kept("warm-start", self._warm_start)
        return self._kept(name, lambda: {"before": start["success"], **self._train(name, start["checkpoint"])})

    def _kept(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `make` gives, or gave in an earlier call."""
        result = self._folder / self._run(name) / RESULT
        if not result.exists():
            replace_file(result, orjson.dumps(make(), option=orjson.OPT_INDENT_2))
        found: dict[str, Any] = orjson.loads(result.read_bytes())
        return found

    def _run(self, name: str) -> str:
        return f"{name}-{self._seed}"

    def _warm_start(self) -> dict[str, Any]:
        shutil.rmtree(
            self._folder / self._run("warm-start"), ignore_errors=True
        )  # a part of one cannot be gone on with
        result = warm_start(start_run(self._config("quickstart", "warm-start"), kind="sft"), watcher=self._watcher)
        return self._measured(result)

    def _train(self, name: str, model: str) -> dict[str, Any]:
        shipped, changes = ALGORITHMS[name]
        folder = self._folder / self._run(name)
        began = time.perf_counter()
        if (folder / "checkpoints").exists():
            begun = resume_run(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            told = (f"trainer.steps={self._steps}", f"model.path={model}", *changes)
            begun = start_run(self._config(shipped, name, *told), kind=name)
        result = train(begun, watcher=self._watcher)
        seconds = time.perf_counter() - began
        rewards = [line["reward/mean"] for line in read_metrics(folder / "metrics.jsonl")]
        return self._measured(result) | {
            "reward_first_steps": fmean(rewards[:EDGE]),
            "reward_last_steps": fmean(rewards[-EDGE:]),
            "train_s": seconds,
        }

    def _config(self, shipped: str, name: str, *more: str) -> Config:
        common = (f"run.seed={self._seed}", f"run.directory={self._folder}", f"run.name={self._run(name)}")
        return load_config(shipped, [*common, *more])

    def _measured(self, result: RunResult) -> dict[str, Any]:
        if result.interrupted:
            raise TrainingError("the benchmark was interrupted", hint="the same command with its folder goes on")
        found = agentrl.evaluate(model=result.checkpoint, tasks=self._tasks, seed=self._seed).to_json()
        return {"checkpoint": result.checkpoint, "success": found["success"]}


class _Teller(RunWatcher):
    """Says how a run goes."""

    def on_start(self, folder: Path, status: RunStatus) -> None:
        """Name the run that the next lines are of."""
        self._name = folder.name

    def on_message(self, text: str) -> None:
        """Say it."""
        print(f"{self._name}: {text}", file=sys.stderr)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say the mean reward of a training step."""
        if (reward := metrics.get("reward/mean")) is not None:
            self.on_message(f"step {step}: mean reward {reward:.3f}")
