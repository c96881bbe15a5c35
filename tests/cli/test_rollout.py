"""Playing without training, and training on what was played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from agentrl.cli import rollout
from agentrl.config.config import Config
from agentrl.config.engines import VLLMEngineConfig
from agentrl.errors import UsageError

Cli = Callable[..., Any]


@pytest.mark.slow
def test_episodes_are_played_viewed_and_trained_on(
    agentrl: Cli, trained_run: Path, workplace: Path, small: tuple[str, ...]
) -> None:
    words = ("--env", "guess_number", "--model", str(trained_run), "trainer.steps=2", *small[:-2])
    played = agentrl("rollout", *words, "run.name=played")
    assert played.code == 0, played.err
    assert "done: 4 groups, 8 episodes in" in played.err
    viewed = agentrl("view", "runs/played", "--terminal", "--count", "99")
    assert viewed.code == 0, viewed.err
    assert sum(line.startswith("train-") for line in viewed.out.splitlines()) == 8
    assert agentrl("rescore", "runs/played", "--json").code == 0
    trained = agentrl("train", *words, "--episodes", "runs/played", "run.name=trained")
    assert trained.code == 0, trained.err
    assert "4 stored groups of 2 episodes from" in trained.err
    assert f"agentrl view {(workplace / 'runs' / 'played')}" in trained.err
    assert (workplace / "runs" / "trained" / "checkpoints" / "step-000002" / "model").is_dir()
    checked = agentrl("train", *words, "--episodes", "runs/played", "--dry-run")
    assert checked.code == 0, checked.err
    few = agentrl("train", *words, "trainer.steps=9", "--episodes", "runs/played")
    assert few.code == 2
    assert "set trainer.steps=2" in few.err.replace("Set", "set")


def test_a_resumed_rollout_run_keeps_its_config(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    other = agentrl("rollout", "--resume", str(trained_run))
    assert other.code == 2
    assert "is not a rollout run" in other.err
    refused = agentrl("rollout", "--resume", str(trained_run), "--model", "scratch")
    assert refused.code == 2
    assert "resumed with its own config" in refused.err
    missing = agentrl("train", "quickstart", "--episodes", "nowhere")
    assert missing.code == 2
    assert "no trajectories found in" in missing.err


def test_every_option_arrives_in_the_config(agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Config] = []

    def start(config: Config) -> NoReturn:
        configs.append(config)
        raise UsageError("not played")

    monkeypatch.setattr(rollout, "start_rollout", start)
    (workplace / "tasks.jsonl").write_text('{"prompt": "one"}\n' * 5)
    words = ("--model", "scratch", "--engine", "vllm", "--tasks", "tasks.jsonl", "--reward", "environment")
    agentrl("rollout", "--env", "guess_number", *words, "trainer.steps=7")
    agentrl("rollout", "--tasks", "tasks.jsonl", "--model", "scratch")
    first, second = configs
    assert (first.sole_environment.name, first.sole_environment.tasks) == ("guess_number", "tasks.jsonl")
    assert (first.model.path, first.trainer.steps, first.agent.reward) == ("scratch", 7, ["environment"])
    assert isinstance(first.engine, VLLMEngineConfig)
    assert (second.sole_environment.name, second.agent.loop) == ("prompts", "single_turn")
    assert not isinstance(second.engine, VLLMEngineConfig)


def test_a_resumed_rollout_takes_overrides_and_nothing_else(agentrl: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed: list[tuple[str, Sequence[str]]] = []

    def resume(folder: Path, overrides: Sequence[str]) -> NoReturn:
        resumed.append((str(folder), list(overrides)))
        raise UsageError("not played")

    monkeypatch.setattr(rollout, "resume_rollout", resume)
    agentrl("rollout", "--resume", "runs/x", "trainer.steps=9")
    assert resumed == [("runs/x", ["trainer.steps=9"])]
    for option in ("--env", "--model", "--engine", "--tasks", "--reward"):
        refused = agentrl("rollout", "--resume", "runs/x", option, "other")
        assert (refused.code, "resumed with its own config" in refused.err) == (2, True), option
    assert agentrl("rollout", "quickstart", "--resume", "runs/x").code == 2
    assert len(resumed) == 1
