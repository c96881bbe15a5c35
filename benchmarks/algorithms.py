"""Learning of each algorithm on the quick start; all runs of a seed start from the same warm start.

Finished runs in the folder are not repeated, so several processes can fill a table step by step:

    agentrl bench algorithms --json algorithms.json
    agentrl bench algorithms folder=runs/algorithms seeds=[0] algorithm=ppo
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson
import torch
from _progress import ProgressPrinter

import agentrl
from agentrl.config import Config, load_config
from agentrl.errors import TrainingError, UsageError
from agentrl.observe.files import replace_file
from agentrl.observe.metrics import read_metrics
from agentrl.runs.rl import RunResult, train
from agentrl.runs.sft import warm_start
from agentrl.runs.start import resume_run, start_run

RESULT = "result.json"
EDGE = 5
"""Number of steps at the start and at the end whose mean reward is reported."""
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
"""The shipped config of each algorithm, and its overrides."""


def run(
    *,
    algorithm: str | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = 75,
    tasks: int = 256,
    folder: str | None = None,
) -> dict[str, Any]:
    """Return the success on unseen tasks before and after training, with 95 % intervals, per algorithm and seed.

    Args:
        algorithm: One of `ALGORITHMS`; all by default.
        seeds: Seeds of the model, the tasks and the sampling.
        steps: RL training steps.
        tasks: Tasks per evaluation.
        folder: Folder of the runs, which is kept; a temporary folder by default.
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
    """Warm start of a seed, and the algorithms' runs from it."""

    def __init__(self, folder: Path, seed: int, steps: int, tasks: int) -> None:
        self._folder, self._seed, self._steps, self._tasks = folder, seed, steps, tasks

    def learn(self, name: str) -> dict[str, Any]:
        """Return the figures of one algorithm."""
        start = self._load_or_make("warm-start", self._warm_start)
        return self._load_or_make(name, lambda: {"before": start["success"], **self._train(name, start["checkpoint"])})

    def _load_or_make(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of `make`, stored by an earlier call if there was one."""
        result = self._folder / self._run(name) / RESULT
        if not result.exists():
            replace_file(result, orjson.dumps(make(), option=orjson.OPT_INDENT_2))
        found: dict[str, Any] = orjson.loads(result.read_bytes())
        return found

    def _run(self, name: str) -> str:
        return f"{name}-{self._seed}"

    def _warm_start(self) -> dict[str, Any]:
        # a partial warm start cannot be resumed
        shutil.rmtree(self._folder / self._run("warm-start"), ignore_errors=True)
        begun = start_run(self._config("quickstart", "warm-start"), kind="sft")
        result = warm_start(begun, watcher=ProgressPrinter(self._run("warm-start")))
        return self._evaluate(result)

    def _train(self, name: str, model: str) -> dict[str, Any]:
        shipped, changes = ALGORITHMS[name]
        folder = self._folder / self._run(name)
        began = time.perf_counter()
        if (folder / "checkpoints").exists():
            begun = resume_run(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            overrides = (f"trainer.steps={self._steps}", f"model.path={model}", *changes)
            begun = start_run(self._config(shipped, name, *overrides), kind=name)
        result = train(begun, watcher=ProgressPrinter(self._run(name)))
        seconds = time.perf_counter() - began
        rewards = [line["reward/mean"] for line in read_metrics(folder / "metrics.jsonl")]
        return self._evaluate(result) | {
            "reward_first_steps": fmean(rewards[:EDGE]),
            "reward_last_steps": fmean(rewards[-EDGE:]),
            "train_s": seconds,
        }

    def _config(self, shipped: str, name: str, *more: str) -> Config:
        common = (f"run.seed={self._seed}", f"run.directory={self._folder}", f"run.name={self._run(name)}")
        return load_config(shipped, [*common, *more])

    def _evaluate(self, result: RunResult) -> dict[str, Any]:
        if result.interrupted:
            raise TrainingError("the benchmark was interrupted", hint="repeat the command with its folder to continue")
        found = agentrl.evaluate(model=result.checkpoint, tasks=self._tasks, seed=self._seed).to_json()
        return {"checkpoint": result.checkpoint, "success": found["success"]}
