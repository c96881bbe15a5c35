"""Sandboxes that fail, die and hang cost episodes their result, never their reward, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from agentrl.envs.programs import pipes

from agentrl.cli.bench import load_run
from agentrl.errors import UsageError
from agentrl.rollout import env_pool
from agentrl.sandbox import interpreter as life
from agentrl.sandbox.isolation import find_bubblewrap
from agentrl.sandbox.orphan_guard import OrphanGuard


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "SIGN_OF_LIFE_S", 1.0)
    monkeypatch.setattr(pipes, "PROGRAM_START_S", 3.0)
    monkeypatch.setattr(pipes, "PROGRAM_STOP_S", 1.0)
    monkeypatch.setattr(env_pool, "OrphanGuard", OrphanGuard)  # ends with its pool


@pytest.mark.slow
def test_trouble_leaves_nothing_behind() -> None:
    try:
        find_bubblewrap()
    except UsageError as error:
        pytest.skip(str(error))
    run = load_run(Path(__file__).parents[3] / "benchmarks" / "sandbox_episodes.py")
    figures = run(episodes=30, concurrency=6, trouble=0.3, seconds=1.0)
    assert figures["wrong_rewards"] == 0, figures["first_wrong_rewards"]
    assert figures["left"] == {"processes": 0, "handles": 0, "folders": 0, "tasks": 0}
    assert sum(figures["happened"].values()) > 5
    assert figures["finished"] + figures["sandbox_errors"] == 30
