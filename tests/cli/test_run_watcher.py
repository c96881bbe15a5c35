"""Progress of a run on the terminal: the live panel and plain lines."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from agentrl.observe.progress import Phase, RunStatus
from agentrl.observe.terminal import RECENT, LineWatcher, LiveWatcher

METRICS = {"success/mean": 0.5, "reward/mean": 0.25, "staleness/mean": 1.0, "time/share/rollout": 0.75}


def panel(watcher: LiveWatcher) -> str:
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as capture:
        console.print(watcher)
    return capture.get()


def test_the_panel_shows_phase_progress_and_recent_steps() -> None:
    watcher = LiveWatcher(Live(console=Console(file=io.StringIO())))
    status = RunStatus(steps=40)
    watcher.on_start(Path("runs/mine"), status)
    for step in range(1, 13):
        status.step = step
        watcher.on_step(step, METRICS)
    status.phase, status.episodes_running, status.episodes_done = Phase.ROLLOUT, 7, 3
    shown = panel(watcher)
    lines = shown.splitlines()
    assert lines[0].startswith("runs/mine  rollout  step 12/40")
    assert "7 episodes running, 3 done" in lines[2]
    assert [line.split()[0] for line in lines[4:]] == [str(step) for step in range(13 - RECENT, 13)]
    for word in ("success", "50.0%", "waiting for episodes", "75%", "staleness", "1.00"):
        assert word in shown
    assert "tokens/s" not in shown


def test_failed_episodes_are_shown_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    watcher, lines = LiveWatcher(Live(console=Console(file=io.StringIO()))), LineWatcher()
    for step, retries in ((1, 0.0), (2, 24.0)):
        for one in (watcher, lines):
            one.on_start(Path("runs/mine"), RunStatus(steps=2)) if step == 1 else None
            one.on_step(step, {**METRICS, "rollout/retries": retries, "rollout/groups_failed": retries / 12})
        assert ("failed" in panel(watcher)) is bool(retries)
    said = capsys.readouterr().err.splitlines()
    assert "failed" not in said[-2]
    assert "retries 24  failed groups 2" in said[-1]


def test_pairs_show_loss_and_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = LineWatcher()
    watcher.on_start(Path("runs/mine"), RunStatus(steps=1))
    watcher.on_step(1, {"preferences/loss": 0.6931, "preferences/accuracy": 0.5})
    assert capsys.readouterr().err.splitlines()[-1] == "step 1/1  loss 0.693  accuracy 50.0%"


def test_a_second_run_begins_with_an_empty_table() -> None:
    watcher = LiveWatcher(Live(console=Console(file=io.StringIO())))
    watcher.on_start(Path("first"), RunStatus(steps=1))
    watcher.on_step(1, METRICS)
    watcher.on_start(Path("second"), RunStatus(steps=2))
    assert "50.0%" not in panel(watcher)


def test_lines_are_few_during_a_warm_start(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = LineWatcher()
    watcher.on_start(Path("runs/mine"), RunStatus(steps=100))
    for step in range(1, 101):
        watcher.on_step(step, {"sft/loss": 1.0})
    watcher.on_message("nobody answers")
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if "loss 1.000" in line]) == 20
    assert lines[-2].startswith("step 100/100")
    assert lines[-1] == "nobody answers"
