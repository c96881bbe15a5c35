from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

QUICK = (
    "model.scratch.hidden_size=32",
    "sft.episodes=8",
    "trainer.steps=1",
    "trainer.tasks_per_step=2",
    "algorithm.group_size=2",
    "trackers=[]",
)


@pytest.mark.slow
def test_the_demo_does_the_whole_job_and_says_so_when_nothing_was_learnt(
    agentrl: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "demo"
    ended = agentrl("demo", *QUICK, "--tasks", "3", "--seed", "1", "--folder", str(folder))
    assert ended.code == 1
    assert "the agent did not learn" in ended.err
    assert "on unseen tasks after training" in ended.out
    found = json.loads((folder / "demo.json").read_text())
    assert found["before"]["env"] == found["after"]["env"] == "household/test_unseen"
    assert found["before"]["n_tasks"] == found["after"]["n_tasks"] == 3
    parts = found["seconds_by_part"]
    assert found["seconds"] == parts["total"] >= parts["warm_start"] + parts["training"]
    assert (folder / "report.html").is_file()
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_pretrained_model_is_measured_as_it_comes_and_needs_no_warm_start(
    agentrl: Callable[..., Any], tmp_path: Path, workplace: Path, small: tuple[str, ...]
) -> None:
    runs = f"run.directory={tmp_path / 'runs'}"
    words = ("trainer.learning_rate=0", "trainer.steps=1")
    ended = agentrl("train", "--env", "guess_number", "--model", "scratch", *small, runs, *words)
    assert ended.code == 0, ended.err
    recipe, folder = tmp_path / "mine.yaml", tmp_path / "demo"
    recipe.write_text("environment: guess_number\nevaluation: {split: test, tasks: 3}\ntrainer: {steps: 1}\n")
    rest = [word for word in small if not word.startswith(("model.", "environment"))]
    words = ["--model", str((tmp_path / "runs" / "latest").resolve()), "--recipe", str(recipe), "--folder", str(folder)]
    ended = agentrl("demo", *words, *rest)
    assert ended.code == 1, ended.err
    assert "success of the unchanged model: 0.0 %" in ended.out
    assert "before training" not in ended.out
    found = json.loads((folder / "demo.json").read_text())
    assert found["as_it_comes"]["n_tasks"] == found["after"]["n_tasks"] == 3
    assert "before" not in found
    assert not (folder / "warm-start").exists()


def test_a_demo_never_writes_into_an_old_folder(agentrl: Callable[..., Any], tmp_path: Path) -> None:
    ended = agentrl("demo", "--folder", str(tmp_path))
    assert ended.code == 2
    assert "already exists" in ended.err
