"""A scaffolded project works without changes: its tests, its check and its training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.forks import AGENTRL, EndedProgram, ForkedProgram

from agentrl.cli.init import WITH_TOOLS, create_project

Cli = Callable[..., Any]
Run = Callable[..., EndedProgram]

PYTEST = ("-m", "pytest", "-W", "ignore", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio")
SMALL = ("trainer.tasks_per_step=1", "agent.max_turns=2", "model.scratch.hidden_size=32", "model.scratch.layers=1")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_project("tiny_quest", tmp_path_factory.mktemp("projects"))


@pytest.fixture
def run(start_python: Callable[..., ForkedProgram]) -> Run:
    """Run a Python program in the folder of a project."""

    def run(project: Path, *words: str) -> EndedProgram:
        return start_python(*words, folder=project, variables={"COLUMNS": "120"}).wait()

    return run


@pytest.mark.slow
def test_its_own_tests_pass(project: Path, run: Run) -> None:
    ended = run(project, *PYTEST)
    assert ended.code == 0, ended.out + ended.err
    assert "7 passed" in ended.out


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_project("lamp_desk", tmp_path_factory.mktemp("projects"), WITH_TOOLS)


def test_a_project_with_tools_is_shown_and_played_through_them(with_tools: Path, run: Run) -> None:
    name = "lamp_desk.environment:LampDesk-v0"
    shown = run(with_tools, *AGENTRL, "env", "show", name)
    assert "/switch number=…" in shown.out, shown.err
    prompt = run(with_tools, *AGENTRL, "env", "prompt", name, "agent.loop=tool_calling")
    assert '{"name": "read_lamps", "arguments": {}}' in prompt.out, prompt.err


@pytest.mark.slow
def test_the_tests_of_a_project_with_tools_pass(with_tools: Path, run: Run) -> None:
    ended = run(with_tools, *PYTEST)
    assert ended.code == 0, ended.out + ended.err
    assert "4 passed" in ended.out


@pytest.mark.slow
def test_solving_through_own_tools_counts_as_success(with_tools: Path, run: Run) -> None:
    program = (
        "import agentrl; print(agentrl.evaluate('lamp_desk.environment:LampDesk-v0/valid', policy='expert',"
        " tasks=2, samples=1).success.mean)"
    )
    ended = run(with_tools, "-c", program)
    assert ended.out.strip() == "1.0", ended.err


@pytest.mark.slow
def test_it_trains(project: Path, run: Run) -> None:
    ended = run(project, *AGENTRL, "train", "train.yaml", "trainer.steps=1", *SMALL)
    assert ended.code == 0, ended.err
    assert "step 1/1" in ended.err


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
