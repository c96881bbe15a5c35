"""Learning of published recipes on the quick start's task: success on unseen tasks before and after training.

A small new model clones the expert of household tasks, as in the quick start. Each recipe then trains it with its own
algorithm, loss, clipping, KL, filters, sampling and schedules (with `size=small`). Environment, prompts, limits,
optimizer, learning rate and episodes per step are the quick start's, because published learning rates are for models
with billions of parameters. Finished runs in the folder are not repeated:

    agentrl bench recipes --json recipes.json
    agentrl bench recipes 'recipes=["opo", "gpg"]' folder=runs/recipes steps=50
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from _progress import ProgressPrinter

import agentrl
from agentrl.config import Config, load_config
from agentrl.errors import TrainingError
from agentrl.observe.files import replace_file
from agentrl.runs.rl import RunResult, train
from agentrl.runs.sft import warm_start
from agentrl.runs.start import start_run

RECIPES = (
    "simplerl_zoo",
    "skythought",
    "opo",
    "gpg",
    "dapo",
    "entropy_kl_cov",
    "pacs",
    "skywork_or1",
    "ares",
    "deepscaler",
)
"""Default recipes, which differ in advantage, loss, schedule or temperature."""
TASK = (
    "environment={name: household, split: train, options: {size: tiny, rooms: [kitchen]}}",
    "agent.loop=react_text",
    "agent.options={format: plain, restate_goal: true, explain: false}",
    "agent.max_turns=30",
    "agent.max_rejected_actions=8",
    "agent.max_answer_tokens=16",
    "agent.max_tokens=1536",
    "agent.reward=[environment]",
    "engine.max_num_seqs=128",
    "rollout.max_concurrent=128",
    "trainer.optimizer=muon",
    "trainer.warmup_steps=8",
    "trainer.tokens_per_micro_batch=4096",
    "evaluation.split=test_unseen",
    "checkpoint.every=1000",
)
"""The quick start's task, limits and optimizer."""
EPISODES = 128
"""Episodes per step."""
LEARNING_RATES = {"trainer": 5e-4, "trainer.critic": 1e-3, "trainer.process_reward": 5e-4}
"""Learning rates of the policy, of the critic, and of a trained process reward."""
EDGE = 5
"""Number of steps at the start and at the end whose mean reward is reported."""


def run(
    *,
    recipes: Sequence[str] = RECIPES,
    steps: int = 30,
    tasks: int = 512,
    seed: int = 0,
    folder: str | None = None,
) -> dict[str, Any]:
    """Return the success of each recipe on unseen tasks before and after training, with 95 % intervals.

    Args:
        recipes: Names of recipes, without ``recipes/``.
        steps: RL training steps.
        tasks: Tasks per evaluation.
        seed: Seed of the model, the tasks and the sampling.
        folder: Folder of the runs, which is kept; a temporary folder by default.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(folder or temporary).resolve()
        configs = {name: _config(place, name, steps, seed) for name in recipes}
        start = _once(place / "start.json", lambda: _warm_start(place, seed, tasks))
        figures = {}
        for name, config in configs.items():
            result = place / f"{name}.json"
            figures[name] = _once(result, partial(_learn, config, start["checkpoint"], tasks))
    before = start["success"]
    learned = [name for name, row in figures.items() if row["success"]["low"] > before["high"]]
    return {"steps": steps, "tasks": tasks, "seed": seed, "before": before, "learned": learned, "recipes": figures}


def _once(result: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `make`, stored by an earlier call if there was one."""
    if not result.exists():
        shutil.rmtree(result.with_suffix(""), ignore_errors=True)
        replace_file(result, json.dumps(make(), indent=1).encode())
    found: dict[str, Any] = json.loads(result.read_bytes())
    return found


def _warm_start(place: Path, seed: int, tasks: int) -> dict[str, Any]:
    config = load_config("quickstart", [f"run.seed={seed}", f"run.directory={place}", "run.name=start"])
    return _evaluate(warm_start(start_run(config, kind="sft"), watcher=ProgressPrinter("start")), tasks, seed)


def _learn(config: Config, model: str, tasks: int) -> dict[str, Any]:
    """Train a recipe from the warm start, and return its success afterwards."""
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": model})})
    watcher = ProgressPrinter(str(config.run.name))
    began = time.perf_counter()
    trained = train(start_run(config, kind="train"), watcher=watcher)
    seconds = time.perf_counter() - began
    first, last = (fmean(part) for part in (watcher.rewards[:EDGE], watcher.rewards[-EDGE:]))
    rewards = {"reward_first_steps": first, "reward_last_steps": last}
    return _evaluate(trained, tasks, config.run.seed) | rewards | {"train_s": seconds}


def _config(place: Path, name: str, steps: int, seed: int) -> Config:
    small = load_config(f"recipes/{name}", ["size=small"])
    trainer = small.trainer
    has = {"trainer": True, "trainer.critic": trainer.critic, "trainer.process_reward": trainer.process_reward}
    size = [f"trainer.steps={steps}", f"trainer.tasks_per_step={EPISODES // small.algorithm.group_size}"]
    rates = [f"{section}.learning_rate={rate}" for section, rate in LEARNING_RATES.items() if has[section]]
    common = [f"run.seed={seed}", f"run.directory={place}", f"run.name={name}"]
    return load_config(f"recipes/{name}", ["size=small", *common, *TASK, *size, *rates])


def _evaluate(result: RunResult, tasks: int, seed: int) -> dict[str, Any]:
    if result.interrupted:
        raise TrainingError("the benchmark was interrupted", hint="repeat the command with its folder to continue")
    found = agentrl.evaluate(model=result.checkpoint, tasks=tasks, seed=seed).to_json()
    return {"checkpoint": str(result.checkpoint), "success": found["success"]}
