"""A scaffolded project works without changes: its tests, its check and its training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.init import WITH_TOOLS, create_project

Cli = Callable[..., Any]

SMALL = ("trainer.tasks_per_step=1", "agent.max_turns=2", "model.scratch.hidden_size=32", "model.scratch.layers=1")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_project("tiny_quest", tmp_path_factory.mktemp("projects"))


def run(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=project,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_its_own_tests_pass(project: Path) -> None:
    ended = run(project, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "7 passed" in ended.stdout


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_project("lamp_desk", tmp_path_factory.mktemp("projects"), WITH_TOOLS)


def test_a_project_with_tools_is_shown_and_played_through_them(with_tools: Path) -> None:
    name = "lamp_desk.environment:LampDesk-v0"
    program = "import sys; from agentrl.cli import main; main(sys.argv[1:])"
    shown = run(with_tools, "-c", program, "env", "show", name)
    assert "/switch number=…" in shown.stdout
    prompt = run(with_tools, "-c", program, "env", "prompt", name, "agent.loop=tool_calling")
    assert '{"name": "read_lamps", "arguments": {}}' in prompt.stdout, prompt.stderr


def test_the_tests_of_a_project_with_tools_pass(with_tools: Path) -> None:
    ended = run(with_tools, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 passed" in ended.stdout


def test_solving_through_own_tools_counts_as_success(with_tools: Path) -> None:
    program = (
        "import agentrl; print(agentrl.evaluate('lamp_desk.environment:LampDesk-v0/valid', policy='expert',"
        " tasks=2, samples=1).success.mean)"
    )
    ended = run(with_tools, "-W", "ignore", "-c", program)
    assert ended.stdout.strip() == "1.0", ended.stderr


def test_it_trains(project: Path) -> None:
    program = "import sys; from agentrl.cli import main; main(sys.argv[1:])"
    ended = run(project, "-c", program, "train", "train.yaml", "trainer.steps=1", *SMALL)
    assert ended.returncode == 0, ended.stderr
    assert "step 1/1" in ended.stderr


def test_nothing_is_left_of_the_templates(project: Path) -> None:
    files = [path for path in project.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    texts = [path.read_text() for path in files if path.suffix in {".py", ".toml", ".md"}]
    assert len(texts) >= 5
    assert not any("$package" in text or "$class_name" in text for text in texts)
    assert {"pyproject.toml", "README.md", "train.yaml"} <= {path.name for path in files}


def test_the_command_says_what_it_made_and_never_overwrites(agentrl: Cli, workplace: Path) -> None:
    made = agentrl("init", "other_quest")
    assert made.code == 0
    assert "other_quest/environment.py" in made.out
    again = agentrl("init", "other_quest")
    assert again.code == 2
    assert "already exists" in again.err


def test_a_project_with_tools_is_made_where_it_is_wanted(agentrl: Cli, workplace: Path) -> None:
    made = agentrl("init", "wide_desk", "--tools", "--folder", "projects")
    assert made.code == 0
    environment = (workplace / "projects" / "wide_desk" / "wide_desk" / "environment.py").read_text()
    assert "Tool(self.read_lamps)" in environment
    assert agentrl("init", "wide_desk", "--folder", "plain").code == 0
    assert (workplace / "plain" / "wide_desk" / "wide_desk" / "environment.py").read_text() != environment


def test_a_place_that_cannot_be_written_is_named(agentrl: Cli, workplace: Path) -> None:
    (workplace / "file").write_text("")
    ended = agentrl("init", "lost_quest", "--folder", "file")
    assert ended.code == 2
    assert "the project cannot be written to" in " ".join(ended.err.split())
    assert "Not a directory" in ended.err
