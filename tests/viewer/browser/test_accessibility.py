"""Every page against WCAG 2.2 AA, with axe-core; keyboard focus; the widths of the pages, from a narrow one on."""

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
    "ratio": f"{SHOP}?overlay=ratio",
    "advantage": f"{SHOP}?overlay=advantage",
    "entropy": f"{SHOP}?overlay=entropy",
    "clipped": f"{SHOP}?overlay=clipped",
    "timeline": f"{SHOP}?view=timeline",
    "prompt": f"{SHOP}?view=prompt&turn=2",
    "json": f"{SHOP}?view=json",
    "log": f"/r/second/episode/{quote('9-long/0.0', safe='')}?view=log",
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


@pytest.mark.parametrize("width", [420, 1280, 1920])
@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_their_widths(new_visitor, name: str, width: int) -> None:
    page = new_visitor(width=width, height=1000).open(PAGES[name])
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.locator("header.top *, .page-head *, .view-bar *, .overlay-bar *, .content > *, .side > *").evaluate_all(
        """all => all.filter(one => one.checkVisibility() && one.getBoundingClientRect().right > innerWidth + 1)
            .map(one => one.outerHTML.slice(0, 200))"""
    )
    assert cut == []


def test_focus_is_visible_and_starts_with_the_link_to_the_content(visit) -> None:
    page = visit.open("/", "Runs")
    page.keyboard.press("Tab")
    link = page.get_by_role("link", name="Skip to the content")
    expect(link).to_be_focused()
    assert link.evaluate("link => getComputedStyle(link).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
