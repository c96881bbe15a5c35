"""A run is resumed in the folder in which it was started."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import agentrl as library
from agentrl.cli.start_folder import OptionsHere, in_start_folder
from agentrl.config import dump_config, load_config
from agentrl.errors import UsageError
from agentrl.observe.console import shown_path
from agentrl.observe.run_folder import RunDirectory
from agentrl.runs.start_record import start_folder, write_start_record

Cli = Callable[..., Any]
REWARD = "def reward(trajectory, task) -> float:\n    return float(len(trajectory.completions[-1]) % 3)\n"


def started(folder: Path, monkeypatch: pytest.MonkeyPatch, runs: Path) -> RunDirectory:
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    run = RunDirectory.create(runs, "r")
    write_start_record(run, resumed_by="train")
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


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, next to the folder of a run whose config has relative paths."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = started(tmp_path / "project", monkeypatch, Path("runs"))
    Path("counting_rewards.py").write_text(REWARD)
    Path("project_rewards.py").write_text(REWARD)
    rewards = "agent.reward=['./counting_rewards.py:reward', {name: 'project_rewards:reward', weight: 0}]"
    run.save_config(dump_config(load_config(None, ["environment=guess_number", rewards])))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    yield tmp_path / "elsewhere"
    for name in ("counting_rewards", "project_rewards", "own_rewards"):
        sys.modules.pop(name, None)


EVAL = ("eval", "../project/runs/r", "--policy", "random", "--tasks", "2")


def test_a_run_is_evaluated_with_the_files_of_its_start_folder(agentrl: Cli, elsewhere: Path) -> None:
    (elsewhere / "project_rewards.py").write_text("raise RuntimeError('the file of another folder')")
    ended = agentrl(*EVAL, "--json", "r.json")
    assert ended.code == 0, ended.err
    assert "relative paths of the run's config and of overrides begin in the folder in which it was" in ended.err
    assert set(json.loads((elsewhere / "r.json").read_text())["outcomes"]) <= {"finished", "truncated_turns"}
    assert "wrote r.json" in ended.err
    assert sorted(os.listdir(elsewhere)) == ["project_rewards.py", "r.json"]
    assert Path.cwd() == elsewhere


def test_the_options_of_an_evaluation_name_files_of_the_current_folder(agentrl: Cli, elsewhere: Path) -> None:
    (elsewhere / "own_rewards.py").write_text("def reward(trajectory, task) -> float:\n    return 7.0\n")
    (elsewhere / "p.jsonl").write_text('{"prompt": "Say a"}\n{"prompt": "Say b"}\n')
    ended = agentrl(*EVAL, "--reward", "./own_rewards.py:reward", "--prompts", "p.jsonl")
    assert ended.code == 0, ended.err
    assert "7.000" in ended.out


def test_from_python_the_start_folder_of_an_evaluated_run_is_named(
    elsewhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match=r"no file \./?counting_rewards.py|no file counting_rewards.py"):
        library.evaluate(model="../project/runs/r", policy="random", tasks=1)
    assert f"the run was started in {elsewhere.parent / 'project'}" in caplog.text


def test_options_become_absolute_if_they_name_files(elsewhere: Path) -> None:
    (elsewhere / "my_agent.py").touch()
    given = OptionsHere(Path("../project/runs/r"))
    assert given.command("{python} my_agent.py --most 3") == f"{{python}} {elsewhere}/my_agent.py --most 3"
    assert (given.command("true"), given.command(None)) == ("true", None)
    assert given.name("./my_agent.py:Loop/test") == f"{elsewhere}/my_agent.py:Loop/test"
    assert (given.name("my_agent:Loop"), given.name(None)) == ("my_agent:Loop", None)
    assert given.names(["environment", "./a.py:b=2"]) == ["environment", f"{elsewhere}/a.py:b=2"]
    assert (given.path("a/b"), given.path("my_agent.py"), given.path(None)) == ("a/b", f"{elsewhere}/my_agent.py", None)
    assert (given.output(Path("new.json")), given.output(None)) == (elsewhere / "new.json", None)


@pytest.mark.parametrize("run", [None, Path()])
def test_options_stay_as_they_are_in_a_command_that_stays(workplace: Path, run: Path | None) -> None:
    (workplace / "my_agent.py").touch()
    given, name = OptionsHere(run), "./my_agent.py:Loop"
    assert (given.command("my_agent.py"), given.path("my_agent.py"), given.name(name)) == (*["my_agent.py"] * 2, name)
    assert (given.names([name]), given.output(Path("x"))) == ([name], Path("x"))


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
    scored = agentrl("rescore", "../runs/r", "--output", "new.jsonl")
    assert scored.code == 0, scored.err
    assert len((workplace / "elsewhere" / "new.jsonl").read_text().splitlines()) == 8
    episode = agentrl("replay", "../runs/r").err.partition("agentrl replay ")[2].split()[1]
    assert agentrl("replay", "../runs/r", episode, "--n", "1").code == 0
    sys.modules.pop("counting_rewards", None)
