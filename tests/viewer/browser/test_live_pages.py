"""Pages of a run that trains while they are open."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from playwright.sync_api import expect
from support.waiting import join

from agentrl.runs.rl import train

WAIT_MS = 120_000
"""How long a busy machine may take for a few steps."""


@pytest.fixture
def training(small_runs: Path, tmp_path: Path, run_viewer):
    """A viewer of a run that has not started, the thread that trains it, and the file that its first steps wait for."""
    from support.fixtures import tiny_runs  # a plugin, which pytest has to load first

    with tiny_runs(tmp_path) as start:
        gate = tmp_path / "gate"
        settings = f"environment={{name: 'letters:Gated', options: {{gate: '{gate}'}}, isolation: process}}"
        run = start(settings, "environment.step_timeout_s=300", "trainer.steps=6", name="live")
        worker = threading.Thread(target=train, args=(run,))
        yield run_viewer([tmp_path / "runs"]).url, worker, gate
        gate.touch()
        join(worker)


def test_pages_follow_a_run_that_trains(new_visitor, training, keep_picture) -> None:
    url, worker, gate = training
    runs, page, episodes, flight = (new_visitor(url) for _ in range(4))
    worker.start()
    listed = runs.open("/").locator("table.runs tbody tr")
    expect(listed).to_contain_text("running", timeout=WAIT_MS)
    shown = page.open("/r/live", "live")
    table = episodes.open("/r/live/episodes", "Episodes")
    current = flight.open("/r/live/in-flight", "in flight")
    expect(current.locator(".flight").first).to_be_visible(timeout=WAIT_MS)
    expect(current.locator(".flight").first).to_contain_text("letters:")
    shown.get_by_role("button", name="Live").click()
    expect(shown.get_by_role("button", name="Paused")).to_be_visible()
    shown.get_by_role("button", name="Paused").click()
    gate.touch()
    expect(shown.locator(".facts").first).to_contain_text(re.compile(r"[2-6] of 6"), timeout=WAIT_MS)
    expect(table.locator(".count[role=status]")).to_have_text("36 found", timeout=WAIT_MS)
    expect(listed).to_contain_text("6 / 6", timeout=WAIT_MS)
    expect(listed).to_contain_text("finished", timeout=WAIT_MS)
    expect(shown.locator(".facts").first).to_contain_text("6 of 6", timeout=WAIT_MS)
    expect(shown.locator(".chart .step").first).to_have_text("step 6", timeout=WAIT_MS)
    expect(current.get_by_role("heading").first).to_contain_text("were in flight", timeout=WAIT_MS)
