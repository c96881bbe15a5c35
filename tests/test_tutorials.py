"""The tutorials do what they say: their projects pass their checks, train, and show the errors that they plant."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.forks import AGENTRL, EndedProgram, ForkedProgram
from support.tutorials import SMALL, TUTORIALS, code_of, make_coins, make_machine

from agentrl.config import load_config
from agentrl.config.reference import config_reference

Run = Callable[..., EndedProgram]

KEY = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+|environments|trackers|cluster)`")
FOREIGN = ("from-trl.md", "from-verl.md", "from-verifiers.md")


@pytest.fixture
def run(start_python: Callable[..., ForkedProgram]) -> Run:
    """Run a command of agentrl in the folder of a project."""

    def run(project: Path, *words: str) -> EndedProgram:
        ended = start_python(*AGENTRL, *words, folder=project, variables={"COLUMNS": "200"}).wait()
        assert ended.code == 0, ended.out + ended.err
        return ended

    return run


@pytest.mark.slow
def test_the_first_environment_is_checked_trained_and_measured(run: Run, tmp_path: Path) -> None:
    project = make_coins(tmp_path)
    checked = run(project, "env", "check", "coins.environment:Coins-v0", "--quick")
    assert "0 warned, 0 failed" in checked.out
    run(project, "sft", "train.yaml", *SMALL)
    trained = run(project, "train", "train.yaml", "model.path=runs/latest", "trainer.steps=1", *SMALL[2:])
    assert "step 1/1" in trained.err
    assert "success (95 % interval)" in run(project, "eval", "--model", "runs/latest").out


@pytest.mark.slow
def test_tests_of_the_project_pass_with_the_first_environment(
    start_python: Callable[..., ForkedProgram], tmp_path: Path
) -> None:
    words = ("-m", "pytest", "-W", "ignore", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio")
    ended = start_python(*words, folder=make_coins(tmp_path)).wait()
    assert ended.code == 0, ended.out + ended.err


@pytest.mark.slow
def test_the_first_tools_are_checked_trained_and_measured(run: Run, tmp_path: Path) -> None:
    project = make_machine(tmp_path)
    assert "failed" not in run(project, "tool", "check", "shop:change", "price=34", "paid=20").out
    assert "14" in run(project, "tool", "call", "shop:change", "price=34", "paid=20").out
    checked = run(project, "env", "check", "machine.environment:Machine-v0", "--quick")
    assert "1 warned, 0 failed" in checked.out
    assert "keeps splits apart" in checked.out
    run(project, "sft", "train.yaml", *SMALL)
    trained = run(project, "train", "train.yaml", "model.path=runs/latest", "trainer.steps=1", *SMALL[2:])
    assert "step 1/1" in trained.err


@pytest.mark.slow
def test_the_planted_error_is_named_and_its_correction_makes_groups_differ(run: Run, tmp_path: Path) -> None:
    project = make_coins(tmp_path)
    run(project, "sft", "train.yaml")  # some episodes have to succeed
    words = ("model.path=runs/latest", "agent.reward=coins.rewards:paid", "trainer.steps=2", "run.name=no-learning")
    run(project, "train", "train.yaml", *words, "trainer.tasks_per_step=4")
    found = run(project, "diagnose", "runs/no-learning").out
    assert "1. constant_reward, critical" in found
    assert "nothing_varies (because of constant_reward)" in found
    (project / "coins" / "rewards.py").write_text(code_of("why-a-run-does-not-learn.md")[1])
    scored = run(project, "rescore", "runs/no-learning").out
    assert re.search(r"groups whose rewards differ\s+0 of 8\s+[1-8] of 8", scored), scored


def rows(page: str) -> list[list[str]]:
    """Return the rows of a page's table of config keys, as cells."""
    table = (TUTORIALS / page).read_text().partition("## Config keys")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if "|" in line][2:]


@pytest.mark.parametrize("page", FOREIGN)
def test_keys_of_other_libraries_are_mapped_to_keys_that_exist(page: str) -> None:
    known = set(re.findall(r"^\| `([\w.]+)` \|", config_reference(), re.MULTILINE))
    sections = {key.rpartition(".")[0] for key in known} | {"environments", "trackers", "cluster"}
    named = [key for cells in rows(page) for key in KEY.findall(cells[1])]
    assert len(named) > 10
    assert [key for key in named if key not in known | sections] == []


@pytest.mark.parametrize("page", FOREIGN)
def test_configs_of_these_pages_are_valid(page: str, tmp_path: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```", (TUTORIALS / page).read_text(), re.MULTILINE | re.DOTALL):
        file = tmp_path / "config.yaml"
        file.write_text(block)
        assert load_config(file).agent.loop
