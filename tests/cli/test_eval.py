"""Evaluating from the command line and from a program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentrl as library
from agentrl.errors import UsageError

Cli = Callable[..., Any]


def test_the_expert_solves_the_household_and_the_json_says_so(agentrl: Cli, workplace: Path) -> None:
    words = ("eval", "--env", "household/valid_unseen", "--policy", "expert", "--tasks", "12")
    ended = agentrl(*words, "--json", "expert.json", "environment.options={size: tiny}")
    assert ended.code == 0, ended.err
    content = json.loads((workplace / "expert.json").read_text())
    assert content["success"]["mean"] == 1.0
    assert content["n_tasks"] == 12
    assert content["env"] == "household/valid_unseen"
    assert content["outcomes"] == {"finished": 12}
    assert sum(found["n_tasks"] for found in content["by_task_type"].values()) == 12
    assert "100.0 % (75.8 to 100.0)" in ended.out


def test_a_run_is_measured_with_its_own_settings_and_found_again(agentrl: Cli, trained_run: Path) -> None:
    words = ("eval", "--model", str(trained_run), "--tasks", "3", "--samples", "2")
    first = agentrl(*words, "--report")
    assert first.code == 0, first.err
    assert "guess_number/valid" in first.out
    (folder,) = (trained_run / "evaluations").iterdir()
    assert {"episodes.jsonl", "evaluation.json", "report.md", "report.html", "learning_curve.png"} <= {
        path.name for path in folder.iterdir()
    }
    stored = (folder / "episodes.jsonl").read_bytes()
    assert agentrl(*words).code == 0
    assert (folder / "episodes.jsonl").read_bytes() == stored

    assert agentrl("eval", "--model", str(trained_run), "--tasks", "4", "--samples", "2").code == 0
    assert (folder / "episodes.jsonl").read_bytes().count(b"\n") == 8
    assert agentrl(*words, "--temperature", "0").code == 0
    assert len(list((trained_run / "evaluations").iterdir())) == 2


def test_the_same_seed_gives_the_same_episodes(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    rewards = []
    for concurrency in ("1", "4"):
        words = ("--seed", "5", "--tasks", "3", "--concurrency", concurrency)
        assert agentrl("eval", "--model", str(trained_run), *words, "--json", "r.json", f"engine.slots={concurrency}")
        rewards.append(json.loads((workplace / "r.json").read_text())["tokens"])
    assert rewards[0] == rewards[1]


def test_a_service_that_is_not_there_fails_every_episode_and_says_so(agentrl: Cli, workplace: Path) -> None:
    words = ("--engine", "openai", "--url", "http://127.0.0.1:9/v1", "--model", "m", "--tasks", "1")
    ended = agentrl(
        "eval", "--env", "guess_number", *words, "engine.retries=0", "engine.timeout_s=5", "rollout.retries=0"
    )
    assert ended.code == 1
    assert "error: the machinery failed every episode" in ended.err
    assert "Traceback" not in ended.err


def test_from_a_program(trained_run: Path, workplace: Path) -> None:
    result = library.evaluate(model=str(trained_run), tasks=2, temperature=0.5)
    assert result.panel.environment == "guess_number/valid"
    assert result.panel.settings["sampling"]["temperature"] == 0.5
    assert "guess_number" in str(result)
    with pytest.raises(UsageError, match="unknown policy"):
        library.evaluate("guess_number", policy="nobody")


async def test_a_notebook_is_told_to_use_a_thread() -> None:
    with pytest.raises(UsageError, match=r"asyncio\.to_thread\(agentrl\.evaluate"):
        library.evaluate("guess_number", policy="random", tasks=1)
    with pytest.raises(UsageError, match=r"asyncio\.to_thread\(agentrl\.train"):
        library.train(env="guess_number")


def test_training_from_a_program_takes_tools_as_objects(workplace: Path) -> None:
    @library.tool
    def double(number: int) -> int:
        """Twice a number.

        Args:
            number: Which.
        """
        return 2 * number

    run = library.train(
        env="guess_number",
        model="scratch",
        algorithm="rloo",
        tools=[double, "calculator"],
        steps=1,
        seed=3,
        overrides=[
            *("trainer.tasks_per_step=1", "algorithm.group_size=2", "agent.max_turns=2", "agent.max_answer_tokens=8"),
            *("model.scratch.hidden_size=32", "model.scratch.layers=1", "trackers=[]"),
        ],
    )
    assert run.step == 1
    assert not run.interrupted
    assert Path(run.checkpoint, "model", "config.json").is_file()
    config = (run.folder / "config.yaml").read_text()
    assert "- double\n  - calculator" in config
    assert "advantage: rloo" in config
