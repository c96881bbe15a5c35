"""The warm start from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Cli = Callable[..., Any]


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
