"""A small finished run that the viewer shows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agentrl.runs.rl import train


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, which is not to be changed."""
    from support.fixtures import tiny_runs  # a plugin, which pytest has to load first

    with tiny_runs(tmp_path_factory.mktemp("finished")) as start:
        run = start("evaluation={every: 2, split: train, tasks: 3}", "observe.tokens=none")
        train(run)
    return run.folder.path


@pytest.fixture
def runs(finished_run: Path, tmp_path: Path) -> Path:
    """A folder with a copy of the finished run, named ``first``."""
    folder = tmp_path / "runs"
    shutil.copytree(finished_run, folder / "first")
    return folder
