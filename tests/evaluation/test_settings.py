"""From a run's own config to that of its evaluation."""

from __future__ import annotations

from pathlib import Path

from agentrl.evaluation.settings import evaluation_config


def test_a_run_on_a_task_file_is_measured_on_its_evaluation_split(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "environment: {name: guess_number, tasks: mine.jsonl}\nevaluation: {split: test}\n"
    )
    environment = evaluation_config(model=str(tmp_path)).environment
    assert (environment.tasks, environment.split) == (None, "test")
