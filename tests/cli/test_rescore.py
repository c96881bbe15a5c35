"""Scoring the stored episodes of a run again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.evaluation.rescoring import environments_played, find_environment, find_tasks
from agentrl.trajectory import Trajectory

Cli = Callable[..., Any]

REWARDS = """
def parity(trajectory, task):
    return float(task.seed % 2)

def length(prompts, completions, **columns):
    return [float(sum(len(message["content"]) for message in messages)) for messages in completions]

def only_even(trajectory, task) -> float | None:
    return 1.0 if task.seed % 2 == 0 else None

def odd_fails(trajectory, task):
    if task.seed % 2:
        raise ValueError("an odd seed")
    return 2.0

def reads_all(trajectory, task):
    spoken = [message for message in trajectory.messages if message.role == "assistant"]
    assert spoken == trajectory.answers and len(trajectory.completions) == len(trajectory.turns)
    assert "whole number" in trajectory.messages[0].text + trajectory.messages[1].text
    return 1.0
"""


@pytest.fixture
def functions(workplace: Path) -> Path:
    (workplace / "stored_rewards.py").write_text(REWARDS)
    return workplace


def rescored(agentrl: Cli, run: Path, *words: str) -> dict[str, Any]:
    ended = agentrl("rescore", str(run), *words, "--json")
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_the_runs_own_rewards_are_reproduced(agentrl: Cli, trained_run: Path) -> None:
    found = rescored(agentrl, trained_run)
    assert found["scored"] == found["episodes"] == 8
    assert (found["changed"], found["errors"], found["without_messages"]) == (0, {}, 0)


@pytest.mark.slow
def test_new_rewards_read_messages_and_tasks(agentrl: Cli, trained_run: Path, functions: Path) -> None:
    assert rescored(agentrl, trained_run, "--reward", "stored_rewards:reads_all")["reward"] == 1.0
    found = rescored(agentrl, trained_run, "--reward", "stored_rewards:parity", "--output", "new.jsonl")
    rows = [json.loads(line) for line in (functions / "new.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    for row in rows:
        assert row["reward"] == row["components"]["parity"] == int(row["task_id"].removeprefix("train-")) % 2
        assert row["sources"] == ({"parity": 1.0} if row["reward"] else {})
    assert found["reward"] == sum(row["reward"] for row in rows) / 8
    assert found["groups_that_differ"] == 0  # a group has one task
    again = agentrl("rescore", str(trained_run), "--output", "new.jsonl")
    assert (again.code, "already exists" in again.err) == (2, True)


def test_episodes_are_scored_with_the_tasks_of_their_own_environment(workplace: Path) -> None:
    """The rows of two files have the same ids, 1 and 2; all episodes were scored with those of the last file."""
    for name in "abc":
        rows = [json.dumps({"prompt": "?", "ground_truth": f"{name}{number}"}) for number in (1, 2)]
        Path(f"{name}.jsonl").write_text("\n".join(rows))
    entries = "{a: {name: guess_number, tasks: a.jsonl}, b: {name: guess_number, tasks: b.jsonl}}"
    stage = "schedules={5: {environments.b.tasks: c.jsonl}}"
    parts = environments_played(load_config(None, [f"environments={entries}", stage, "trainer.steps=9"]))
    played = [
        Trajectory(id="", task_id=number, environment="guess_number", seed=0, group_id=f"7-{label}-{number}")
        for label, number in (("a", "1"), ("b", "1"), ("b~1", "2"))
    ]
    labels = [find_environment(parts, one).label for one in played]
    tasks = find_tasks(parts, {label: [one.task_id] for label, one in zip(labels, played, strict=True)})
    found = [tasks[label, one.task_id].ground_truth for label, one in zip(labels, played, strict=True)]
    assert found == ["a1", "b1", "c2"]


def test_groups_that_differ_are_counted(agentrl: Cli, trained_run: Path, functions: Path) -> None:
    found = rescored(agentrl, trained_run, "--reward", "stored_rewards:length")
    assert found["groups"] == 4
    assert found["groups_that_differ"] > 0
    assert found["changed"] == 8


def test_failures_name_file_and_line_once(agentrl: Cli, trained_run: Path, functions: Path) -> None:
    ended = agentrl("rescore", str(trained_run), "--reward", "stored_rewards:odd_fails")
    odd = [task for task in task_ids(agentrl, trained_run) if task % 2]
    assert 0 < len(odd) < 8, "the fixture needs both"
    assert f"{len(odd)} episodes failed: reward function stored_rewards:odd_fails" in ended.out.replace("\n", " ")
    assert ended.out.count("an odd seed") == 1
    found = rescored(agentrl, trained_run, "--reward", "stored_rewards:only_even")
    assert found["abstained"] == len(odd)


@pytest.mark.slow
def test_steps_and_tasks_are_selected(agentrl: Cli, trained_run: Path) -> None:
    assert rescored(agentrl, trained_run, "--first-step", "2")["episodes"] == 4
    none = agentrl("rescore", str(trained_run), "--task", "train-none")
    assert (none.code, "no matching episode" in none.err) == (2, True)


def test_what_cannot_be_rescored_is_refused(agentrl: Cli, trained_run: Path, functions: Path, tmp_path: Path) -> None:
    missing = agentrl("rescore", "nowhere")
    assert (missing.code, "nowhere is not a run" in missing.err) == (2, True)
    (evaluation := tmp_path / "evaluation-only").mkdir()
    (evaluation / "episodes.jsonl").touch()
    assert "is not a run: got an evaluation" in " ".join(agentrl("rescore", str(evaluation)).err.split())
    unknown = agentrl("rescore", str(trained_run), "--reward", "stored_rewards:nope")
    assert unknown.code == 2
    assert "nope" in unknown.err


def task_ids(agentrl: Cli, run: Path) -> list[int]:
    """Return the number of each stored episode's task."""
    ended = agentrl("view", str(run), "--terminal", "--count", "99")
    words = [line.split()[0] for line in ended.out.splitlines() if line.startswith("train-")]
    return [int(word.removeprefix("train-")) for word in words]
