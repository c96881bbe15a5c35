"""Real packages of trackers, in an environment of their own: `make test-trackers`."""

import os
import subprocess
from pathlib import Path

import pytest

PYTHON = "bin/python"


@pytest.fixture(scope="session")
def tracked_run(tmp_path_factory):
    """Train a small run with a tracker in the environment of the trackers; return its folder."""
    home = os.environ.get("AGENTRL_TRACKERS")
    if home is None:
        pytest.skip("the packages of trackers are not installed: make test-trackers")
    root = Path(__file__).parents[2]

    def run(*trackers, variables=None, program="train_tiny.py"):
        folder = tmp_path_factory.mktemp("tracked")
        paths = [str(root / "tests" / "worlds"), str(root / "tests")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            **(variables or {}),
        }
        command = [str(Path(home) / PYTHON), str(Path(__file__).with_name(program)), str(folder), *trackers]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=folder)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found = folder / "runs" / "run"
        assert "continues without it" not in (found / "logs" / "agentrl.log").read_text()
        return found

    return run


@pytest.fixture
def log_oddities(tmp_path):
    """Log what services refuse or lose elsewhere with a tracker, in two parts of one run; return its folder."""
    home = os.environ.get("AGENTRL_TRACKERS")
    if home is None:
        pytest.skip("the packages of trackers are not installed: make test-trackers")

    def log(tracker, **variables):
        program = Path(__file__).with_name("log_oddities.py")
        ended = subprocess.run(
            [str(Path(home) / PYTHON), str(program), str(tmp_path), tracker],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "continues without it" not in ended.stderr, ended.stderr
        return tmp_path / tracker

    return log


@pytest.fixture(scope="session")
def read_with():
    """Run a program in the environment of the trackers, and return what it prints."""

    def read(program, *words, variables=None):
        command = [str(Path(os.environ["AGENTRL_TRACKERS"]) / PYTHON), "-c", program, *map(str, words)]
        environment = {**os.environ, **(variables or {})}
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment).stdout

    return read
