"""Every page against WCAG 2.2 AA, with axe-core; keyboard focus; the two widths that the pages are made for."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

AXE = Path(__file__).parents[3] / "agentrl/viewer/frontend/node_modules/axe-core/axe.min.js"
SHOP = f"/r/second/episode/{quote('9-shop/0.0', safe='')}"
PAGES = {
    "runs": "/",
    "run": "/r/second",
    "episodes": "/r/second/episodes",
    "conversation": SHOP,
    "source": f"{SHOP}?view=tokens&token=140",
    "log-probability": f"{SHOP}?overlay=logprob",
    "version": f"{SHOP}?overlay=version",
    "timeline": f"{SHOP}?view=timeline",
    "json": f"{SHOP}?view=json",
    "group": "/r/second/group/9-shop",
    "in flight": "/r/second/in-flight",
    "compare": "/compare?a=first&b=second",
    "hostile": f"/r/second/episode/{quote('9-hostile/0.0', safe='')}",
}
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_pages_keep_the_rules_of_wcag(new_visitor, name: str, scheme: str) -> None:
    page = new_visitor(scheme=scheme).open(PAGES[name])
    page.wait_for_timeout(300)
    page.evaluate(AXE.read_text())
    found = page.evaluate("rules => axe.run(document, {runOnly: rules})", RULES)
    assert [
        (one["id"], one["nodes"][0]["html"][:200], one["nodes"][0]["failureSummary"]) for one in found["violations"]
    ] == []


@pytest.mark.parametrize("width", [1280, 1920])
@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_their_widths(new_visitor, name: str, width: int) -> None:
    page = new_visitor(width=width, height=1000).open(PAGES[name])
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_focus_is_visible_and_starts_with_the_link_to_the_content(visit) -> None:
    page = visit.open("/", "Runs")
    page.keyboard.press("Tab")
    link = page.get_by_role("link", name="Skip to the content")
    expect(link).to_be_focused()
    assert link.evaluate("link => getComputedStyle(link).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
