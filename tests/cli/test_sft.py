"""The warm start from the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Cli = Callable[..., Any]


def test_a_dry_run_is_about_the_warm_start(agentrl: Cli, workplace: Path) -> None:
    ended = agentrl("sft", "quickstart", "sft={episodes: 30, epochs: 2}", "agent.max_tokens=1000", "--dry-run")
    assert ended.code == 0, ended.err
    _, _, arithmetic = ended.out.partition("\nwhat ")
    assert re.search(r"demonstrations +30 ", arithmetic)
    assert f"at most {30 * 1000 * 2:,}" in arithmetic
    assert "groups per step" not in arithmetic
    assert list(workplace.iterdir()) == []


def test_a_warm_start_leaves_a_model_that_can_be_evaluated(agentrl: Cli, workplace: Path) -> None:
    ended = agentrl(
        "sft",
        *("--env", "household/train", "--model", "scratch"),
        *("environment.options={size: tiny}", "agent.loop=react_text", "agent.max_turns=12", "agent.max_tokens=1024"),
        *("sft.episodes=8", "sft.epochs=1", "trackers=[]"),
        *("model.scratch.hidden_size=32", "model.scratch.layers=1"),
    )
    assert ended.code == 0, ended.err
    assert "loss" in ended.err
    evaluated = agentrl("eval", "--model", "runs/latest", "--tasks", "1")
    assert evaluated.code == 0, evaluated.err
    assert "household/valid_seen" in evaluated.out
