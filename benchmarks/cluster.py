"""The quick start on two nodes of a Ray cluster, compared with one machine: the same model, seed and steps.

Both nodes are simulated on this machine, with rank 0 on one and the engine on the other. Needs the extra ray.

    agentrl bench cluster --json cluster.json                       # warm start and all 75 steps, twice
    agentrl bench cluster --model runs/warm steps=5
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from agentrl.config import load_config
from agentrl.observe.metrics import read_metrics
from agentrl.registry import Extra
from agentrl.runs.rl import train
from agentrl.runs.sft import warm_start
from agentrl.runs.start import start_run

RAY = Extra(name="ray", module="ray")
LAST = 10
"""Number of last steps whose mean is the result of a run."""
SHOWN = ("success/mean", "reward/mean", "train/loss", "train/grad_norm", "time/step/seconds")


def run(*, model: str | None = None, steps: int | None = None, seed: int = 0) -> dict[str, Any]:
    """Return figures of both runs: the first step, the mean of the last ten, and the largest probe difference.

    Args:
        model: Initial model; by default, a warm start is made first.
        steps: Steps of each run; those of the quick start by default.
        seed: Seed of the runs.
    """
    overrides = [f"run.seed={seed}", *([] if steps is None else [f"trainer.steps={steps}"])]
    with tempfile.TemporaryDirectory() as folder:
        overrides.append(f"run.directory={folder}")
        if model is None:
            warmed = warm_start(start_run(load_config("quickstart", [*overrides, "run.name=warm"]), kind="sft"))
            model = str(warmed.folder)
        overrides.append(f"model.path={model}")
        one_machine = _train([*overrides, "run.name=one-machine"])
        with two_nodes() as placement:
            two = _train([*overrides, "run.name=two-nodes", *placement])
            return {"one_machine": one_machine, "two_nodes": two}


def _train(overrides: Sequence[str]) -> dict[str, Any]:
    result = train(start_run(load_config("quickstart", overrides), kind="cluster"))
    lines = read_metrics(result.folder / "metrics.jsonl")
    found: dict[str, Any] = {
        name: {"first": lines[0][name], "last": fmean(line[name] for line in lines[-LAST:])}
        for name in SHOWN
        if name in lines[0]
    }
    return {**found, "largest_probe_difference": max(line["sync/probe_difference"] for line in lines)}


@contextmanager
def two_nodes() -> Iterator[Sequence[str]]:
    """Start a cluster with a node for the trainer and one for an engine; yield overrides that place a run on it."""
    cluster = RAY.load("ray.cluster_utils").Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "resources": {"trainer": 1}, "include_dashboard": False},
    )
    cluster.add_node(num_cpus=2, resources={"engine": 1})
    try:
        yield [f"cluster={{address: '{cluster.address}', rank: {{CPU: 1, trainer: 1}}, engine: {{CPU: 2, engine: 1}}}}"]
    finally:
        cluster.shutdown()
