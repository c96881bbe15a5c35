"""Evaluations during training: their sampling, seed, metrics and checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import agentrl
from agentrl.config import load_config
from agentrl.errors import ConfigError, Outcome
from agentrl.evaluation.panel import EvaluatedEpisode, Panel
from agentrl.evaluation.periodic import _means, _metrics, check_panels
from agentrl.evaluation.result import EvaluationResult, summarize
from agentrl.observe.metrics import read_metrics
from agentrl.runs.rl import train
from agentrl.runs.start import Run
from agentrl.trajectory import Trajectory


@pytest.mark.slow
def test_evaluations_have_their_own_sampling_and_the_seed_of_the_run(
    tiny_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = tiny_run(
        "run.seed=5",
        "trainer.steps=1",
        "evaluation={every: 1, tasks: 6, samples: 2, split: test, sampling: {temperature: 0.4}}",
    )
    train(run)
    (line,) = read_metrics(run.folder.metrics_file)
    words = [f"run.directory={tmp_path / 'evaluations'}"]
    found = {
        (seed, temperature): agentrl.evaluate(
            model=str(run.folder.path),
            tasks=6,
            samples=2,
            seed=seed,
            temperature=temperature,
            overrides=words,
            progress=False,
        ).reward
        for seed, temperature in ((5, None), (5, 1.0), (0, None))
    }
    means = {key: reward.mean for key, reward in found.items() if reward is not None}
    assert line["eval/reward"] == pytest.approx(means[5, None], abs=1e-6)
    assert len(set(means.values())) == 3, "neither the run's sampling nor another seed gives this reward"


def result(*successes: bool | None) -> EvaluationResult:
    """Return the result of one episode per task; tasks are of types a, b, a, b, …."""
    episodes = [
        EvaluatedEpisode(
            task_id=str(number),
            sample=0,
            trajectory=Trajectory(
                id=f"{number}/0",
                task_id=str(number),
                environment="world",
                seed=0,
                group_id=str(number),
                outcome=Outcome.FINISHED,
                success=success,
                reward=float(number),
                task_type="ab"[number % 2],
            ),
        )
        for number, success in enumerate(successes)
    ]
    panel = Panel(environment="world/test", policy="engine", model="m", n_tasks=len(episodes), samples=1, seed=0)
    return summarize(panel, episodes, seconds=1.0)


def test_success_is_measured_by_task_type() -> None:
    metrics = _metrics(result(True, False, True, False, False), "eval/x/")
    assert metrics["eval/x/success"] == 0.4
    assert (metrics["eval/x/success/a"], metrics["eval/x/success/b"]) == (pytest.approx(2 / 3), 0.0)


def test_means_are_over_environments_that_all_report_the_value() -> None:
    means = _means([result(True, True), result(False, False, True, False)])
    assert (means["eval/success"], means["eval/reward"]) == (0.625, 1.0)
    means = _means([result(True, True), result(None, None, None, None)])
    assert "eval/success" not in means
    assert means["eval/reward"] == 1.0


@pytest.mark.parametrize(("split", "tasks"), [("valid", 900), ("train", 9000)])
def test_all_tasks_of_the_evaluated_split_can_be_asked_for(split: str, tasks: int) -> None:
    """Retail has ten times as many tasks to train on as to evaluate."""
    words = ["environment=retail", f"evaluation.split={split}", "evaluation.every=1"]
    check_panels(load_config(None, [*words, f"evaluation.tasks={tasks}"]))
    with pytest.raises(ConfigError, match=f"of retail/{split}, expected at most {tasks:,}"):
        check_panels(load_config(None, [*words, f"evaluation.tasks={tasks + 1}"]))
