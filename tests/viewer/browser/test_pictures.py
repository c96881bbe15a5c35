"""Pictures for the documentation of a run that `make demo-llm` has made: VIEWER_RUNS names its folder."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from agentrl.observe.trajectory_index import EpisodeFilter

RUNS = os.environ.get("VIEWER_RUNS")

pytestmark = pytest.mark.skipif(RUNS is None, reason="VIEWER_RUNS is not set: no run to take pictures of")


@pytest.fixture
def demo(run_viewer, new_visitor):
    """The demo's server, and a page of the size of the pictures."""
    running = run_viewer([Path(str(RUNS))])
    for line in running.server.library.lines():
        running.wait_for_index(line["key"])
    return running, new_visitor(running.url, width=1440, height=900)


def test_pictures_of_a_real_run(demo, keep_picture) -> None:
    running, visit = demo
    lines = running.server.library.lines()
    (train,) = (line["key"] for line in lines if line["kind"] == "run")
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    first, second = (line["key"] for line in sorted(evaluations, key=lambda line: line["success"]))
    keep_picture(visit.open("/", "Runs and evaluations"), "runs")
    page = visit.open(f"/r/{train}", "train")
    keep_picture(page, "run")
    keep_picture(visit.open(f"/r/{train}/episodes?invalid=true", "Episodes"), "episodes")
    with running.server.library[train].index.reader() as index:
        failed = next(
            iter(index.select(EpisodeFilter(success=False, invalid=True, first_step=3, least_turns=3), limit=1))
        )
    place = f"/r/{train}/episode/{quote(failed.id, safe='')}"
    page = visit.open(f"{place}?overlay=logprob&view=tokens", failed.task_id)
    page.locator(".token-block.sampled .t").nth(8).click()
    keep_picture(page, "tokens-logprob")
    keep_picture(visit.open(f"/r/{train}/group/{failed.group_id}", "Group"), "group")
    page = visit.open(f"/compare?a={first}&b={second}", "Compare")
    page.keyboard.press("j")
    expect(page.locator(".side-head")).to_have_count(2)
    keep_picture(page, "compare")
