"""Starts that cannot work: each explains why, and leaves the folder of runs unchanged."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.observe.experiment_trackers import WandbTracker
from agentrl.observe.run_folder import RunDirectory

Cli = Callable[..., Any]

MODULE = """
import gymnasium


class Broken(gymnasium.Env):
    def __init__(self):
        raise RuntimeError("no board")


class Unfit(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no task")
"""
SCRATCH = ("--env", "guess_number", "--model", "scratch")


def contents(folder: Path) -> dict[str, str]:
    """Every path under a folder, with where a link points or what a file holds."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    return found


@pytest.mark.parametrize("has_runs", [False, True], ids=["first run", "after another run"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "--env", "broken_world:Broken", "--model", "scratch"), "no board"),
        (("sft", "--env", "guess_number", "--model", "scratch", "environment.options={colour: red}"), "colour"),
        (("train", "--env", "broken_world:Unfit", "--model", "scratch", "environment.isolation=inline"), "no task"),
        (("train", *SCRATCH, "environment.options={colour: red}"), "colour"),
        (("train", *SCRATCH, "agent.loop=tool_calling", "agent.tools=[sql]"), "database is missing"),
        (("train", *SCRATCH, "trackers=[wandb]"), "pip install no_such_package"),
        (("sft", "quickstart", "trackers=[wandb]"), "pip install no_such_package"),
        (("train", *SCRATCH, "model.scratch={heads: 3}"), "sizes of the scratch model"),
        (("train", *SCRATCH, "model.device=cuda:99"), "cuda:99"),
        (("train", "--env", "guess_number", "--model", "empty"), "no model"),
        (("train", "--env", "guess_number", "--model", "torn"), "tokenizer"),
        (("train", *SCRATCH, "evaluation={every: 1, tasks: 999999999}"), "exceeds the split"),
        (("train", *SCRATCH, "run.name=../elsewhere"), "a path outside"),
        (("train", *SCRATCH, "run.directory=occupied"), "occupied"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_bad_start_leaves_the_folder_of_runs_as_it_was(
    agentrl: Cli,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    small: tuple[str, ...],
    words: tuple[str, ...],
    message: str,
    has_runs: bool,
) -> None:
    monkeypatch.setattr(WandbTracker, "package", "no_such_package")
    monkeypatch.syspath_prepend(workplace)
    (workplace / "broken_world.py").write_text(MODULE)
    (workplace / "occupied").write_text("a file")
    (workplace / "empty").mkdir()
    (workplace / "torn").mkdir()
    (workplace / "torn" / "config.json").write_text('{"model_type": "qwen3"}')
    if has_runs:
        RunDirectory.create(workplace / "runs", "mine").save_config("{}")
    before = contents(workplace)
    own = ("trackers", "agent.loop", *(() if "scratch" in words else ("model.scratch",)))
    ended = agentrl(*words, *(word for word in small if not word.startswith(own)))
    assert ended.code != 0
    assert message in ended.err
    assert "Traceback" not in ended.err
    after = {name: what for name, what in contents(workplace).items() if "__pycache__" not in name}
    assert after == before
