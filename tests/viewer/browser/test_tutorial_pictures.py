"""Pictures of the tutorials, of runs that are made by their commands.

VIEWER_IMAGES keeps them: the runs are then as long as on the pages, which takes some minutes. Otherwise they are tiny.
TUTORIAL_RUNS names a folder with the projects ``coins`` and ``machine`` whose runs exist already.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import expect
from support.forks import AGENTRL, ForkedProgram
from support.tutorials import SMALL, make_coins, make_machine

from agentrl.observe.trajectory_index import EpisodeFilter

Start = Callable[..., ForkedProgram]
STEPS = {"first": 20, "no-learning": 6, "tools": 5} if os.environ.get("VIEWER_IMAGES") else {}
"""Steps of the runs on the pages; one step otherwise."""


@pytest.fixture
def projects(start_python: Start, tmp_path: Path) -> Path:
    """A folder with the projects of the tutorials, and their runs."""
    if made := os.environ.get("TUTORIAL_RUNS"):
        return Path(made)

    def run(project: Path, *words: str) -> None:
        ended = start_python(*AGENTRL, *words, folder=project).wait()
        assert ended.code == 0, ended.err

    def train(project: Path, name: str, *words: str) -> None:
        length = (f"trainer.steps={STEPS[name]}",) if STEPS else ("trainer.steps=1", "trainer.tasks_per_step=2")
        run(project, "train", "train.yaml", "model.path=runs/warm", f"run.name={name}", *length, *words)

    coins, machine = make_coins(tmp_path), make_machine(tmp_path)
    run(coins, "sft", "train.yaml", "run.name=warm")
    train(coins, "first")
    train(coins, "no-learning", "agent.reward=coins.rewards:paid")
    run(machine, "sft", "train.yaml", "run.name=warm", *(("sft.epochs=2",) if STEPS else SMALL))
    train(machine, "tools", "trainer.learning_rate=1e-4")
    return tmp_path


def test_pictures_of_the_tutorials(projects: Path, run_viewer, new_visitor, keep_picture) -> None:
    folders = [projects / "coins" / "runs" / "first", projects / "coins" / "runs" / "no-learning"]
    running = run_viewer([*folders, projects / "machine" / "runs" / "tools"])
    for line in running.server.library.lines():
        running.wait_for_index(line["key"])
    visit = new_visitor(running.url, width=1440, height=900)

    def episode(key: str, **conditions: object) -> tuple[str, object]:
        with running.server.library[key].index.reader() as index:
            where = EpisodeFilter(**conditions)  # type: ignore[arg-type]
            rows = list(index.select(where, order="turns", descending=True, limit=20))
        row = rows[min(3, len(rows) - 1)]
        return f"/r/{key}/episode/{quote(row.id, safe='')}", row

    keep_picture(visit.open("/r/first", "first"), "first-environment-run")
    place, row = episode("first", success=False)
    page = visit.open(f"{place}?overlay=logprob&view=tokens", row.task_id)
    page.locator(".token-block.sampled .t").first.click()
    keep_picture(page, "first-environment-tokens")

    page = visit.open("/r/no-learning", "no-learning")
    expect(page.get_by_text("gave the same reward").first).to_be_visible()
    keep_picture(page, "no-learning-run")
    place, row = episode("no-learning")
    keep_picture(visit.open(f"/r/no-learning/group/{quote(row.group_id, safe='')}", "Group"), "no-learning-group")
    page = visit.open(f"{place}?overlay=clipped&view=tokens", row.task_id)
    page.locator(".token-block.sampled .t").first.click()
    expect(page.get_by_text("group equal").first).to_be_visible()
    keep_picture(page, "no-learning-tokens")

    place, row = episode("tools", success=True) if STEPS else episode("tools")
    page = visit.open(place, row.task_id)
    keep_picture(page, "first-tool-episode")
