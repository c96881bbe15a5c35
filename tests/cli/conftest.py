"""A command line in this process, and one small trained run that many tests read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.cli import main

SMALL = (
    "agent.loop=react_text",
    "agent.max_turns=3",
    "agent.max_answer_tokens=12",
    "agent.max_tokens=512",
    "algorithm.group_size=2",
    "trainer.tasks_per_step=2",
    "trackers=[]",
    "model.scratch.hidden_size=32",
    "model.scratch.layers=1",
)
"""Overrides that make a run of `guess_number` take about a second."""


@pytest.fixture(scope="session")
def small() -> tuple[str, ...]:
    """The overrides of a small run."""
    return SMALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def agentrl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Run a command as the program would."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words: str) -> Ended:
        capsys.readouterr()
        code = 0
        try:
            main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Ended(code=code, out=captured.out, err=captured.err)

    return run


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on `guess_number` with a new model."""
    runs = tmp_path_factory.mktemp("trained") / "runs"
    words = ["--env", "guess_number", "--model", "scratch", f"run.directory={runs}", "trainer.steps=2", *SMALL]
    with pytest.raises(SystemExit) as end:
        main(["train", *words])
    assert not end.value.code
    return (runs / "latest").resolve()


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
