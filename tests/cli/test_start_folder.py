"""A run is resumed in the folder in which it was started."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.start_folder import in_start_folder
from agentrl.observe.console import shown_path
from agentrl.observe.run_folder import RunDirectory
from agentrl.runs.start_record import start_folder, write_start_record

Cli = Callable[..., Any]
REWARD = "def reward(trajectory, task) -> float:\n    return float(len(trajectory.completions[-1]) % 3)\n"


def started(folder: Path, monkeypatch: pytest.MonkeyPatch, runs: Path) -> RunDirectory:
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    run = RunDirectory.create(runs, "r")
    write_start_record(run)
    return run


def test_a_run_inside_its_start_folder_may_move_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(tmp_path / "project", monkeypatch, Path("runs"))
    assert start_folder(run) == tmp_path / "project"
    copy = shutil.copytree(tmp_path / "project", tmp_path / "copy")
    assert start_folder(RunDirectory(copy / "runs" / "r")) == copy


def test_a_run_elsewhere_names_its_start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(tmp_path / "project", monkeypatch, tmp_path / "disk")
    assert start_folder(run) == tmp_path / "project"
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(tmp_path / "project")
    assert start_folder(run) is None
    with in_start_folder(run.path):
        assert Path.cwd() == tmp_path


def test_paths_are_shown_from_the_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(tmp_path / "project", monkeypatch, Path("runs"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with in_start_folder(run.path):
        assert Path.cwd() == tmp_path / "project"
        assert shown_path(run.path) == Path("project/runs/r")
        assert str(tmp_path / "project") in sys.path
    assert Path.cwd() == tmp_path
    assert "the run continues in the folder in which it was started" in capsys.readouterr().err
    with in_start_folder(tmp_path):  # no run that has recorded a folder
        assert Path.cwd() == tmp_path


@pytest.mark.slow
def test_a_run_with_relative_paths_is_resumed_from_another_folder(
    agentrl: Cli, workplace: Path, small: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "p.jsonl").write_text('{"prompt": "Say a"}\n{"prompt": "Say b"}\n')
    (workplace / "counting_rewards.py").write_text(REWARD)
    files = ("--tasks", "p.jsonl", "--reward", "./counting_rewards.py:reward", "--model", "scratch")
    begun = agentrl("train", *files, "trainer.steps=1", "run.name=r", *small, "agent.loop=single_turn")
    assert begun.code == 0, begun.err
    (workplace / "elsewhere").mkdir()
    monkeypatch.chdir(workplace / "elsewhere")
    ended = agentrl("train", "--resume", "../runs/r", "trainer.steps=2")
    assert ended.code == 0, ended.err
    assert f"done after step 2: {workplace / 'runs' / 'r'}" in ended.err
    assert os.listdir(workplace / "elsewhere") == []
    sys.modules.pop("counting_rewards", None)
