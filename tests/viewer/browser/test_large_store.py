"""The table over a large store: VIEWER_EPISODES is the number of its episodes, 2,000 by default."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect
from support.written_episodes import EpisodeWriter, Script
from transformers import AutoTokenizer

from agentrl.message import Message, user
from agentrl.viewer import episode_list

EPISODES = int(os.environ.get("VIEWER_EPISODES", "2000"))
PER_STEP = 500
ROW = 30
"""Height of a row in pixels."""


def small(number: int) -> Script:
    messages = [user(f"Write the number {number}."), Message(role="assistant", content=f"It is {number}.")]
    return Script(
        id=f"large-{number}/0.0",
        group=f"large-{number}",
        task=f"number-{number}",
        reward=(number * 37 % 1000) / 1000,
        success=number % 3 == 0,
        messages=messages,
    )


@pytest.fixture
def large(small_runs: Path, tmp_path: Path, run_viewer):
    folder = tmp_path / "runs" / "large"
    shutil.copytree(small_runs / "first", folder)
    writer = EpisodeWriter(folder, AutoTokenizer.from_pretrained(folder / "model"))
    for first in range(0, EPISODES, PER_STEP):
        writer.write(10 + first // PER_STEP, [small(n) for n in range(first, min(first + PER_STEP, EPISODES))])
    running = run_viewer([tmp_path / "runs"])
    running.wait_for_index("large")
    return running


def test_the_table_has_elements_only_for_rows_near_the_screen(new_visitor, large) -> None:
    page = new_visitor(large.url).open("/r/large/episodes?step_from=10&order=reward", "Episodes")
    expect(page.locator(".count[role=status]")).to_have_text(f"{EPISODES:,} found")
    rows = page.locator("table.episodes tbody tr:not(.spacer)")
    for pages in range(2, 6):
        page.keyboard.press("G")
        page.wait_for_function(
            "height => document.querySelector('.virtual').scrollHeight >= height", arg=pages * 200 * ROW, timeout=60_000
        )
        assert rows.count() < 120
    expect(page.locator("tr.current")).to_be_in_viewport()
    rewards = [float(text) for text in page.locator("table.episodes tbody tr td:nth-child(6)").all_inner_texts()]
    assert rewards == sorted(rewards)
    page.keyboard.press("Enter")
    expect(page.locator(".pager")).to_contain_text("/")
    page.keyboard.press("p")
    expect(page.get_by_role("heading", level=1)).to_contain_text("number-")


def test_a_text_is_found_in_a_large_store(new_visitor, large) -> None:
    wanted = EPISODES - 7
    page = new_visitor(large.url).open(f"/r/large/episodes?text=It+is+{wanted}.", "Episodes")
    expect(page.locator(".count[role=status]")).to_have_text("1 found", timeout=60_000)
    expect(page.locator("tr.current")).to_contain_text(f"number-{wanted}")


def test_search_requests_each_part_once(new_visitor, large, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_list, "SEARCH_S", 0.0)  # a part is one block
    visit, asked = new_visitor(large.url), list[str]()
    visit.page.on("request", lambda request: asked.append(request.url) if "cursor=" in request.url else None)
    page = visit.open(f"/r/large/episodes?text=It+is+{EPISODES - 7}.", "Episodes")
    expect(page.locator(".count[role=status]")).to_have_text("1 found", timeout=60_000)
    expect(page.locator("table.episodes tbody tr")).to_have_count(1)
    assert len(asked) == len(set(asked)) > EPISODES // 1000
