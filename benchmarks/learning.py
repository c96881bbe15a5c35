"""Learning of small agents in several environments and agent loops: warm start, evaluation, training, evaluation.

A new model of half a million parameters is trained for each combination, in some minutes on two CPU cores. The results
show that every combination learns, not how good an agent becomes: the runs are short, and end while rewards are rising.

    agentrl bench learning --json learning.json
    agentrl bench learning environment=frozen_lake loop=tool_calling folder=runs/lake
"""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from _progress import ProgressPrinter

import agentrl
from agentrl.config import load_config
from agentrl.errors import UsageError
from agentrl.evaluation.result import EvaluationResult
from agentrl.runs.sft import warm_start
from agentrl.runs.start import start_run

EVALUATED = {"tasks": 192, "samples": 1}
"""Number of tasks of an evaluation, and of episodes per task."""
FEW = {"webshop": {"tasks": 42, "samples": 4}, "retail": {"tasks": 160, "samples": 1}}
"""Numbers for smaller splits."""
COMMON: dict[str, Any] = {
    "model": {
        "path": "scratch",
        "scratch": {"layers": 2, "hidden_size": 128, "heads": 2, "kv_heads": 2, "vocab_size": 768},
    },
    "engine": {"type": "local", "max_num_seqs": 128, "lanes": 2},
    "sft": {
        "tokens_per_update": 4000,
        "learning_rate": 2.5e-3,
        "warmup_steps": 50,
        "observation_weight": 0.3,
        "check_every": 50,
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
        "evaluation": {"split": "test_unseen"},
        "model": {"scratch": {"numbered_names": True, "max_context": 2048}},
        "agent": {"max_turns": 20, "max_rejected_actions": 8, "max_answer_tokens": 24, "max_tokens": 2048},
        "sft": {"episodes": 1500, "stop_at": 0.2, "check_every": 25, "mistakes": 0.25},
    },
    "frozen_lake": {
        "environment": {"name": "frozen_lake"},
        "evaluation": {"split": "valid"},
        "model": {"scratch": {"max_context": 2048}},
        "agent": {"max_turns": 12, "max_answer_tokens": 16, "max_tokens": 2048},
        "sft": {"episodes": 4000, "stop_at": 0.2, "check_every": 10, "tokens_per_update": 2000},
    },
    "webshop": {
        "environment": {"name": "webshop", "options": {"products": 100}},
        "evaluation": {"split": "train"},
        "model": {"scratch": {"max_context": 4096, "vocab_size": 2048}},
        "agent": {"max_turns": 14, "max_answer_tokens": 48, "max_tokens": 4096},
        "sft": {"episodes": 2000, "stop_at": 0.1},
    },
    "retail": {
        "environment": {
            "name": "retail",
            "options": {"task_types": ["cancel_order"], "personas": ["direct"], "users": 6},
        },
        "evaluation": {"split": "train"},
        "model": {"scratch": {"max_context": 4096, "vocab_size": 2048}},
        "agent": {
            "system_prompt": "Act.",
            "max_turns": 10,
            "max_rejected_actions": 2,
            "max_answer_tokens": 64,
            "max_tokens": 4096,
        },
        "sft": {"episodes": 3000, "stop_at": 0.1, "check_every": 25},
        "trainer": {"tasks_per_step": 8},
    },
    "code": {
        "environment": {"name": "code", "options": {"size": "tiny"}},
        "evaluation": {"split": "valid"},
        "model": {"scratch": {"max_context": 512}},
        "agent": {"max_turns": 1, "max_answer_tokens": 64, "max_tokens": 512},
        "sft": {"episodes": 1000, "epochs": 10, "stop_at": 0.2, "check_every": 25, "tokens_per_update": 1500},
    },
}
RETAIL_TOOLS = ["find_user_id_by_email", "find_user_id_by_name_zip", "get_user_details", "get_order_details"]
LOOPS: dict[str, dict[str, Any]] = {
    "react_text": {"agent": {"options": {"format": "plain", "explain": False}}},
    "tool_calling": {
        "model": {"scratch": {"max_context": 4096}},
        "agent": {"system_prompt": "Act.", "max_answer_tokens": 40, "max_tokens": 2048},
        "sft": {"tokens_per_update": 8000},
    },
    "step_independent": {"agent": {"options": {"format": "plain", "history": 2, "explain": False}}},
}
SPECIAL: dict[tuple[str, str], dict[str, Any]] = {
    ("household", "react_text"): {"agent": {"options": {"restate_goal": True}}},
    ("household", "tool_calling"): {
        "agent": {"options": {"restate_goal": True}},
        "sft": {"episodes": 6000, "tokens_per_update": 4000},
    },
    ("retail", "tool_calling"): {
        "agent": {"max_answer_tokens": 64, "options": {"offer": [*RETAIL_TOOLS, "cancel_pending_order"]}}
    },
    ("retail", "step_independent"): {"agent": {"options": {"history": 10}}},
}
"""Additional overrides of combinations: repeat a goal that leaves the context, fewer tools, a longer memory."""


def run(
    *,
    environment: str | None = None,
    loop: str | None = None,
    folder: str | None = None,
    steps: int = 20,
    seed: int = 0,
) -> dict[str, Any]:
    """Return success and reward before and after training, on tasks of the split that `ENVIRONMENTS` names.

    Args:
        environment: One of `ENVIRONMENTS`; all by default.
        loop: One of `LOOPS`; all by default.
        folder: Folder of the runs; a temporary folder by default.
        steps: RL training steps.
        seed: Seed of the model, the tasks and the sampling.
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
    parts = [ENVIRONMENTS[environment], LOOPS[loop], SPECIAL.get((environment, loop), {}), {"agent": {"loop": loop}}]
    return functools.reduce(_merge, parts, COMMON)


def _merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    merged = dict(one)
    for key, value in other.items():
        merged[key] = _merge(merged[key], value) if isinstance(merged.get(key), dict) else value
    return merged


def _learn(folder: Path, config: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    if folder.exists():
        raise UsageError("the folder of the benchmark exists", got=str(folder), expected="a new folder")
    folder.mkdir(parents=True)
    source = folder / "config.yaml"
    source.write_text(yaml.safe_dump(config), encoding="utf-8")
    common = [f"run.seed={seed}", f"run.directory={folder}"]
    began = time.perf_counter()
    printer = ProgressPrinter(folder.name)
    cloned = warm_start(start_run(load_config(source, [*common, "run.name=warm-start"]), kind="sft"), watcher=printer)
    warm_start_s = time.perf_counter() - began
    measured = FEW.get(config["environment"]["name"], EVALUATED)
    before = agentrl.evaluate(model=cloned.checkpoint, seed=seed, **measured)
    began = time.perf_counter()
    overrides = [*common, "run.name=train"]
    trained = agentrl.train(source, model=str(cloned.checkpoint), steps=steps, overrides=overrides, watcher=printer)
    train_s = time.perf_counter() - began
    after = agentrl.evaluate(model=trained.checkpoint, seed=seed, **measured)
    return {
        "before": _shown(before),
        "after": _shown(after),
        "training_rewards": printer.rewards,
        "warm_start_s": warm_start_s,
        "train_s": train_s,
    }


def _shown(result: EvaluationResult) -> dict[str, Any]:
    found = result.to_json()
    return {name: found[name] for name in ("success", "reward", "turns")} | {"failed": result.failures}
