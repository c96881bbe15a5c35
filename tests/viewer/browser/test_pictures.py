"""Pictures for the documentation of a run that `make demo-llm` has made: VIEWER_RUNS names its folder."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest
from playwright.sync_api import expect

from agentrl.observe.token_table import steps, token_file

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
    page = visit.open(f"/compare?a={first}&b={second}", "Compare")
    page.keyboard.press("j")
    expect(page.locator(".side-head")).to_have_count(2)
    keep_picture(page, "compare")


def most_clipped(folder: Path) -> tuple[int, str, int]:
    """Return the step, the id and a token's position of the episode in which most tokens were clipped."""
    found: list[tuple[int, int, str, int]] = []
    for step in steps(folder):
        table = pq.read_table(token_file(folder, step), filters=[("clipped", "=", True), ("sequence", "=", 0)])
        rows = table.select(["episode", "position"]).to_pylist()
        for episode, count in Counter(row["episode"] for row in rows).items():
            position = next(row["position"] for row in rows if row["episode"] == episode)
            found.append((count, step, episode, position))
    _, step, episode, position = max(found)
    return step, episode, position


def test_screenshots_of_trainer_values(demo, keep_picture) -> None:
    running, visit = demo
    lines = running.server.library.lines()
    train = next(line for line in lines if line["kind"] == "run" and steps(Path(line["path"])))
    _, episode, position = most_clipped(Path(train["path"]))
    place = f"/r/{train['key']}/episode/{quote(episode, safe='')}"
    card = visit.page.get_by_role("region", name="Token", exact=True)
    for name, style in (("logprob", "q5"), ("advantage", "d"), ("clipped", "flag-clipped")):
        page = visit.open(f"{place}?overlay={name}&token={position}")
        page.locator(".t.selected").wait_for()
        values = dict(zip(card.locator("dt").all_inner_texts(), card.locator("dd").all_inner_texts(), strict=True))
        assert values["Clipped"] == "▲ yes"
        assert re.fullmatch(r"[+−]\d+\.\d{4}", values["Advantage"])
        assert page.locator(f".tokens .t[class*=' {style}']").count() > 0
        page.evaluate("window.scrollTo(0, 0)")
        keep_picture(page, f"tokens-{name}")
    with running.server.library[train["key"]].index.reader() as index:
        row = index.find(episode)
    assert row is not None
    page = visit.open(f"/r/{train['key']}/group/{quote(row.group_id, safe='')}", "Group")
    advantages = page.locator("table.members tbody td:nth-child(6)").all_inner_texts()
    assert all(re.fullmatch(r"[+−]?\d+\.\d{4}", text) for text in advantages)
    expect(page.locator(".side-head")).to_have_count(2)
    keep_picture(page, "group")
