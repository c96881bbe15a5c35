"""The pages of runs in a real browser: the list, the curves, themes, keys, errors."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest
from playwright.sync_api import expect


def test_the_runs_are_listed_with_state_figures_and_sparklines(visit) -> None:
    page = visit.open("/", "Runs and evaluations")
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(3)
    first = rows.filter(has_text="first")
    expect(first).to_contain_text("finished")
    expect(first).to_contain_text("4 / 4")
    expect(first).to_contain_text(re.compile(r"\d\.\d %|\d+\.\d %"))
    expect(first.locator("svg.sparkline polyline")).to_have_count(1)


def test_keys_move_through_the_runs_mark_two_and_compare_them(visit) -> None:
    page = visit.open("/", "Runs and evaluations")
    current = page.locator("tr.current a")
    before = current.inner_text()
    page.keyboard.press("j")
    expect(current).not_to_have_text(before)
    page.keyboard.press("k")
    expect(current).to_have_text(before)
    page.keyboard.press("x")
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.keyboard.press("c")
    expect(page).to_have_url(re.compile(r"/compare\?a=.+&b=.+"))
    page.keyboard.press("g")
    page.keyboard.press("r")
    expect(page).to_have_url(re.compile(r"/$"))
    expect(current).to_be_visible()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"/r/.+"))


def test_run_shows_curves_with_bands_outcomes_and_task_types(visit) -> None:
    page = visit.open("/r/second", "second")
    titles = page.locator(".chart .title").all_inner_texts()
    kinds = (
        "Success",
        "Reward",
        "Outcomes by step",
        "Length",
        "Entropy",
        "KL",
        "Mismatch",
        "Gradient norm",
        "Staleness",
    )
    for kind in (*kinds, "Time by phase", "Time of turns", "Tokens/s"):
        assert any(title == kind or title.startswith(f"{kind}: ") for title in titles), kind
    success = page.locator(".chart", has_text="Success").first
    expect(success.locator("canvas")).to_be_visible()
    expect(success.locator(".legend")).to_contain_text("success/mean")
    expect(success.locator(".legend")).to_contain_text("to")  # the interval of the newest step
    table = page.locator("section", has_text="Success by environment and task type").locator("tbody tr")
    expect(table.first).to_contain_text("letters:Letters")


def test_smoothing_log_scale_and_the_search_are_in_the_address(visit) -> None:
    page = visit.open("/r/second", "second")
    legend = page.locator(".chart", has_text="Success").first.locator(".value").first
    raw = legend.inner_text()
    page.get_by_label("Smoothing").fill("0.9")
    expect(page).to_have_url(re.compile("smoothing=0.9"))
    expect(legend).not_to_have_text(raw)
    page.keyboard.press("l")
    expect(page).to_have_url(re.compile("log=true"))
    page.get_by_label("Metric").fill("train/entropy")
    expect(page.locator(".chart .title")).to_have_text(["train/entropy"])
    page.get_by_label("Metric").fill("nothing like this")
    expect(page.get_by_text("No metric contains")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Metric")).to_have_value("nothing like this")


def test_smoothing_keeps_a_constant_curve(visit) -> None:
    page = visit.open("/r/second?metric=episodes&smoothing=0.8", "second")
    rows = page.locator(".chart canvas").first.evaluate(
        """canvas => {
            const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const found = new Set();
            for (let i = 0; i < data.length; i += 4) {
                if (data[i] < 90 && data[i + 2] > 150 && data[i + 3] > 150) found.add(Math.floor(i / 4 / width));
            }
            return [...found];
        }"""
    )
    assert 0 < max(rows) - min(rows) + 1 <= 4


def test_the_cursor_of_all_charts_is_at_the_same_step(visit) -> None:
    page = visit.open("/r/second", "second")
    page.locator(".chart .u-over").first.hover(position={"x": 3, "y": 40})
    expect(page.locator(".chart .step", has_text="step 1")).to_have_count(page.locator(".chart .step").count())
    page.locator(".chart .u-over").first.click(position={"x": 3, "y": 40})
    expect(page).to_have_url(re.compile(r"/episodes\?step_from=1&step_to=1"))


def test_a_curve_is_hidden_and_shown(visit) -> None:
    page = visit.open("/r/second", "second")
    button = page.get_by_role("button", name="reward/max")
    expect(button).to_have_attribute("aria-pressed", "false")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")


def test_theme_follows_the_system_by_default(new_visitor) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = new_visitor(scheme="light"), new_visitor(scheme="dark")
    page = light.open("/", "Runs")
    other = dark.open("/", "Runs")
    white, black = page.evaluate(background), other.evaluate(background)
    assert white != black
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate(background) == black
    page.reload()
    page.get_by_role("heading", name="Runs and evaluations").wait_for()
    assert page.evaluate(background) == black
    page.get_by_role("button", name="Auto").click()
    assert page.evaluate(background) == white
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) == black


def test_the_list_of_keys_belongs_to_the_page(visit) -> None:
    shop = quote("9-shop/0.0", safe="")
    places = {"episodes": "Search in the text of the turns", f"episode/{shop}?view=tokens": "Let go of the token"}
    for path, text in places.items():
        page = visit.open(f"/r/second/{path}")
        page.keyboard.press("?")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text(text)
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)


@pytest.mark.parametrize(
    "path", ["/r/nothing", "/r/nothing/episodes", "/r/second/episode/nothing", "/r/second/group/no"]
)
def test_unknown_url_shows_the_servers_message(visit, path: str) -> None:
    page = visit.open(path)
    expect(page.get_by_role("alert").first).to_contain_text("no such")


def test_unknown_page_links_to_the_runs(visit) -> None:
    page = visit.open("/r/second/unknown")
    expect(page.get_by_text("There is no page at this address.")).to_be_visible()
    page.get_by_role("link", name="All runs", exact=True).click()
    expect(page).to_have_url(re.compile(r"/$"))
