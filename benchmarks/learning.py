"""Whether small agents learn, in several environments and agent loops: warm start, measurement, training, measurement.

The model has half a million parameters and starts from nothing; a combination takes some minutes on two CPU cores. What
is shown is that every combination trains, not how good an agent becomes: the runs are short, and end while they rise.

    agentrl bench learning --json learning.json
    agentrl bench learning environment=sokoban loop=tool_calling folder=runs/sokoban
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

import agentrl
from agentrl.assembly.runs import start_run
from agentrl.config import load_config
from agentrl.errors import UsageError
from agentrl.evaluation.result import EvaluationResult
from agentrl.warm_start import warm_start

COMMON: dict[str, Any] = {
    "model": {
        "path": "scratch",
        "scratch": {"layers": 2, "hidden_size": 128, "heads": 2, "kv_heads": 2, "vocab_size": 768},
    },
    "engine": {"type": "local", "slots": 128, "lanes": 2},
    "sft": {
        "tokens_per_update": 4000,
        "learning_rate": 2.5e-3,
        "warmup_steps": 50,
        "observation_weight": 0.3,
        "check_every": 25,
        "check_tasks": 64,
    },
    "algorithm": {"advantage": "gigpo", "group_size": 8},
    "trainer": {
        "optimizer": "muon",
        "learning_rate": 5e-4,
        "warmup_steps": 3,
        "tasks_per_step": 16,
        "mini_batches": 2,
        "tokens_per_micro_batch": 4096,
        "lanes": 2,
    },
    "checkpoint": {"every": 50},
}
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "household": {
        "environment": {"name": "household", "options": {"size": "tiny", "rooms": ["kitchen"]}},
        "evaluation": {"split": "valid_unseen"},
        "model": {"scratch": {"numbered_names": True, "max_context": 2048}},
        "agent": {"max_turns": 20, "max_refused": 8, "max_answer_tokens": 24, "max_tokens": 2048},
        "sft": {"episodes": 1500, "stop_at": 0.25, "mistakes": 0.25},
    },
    "sokoban": {
        "environment": {"name": "sokoban", "options": {"size": 5}},
        "evaluation": {"split": "valid"},
        "model": {"scratch": {"max_context": 2048}},
        "agent": {"max_turns": 12, "max_answer_tokens": 16, "max_tokens": 2048},
        "sft": {"episodes": 4000, "stop_at": 0.4, "tokens_per_update": 2000},
    },
    "webshop": {
        "environment": {"name": "webshop", "options": {"products": 1000}},
        "evaluation": {"split": "valid"},
        "model": {"scratch": {"max_context": 6144, "vocab_size": 2048}},
        "agent": {"max_turns": 6, "max_answer_tokens": 32, "max_tokens": 6144, "options": {"list_actions": True}},
        "sft": {"episodes": 2000, "stop_at": 0.15, "tokens_per_update": 2500},
    },
    "retail": {
        "environment": {"name": "retail", "options": {"task_types": ["cancel_order", "return_items"]}},
        "evaluation": {"split": "valid"},
        "model": {"scratch": {"max_context": 6144, "vocab_size": 2048}},
        "agent": {"max_turns": 16, "max_answer_tokens": 64, "max_tokens": 6144},
        "sft": {"episodes": 2000, "stop_at": 0.1},
    },
}
LOOPS: dict[str, dict[str, Any]] = {
    "react_text": {"format": "plain", "restate_goal": True, "explain": False},
    "tool_calling": {"restate_goal": True},
    "step_independent": {"format": "plain", "history": 2, "explain": False},
}


def run(
    *,
    environment: str | None = None,
    loop: str | None = None,
    folder: str | None = None,
    steps: int = 30,
    seed: int = 0,
) -> dict[str, Any]:
    """Success and score before and after training by reward, on unseen tasks.

    Args:
        environment: Which of `ENVIRONMENTS`; all when left out.
        loop: Which of `LOOPS`; all when left out.
        folder: Where the runs go; a temporary folder when left out.
        steps: Of training by reward.
        seed: Of the model, the tasks and the sampling.
    """
    figures: dict[str, Any] = {"torch_threads": torch.get_num_threads(), "steps": steps, "seed": seed}
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(folder or temporary)
        for env in _chosen(environment, ENVIRONMENTS, "environment"):
            for name in _chosen(loop, LOOPS, "loop"):
                figures[f"{env}_{name}"] = _learn(place / f"{env}-{name}", _config(env, name), steps, seed)
    return figures


def _chosen(name: str | None, known: dict[str, Any], what: str) -> list[str]:
    if name is not None and name not in known:
        raise UsageError(f"no {what} of this name in the benchmark", got=name, expected=", ".join(known))
    return list(known) if name is None else [name]


def _config(environment: str, loop: str) -> dict[str, Any]:
    merged = _merge(COMMON, ENVIRONMENTS[environment])
    return _merge(merged, {"agent": {"loop": loop, "options": LOOPS[loop]}})


def _merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    merged = dict(one)
    for key, value in other.items():
        merged[key] = _merge(merged[key], value) if isinstance(merged.get(key), dict) else value
    return merged


def _learn(folder: Path, config: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    folder.mkdir(parents=True)
    source = folder / "config.yaml"
    source.write_text(yaml.safe_dump(config), encoding="utf-8")
    common = [f"run.seed={seed}", f"run.directory={folder}"]
    began = time.perf_counter()
    cloned = warm_start(start_run(load_config(source, [*common, "run.name=warm-start"]), kind="sft"))
    warm_start_s = time.perf_counter() - began
    before = agentrl.evaluate(model=cloned.checkpoint, tasks=256, seed=seed)
    began = time.perf_counter()
    trained = agentrl.train(source, model=str(cloned.checkpoint), steps=steps, overrides=[*common, "run.name=train"])
    train_s = time.perf_counter() - began
    after = agentrl.evaluate(model=trained.checkpoint, tasks=256, seed=seed)
    return {"before": _shown(before), "after": _shown(after), "warm_start_s": warm_start_s, "train_s": train_s}


def _shown(result: EvaluationResult) -> dict[str, Any]:
    found = result.to_json()
    return {name: found[name] for name in ("success", "reward", "turns")} | {"failed": result.failed}
