"""The pages of episodes in a real browser: the table, an episode, its tokens, its group, notes, comparisons."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import socket
from urllib.parse import quote

import pytest
from playwright.sync_api import expect
from support.written_episodes import HOSTILE

SHOP = f"/r/second/episode/{quote('9-shop/0.0', safe='')}"
LONG = f"/r/second/episode/{quote('9-long/0.0', safe='')}"
HOSTILE_PAGE = f"/r/second/episode/{quote('9-hostile/0.0', safe='')}"
FOUND = re.compile(r"^\d+ found$")


def number_found(page) -> int:
    expect(page.locator(".count[role=status]")).to_have_text(FOUND)
    expect(page.locator(".results")).to_have_attribute("aria-busy", "false")
    return int(page.locator(".count[role=status]").inner_text().split()[0])


def test_the_table_shows_all_episodes_and_keys_move_in_it(visit) -> None:
    page = visit.open("/r/second/episodes", "Episodes")
    assert number_found(page) == 29
    row = page.locator("table.episodes tr.current")
    expect(row).to_have_attribute("aria-rowindex", "2")
    for key, place in (("j", 3), ("j", 4), ("k", 3), ("G", 30), ("PageUp", 10), ("ArrowDown", 11)):
        page.keyboard.press(key)
        expect(row).to_have_attribute("aria-rowindex", str(place))
    page.keyboard.press("g")
    page.keyboard.press("g")
    expect(row).to_have_attribute("aria-rowindex", "2")
    page.keyboard.press("f")
    assert page.evaluate("document.activeElement.closest('#filters') !== null")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(page.locator("#filter-text")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/episode/"))
    page.keyboard.press("u")
    expect(page).to_have_url(re.compile("/episodes$"))


@pytest.mark.parametrize(
    ("field", "value", "query", "count"),
    [
        ("step_from", "5", "step_from=5", 5),
        ("step_to", "1", "step_to=1", 6),
        ("text", "broken lamp", "text=broken+lamp", 1),
        ("task", "shop-17", "task=shop-17", 3),
        ("group", "9-shop", "group=9-shop", 3),
        ("tokens_from", "5000", "tokens_from=5000", 2),
        ("turns_from", "4", "turns_from=4", None),
        ("reward_from", "0.9", "reward_from=0.9", None),
        ("reward_to", "0.1", "reward_to=0.1", None),
        ("turns_to", "1", "turns_to=1", 2),
        ("tokens_to", "200", "tokens_to=200", None),
    ],
)
def test_fields_filter_and_stay_in_the_address(visit, field: str, value: str, query: str, count: int | None) -> None:
    page = visit.open("/r/second/episodes", "Episodes")
    every = number_found(page)
    page.locator(f"#filter-{field}").fill(value)
    expect(page).to_have_url(re.compile(re.escape(query)))
    expect(page.locator(".count[role=status]")).not_to_have_text(f"{every} found")
    found = number_found(page)
    assert found == count if count is not None else 0 < found < every
    page.reload()
    expect(page.locator(f"#filter-{field}")).to_have_value(value)
    assert number_found(page) == found
    page.get_by_role("button", name="Clear").click()
    assert number_found(page) == every


def test_choices_filter_by_outcome_success_marks_and_environment(visit) -> None:
    page = visit.open("/r/second/episodes", "Episodes")
    every = number_found(page)
    page.get_by_label("truncated tokens").check()
    expect(page).to_have_url(re.compile("outcome=truncated_tokens"))
    assert number_found(page) == 1
    page.get_by_label("environment error").check()
    expect(page).to_have_url(re.compile("outcome=environment_error"))
    expect(page.locator(".count[role=status]")).to_have_text("2 found")
    page.keyboard.press("c")
    expect(page.locator(".count[role=status]")).to_have_text(f"{every} found")
    page.get_by_label("invalid call").check()
    page.locator("#filter-environment").select_option("shop")
    expect(page.locator(".count[role=status]")).to_have_text("3 found")
    page.get_by_label("✓ solved", exact=True).check()
    expect(page).to_have_url(re.compile("success=true"))
    expect(page.locator(".count[role=status]")).to_have_text("2 found")
    page.goto(f"{visit.url}/r/second/episodes?text=no+episode+says+this")
    expect(page.get_by_text("No episode matches these filters.")).to_be_visible()


@pytest.mark.parametrize(
    ("field", "value", "count"),
    [
        ("split", "train", 26),
        ("task_type", "refund", 3),
        ("task_type", "search", 1),
        ("role", "searcher", 1),
        ("environment", "shop", 3),
    ],
)
def test_choices_filter_by_split_task_type_role_and_environment(visit, field: str, value: str, count: int) -> None:
    page = visit.open("/r/second/episodes", "Episodes")
    every = number_found(page)
    page.locator(f"#filter-{field}").select_option(value)
    expect(page).to_have_url(re.compile(f"{field}={value}"))
    expect(page.locator(".count[role=status]")).to_have_text(f"{count} found")
    page.reload()
    expect(page.locator(f"#filter-{field}")).to_have_value(value)
    page.locator(f"#filter-{field}").select_option("")
    expect(page.locator(".count[role=status]")).to_have_text(f"{every} found")


def test_filters_combine_and_wrong_ones_are_explained(visit) -> None:
    page = visit.open("/r/second/episodes?step_from=5&step_to=5&reward_from=0.2&reward_to=0.7", "Episodes")
    expect(page.locator(".count[role=status]")).to_have_text("2 found")
    page.get_by_label("truncated", exact=True).check()
    expect(page.locator(".count[role=status]")).to_have_text("1 found")
    expect(page.locator("tr.current")).to_contain_text("long-1")
    visit.expects_errors = True
    page.goto(f"{visit.url}/r/second/episodes?enviroment=shop")
    expect(page.get_by_role("alert")).to_contain_text("did you mean environment?")
    page.goto(f"{visit.url}/r/second/episodes?reward_from=high")
    expect(page.get_by_role("alert")).to_contain_text("expected a finite number")


def test_columns_sort(visit) -> None:
    page = visit.open("/r/second/episodes", "Episodes")
    for order, direction in (("descending", "true"), ("ascending", None)):
        page.get_by_role("button", name="Tokens").click()
        expect(page.get_by_role("columnheader", name="Tokens")).to_have_attribute("aria-sort", order)
        assert ("descending=true" in page.url) == (direction is not None)
        number_found(page)
        cells = page.locator("table.episodes tbody tr td:nth-child(8)").all_inner_texts()
        numbers = [int(text.replace(",", "")) for text in cells]
        assert numbers == sorted(numbers, reverse=order == "descending")


def test_a_conversation_sets_its_parts_apart(visit, keep_picture) -> None:
    page = visit.open(SHOP, "shop-17")
    expect(page.locator(".turn")).to_have_count(5)
    expect(page.locator(".part.system")).to_contain_text("assistant of a shop")
    assert page.locator(".part.image img").evaluate("image => image.naturalWidth") == 160
    thinking = page.locator("details.thinking").first
    expect(thinking.locator("pre")).not_to_be_visible()
    page.keyboard.press("e")
    expect(thinking.locator("pre")).to_contain_text("The customer wants a refund.")
    page.keyboard.press("e")
    expect(thinking.locator("pre")).not_to_be_visible()
    call = page.locator(".part.tool-call").first
    expect(call.locator(".name")).to_have_text("find_order")
    expect(call.locator(".arguments")).to_contain_text("Ada Lovelace")
    expect(page.locator(".part.tool-result").first).to_contain_text("desk lamp")
    expect(page.locator(".part.remark")).to_contain_text("not a valid call")
    expect(page.locator(".turn.invalid header")).to_contain_text("invalid")
    keep_picture(page, "episode")


def test_turns_and_episodes_are_reached_by_keys_and_addresses(visit) -> None:
    page = visit.open(SHOP, "shop-17")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page).to_have_url(re.compile(r"\?turn=1$"))
    expect(page.locator("#turn-1")).to_have_class(re.compile("current"))
    page.keyboard.press("k")
    expect(page).to_have_url(re.compile(r"\?turn=0$"))
    page.keyboard.press("G")
    page.wait_for_function("window.scrollY + window.innerHeight >= document.body.scrollHeight - 2")
    page.keyboard.press("g")
    page.keyboard.press("g")
    page.wait_for_function("window.scrollY === 0")
    page.keyboard.press("t")
    expect(page.locator(".tokens")).to_be_visible()
    page.keyboard.press("t")
    expect(page.locator("#turn-0")).to_be_visible()
    page = visit.open(f"{SHOP}?turn=3", "shop-17")
    expect(page.locator("#turn-3")).to_be_in_viewport()
    expect(page.locator("#turn-3")).to_have_class(re.compile("current"))
    visit.open("/r/second/episodes?order=tokens&descending=true", "Episodes")
    expect(page.locator("tr.current")).to_contain_text("long-1")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="long-1").wait_for()
    expect(page.locator(".pager")).to_contain_text("1 / 29")
    page.keyboard.press("n")
    page.get_by_role("heading", name="hostile").wait_for()
    page.keyboard.press("p")
    page.get_by_role("heading", name="long-1").wait_for()


def test_copies_are_a_command_and_messages(visit) -> None:
    page = visit.open(SHOP, "shop-17")
    page.get_by_role("button", name="Copy replay command").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert "agentrl replay" in page.evaluate("navigator.clipboard.readText()")
    page.get_by_role("button", name="Copy as messages").click()
    page.wait_for_function("navigator.clipboard.readText().then(text => text.startsWith('['))")
    chat = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert chat[0]["role"] == "system"
    assert len(chat) == 9


def test_time_prompt_and_record_of_an_episode(visit, keep_picture) -> None:
    page = visit.open(f"{SHOP}?view=timeline", "shop-17")
    expect(page.locator(".timeline tbody tr")).to_have_count(4)
    expect(page.locator(".timeline .bar .activity.decode")).to_have_count(4)
    expect(page.locator(".timeline .bar .activity.scoring")).to_have_count(1)
    for name in ("queue", "prefill", "decode", "tool", "environment", "scoring"):
        expect(page.locator(f".timeline .legend .activity.{name}")).to_be_visible()
    starts = [float(text.removesuffix(" s")) for text in page.locator(".timeline td:nth-child(3)").all_inner_texts()]
    lengths = [float(text.removesuffix(" s")) for text in page.locator(".timeline td:last-child").all_inner_texts()]
    for start, before, length in zip(starts, [0.0, *starts], [0.0, *lengths], strict=False):
        assert abs(start - (before + length + 0.2)) < 0.11  # rounded
    edges = page.locator(".timeline .bar").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect()).map(box => [box.left, box.right])"
    )
    assert all(left > right for (_, right), (left, _) in itertools.pairwise(edges))
    keep_picture(page, "timeline")
    page.get_by_role("button", name="Turn 3").click()
    expect(page.locator("#turn-2")).to_have_class(re.compile("current"))
    page.get_by_role("button", name="Raw prompt").click()
    expect(page.locator("pre.mono")).to_contain_text("Your last answer was not a valid call")
    page.get_by_label("What the model read before").select_option("0")
    expect(page.locator("pre.mono")).not_to_contain_text("Your last answer")
    page.get_by_role("button", name="Raw JSON").click()
    expect(page.locator("pre.mono").first).to_contain_text("9-shop/0.0")
    page = visit.open(f"{LONG}?view=log", "long-1")
    expect(page.locator(".content pre")).to_contain_text("searcher started")
    expect(page.locator(".content pre .hidden-char").first).to_be_visible()


def test_notes_are_kept_and_deleted(visit) -> None:
    page = visit.open(f"{SHOP}?turn=1", "shop-17")
    page.get_by_label("New note").fill(f"The amount has a comma.\nAsk again. {HOSTILE}")
    page.get_by_role("button", name="Add note").click()
    expect(page.locator(".notes li")).to_contain_text("The amount has a comma.")
    assert "comma.\nAsk again." in page.locator(".notes li pre").inner_text()
    page.reload()
    expect(page.locator(".notes li")).to_contain_text("Turn 2")
    page.get_by_role("button", name="Delete this note").click()
    expect(page.locator(".notes li")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tokens_are_coloured_by_source_log_probability_and_version(new_visitor, keep_picture, scheme: str) -> None:
    page = new_visitor(scheme=scheme).open(f"{SHOP}?view=tokens", "shop-17")
    legend = page.get_by_label("Legend")
    expect(legend).to_contain_text("sampled by the policy: in the loss")
    expect(page.locator(".tokens .t.special").nth(8)).to_be_attached()
    page.keyboard.press("o")
    expect(page).to_have_url(re.compile("overlay=logprob"))
    page.keyboard.press("O")
    expect(page).to_have_url(re.compile("overlay=source"))
    page.keyboard.press("o")
    expect(legend).to_contain_text("below 5 %")
    expect(page.locator(".tokens .t.q5").first).to_be_attached()
    keep_picture(page, f"tokens-{scheme}")
    page.get_by_role("button", name="Weight version").click()
    expect(legend).to_contain_text("version 3")
    expect(legend).to_contain_text("version 4")
    page.keyboard.press("v")
    token = page.locator(".tokens .t.c1[data-v='v4']").first
    assert "v4" in token.evaluate("token => getComputedStyle(token, '::after').content")
    page.keyboard.press("w")
    expect(page.locator(".stream").first).to_contain_text("You·are·the·assistant")


OVERLAYS = {
    "Ratio": ("overlay=ratio", "×", "dp4"),
    "Advantage": ("overlay=advantage", "+", "dn"),
    "Entropy": ("overlay=entropy", "to", "q5"),
    "Clipped or filtered": ("overlay=clipped", "removed: stale", "flag-masked"),
}


@pytest.mark.parametrize("name", OVERLAYS)
def test_trainer_values_are_an_overlay(visit, name: str) -> None:
    address, text, style = OVERLAYS[name]
    page = visit.open(f"{SHOP}?view=tokens", "shop-17")
    page.get_by_role("button", name=name, exact=True).click()
    expect(page).to_have_url(re.compile(address))
    expect(page.get_by_label("Legend")).to_contain_text(text)
    assert page.locator(f".tokens .t[class*='{style}']").count() > 0
    page.locator(".token-block.sampled").nth(1).locator(".t").nth(3).click()
    card = page.get_by_role("region", name="Token", exact=True)
    values = dict(zip(card.locator("dt").all_inner_texts(), card.locator("dd").all_inner_texts(), strict=True))
    assert re.fullmatch(r"[+−]\d\.\d{4}", values["Advantage"])
    assert re.fullmatch(r"\d\.\d{4}", values["Ratio"])
    assert re.fullmatch(r"\d\.\d{4}", values["Entropy"])
    assert values["In the loss"] == "✕ stale"


def test_overlays_without_values_cannot_be_chosen(visit) -> None:
    page = visit.open(f"{LONG}?view=tokens", "long-1")
    expect(page.get_by_role("button", name="Advantage", exact=True)).to_be_disabled()
    expect(page.get_by_role("button", name="Log-probability", exact=True)).to_be_enabled()


def test_a_group_shows_siblings_and_where_they_part(visit) -> None:
    page = visit.open(f"{SHOP}", "shop-17")
    page.keyboard.press("s")
    expect(page).to_have_url(re.compile("/group/9-shop$"))
    rows = page.locator("table.members tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(0)).to_contain_text("+1.0342")
    expect(rows.nth(2)).to_contain_text("−1.3524")
    expect(rows.nth(1).locator(".selected")).to_have_text("Y")
    expect(page.locator(".side-head")).to_have_count(2)
    expect(page.locator(".parting")).to_have_count(2)
    expect(page.get_by_text("I cannot help with that.", exact=True)).to_be_visible()
    page.get_by_role("button", name="Show what all of them read").click()
    expect(page.locator(".side-by-side .part.system")).to_have_count(2)
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.locator(".side-head")).to_have_count(3)
    page.keyboard.press("x")
    expect(page.locator(".side-head")).to_have_count(2)
    page.keyboard.press("k")
    expect(rows.nth(0)).to_have_class(re.compile("current"))
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="shop-17").wait_for()
    page.go_back()
    rows.nth(2).get_by_role("link", name="token").click()
    expect(page).to_have_url(re.compile("token="))
    expect(page.locator(".t.selected")).to_be_in_viewport()


def test_two_runs_are_compared_task_by_task(visit) -> None:
    page = visit.open("/compare", "Compare")
    expect(page.get_by_text("Choose two runs or evaluations")).to_be_visible()
    page.get_by_label("A", exact=True).select_option("first")
    page.get_by_label("B", exact=True).select_option("third")
    expect(page.locator(".tile").first).to_contain_text("tasks B won")
    expect(page.get_by_text(re.compile("McNemar|sign test"))).to_be_visible()
    rows = page.locator(".task-list tbody tr")
    won, lost, same = (int(re.sub(r"\D", "", text)) for text in page.locator(".tile strong").all_inner_texts()[:3])
    expect(rows).to_have_count(won + lost + same)
    page.keyboard.press("j")
    expect(page.locator(".side-head")).to_have_count(2)
    expect(page.locator(".side-by-side .turn")).not_to_have_count(0)
    page.keyboard.press("j")
    expect(rows.nth(1)).to_have_class(re.compile("current"))
    page.keyboard.press("k")
    expect(rows.nth(0)).to_have_class(re.compile("current"))
    choice = page.get_by_label("Episode of A")
    other = choice.locator("option").nth(1).get_attribute("value")
    choice.select_option(other)
    expect(page).to_have_url(re.compile(f"episode_a={quote(other, safe='')}"))
    expect(page.locator(".side-head").first.get_by_role("link", name="open")).to_have_attribute(
        "href", re.compile(quote(other, safe=""))
    )
    page.get_by_role("button", name="Same").click()
    expect(rows).to_have_count(same)
    page.get_by_role("button", name="Swap").click()
    expect(page).to_have_url(re.compile("a=third&b=first"))


def in_flight(number: int, state: str, *texts: str) -> dict[str, object]:
    turns = [{"role": "assistant" if n % 2 else "environment", "text": text} for n, text in enumerate(texts)]
    since = 1_795_000_000.0 - 7.25 * number
    name = {"id": f"4-train-{number}/1.0", "environment": "household", "task": f"train-{number}"}
    return {**name, "state": state, "since": since, "started": since - 60, "turns": turns}


def test_a_crashed_run_shows_the_episodes_that_were_running(
    visit, new_visitor, run_viewer, tmp_path, keep_picture
) -> None:
    run = tmp_path / "runs" / "crashed"
    shutil.copytree(visit.folder / "first", run)
    (run / "diagnosis.json").unlink()
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("steps: 4", "steps: 9"))
    gone = {"pid": 1, "process_started": 1, "host": socket.gethostname()}
    status = {**gone, "time": 1_795_000_000.0, "phase": "rollout", "step": 4, "steps": 9, "waits": [], "engines": []}
    episodes = [
        in_flight(1, "generating", "You are in the kitchen. You see a fridge.", "open the fridge", "You see an apple."),
        in_flight(2, "environment", "You see a drawer.", "take the fork from the drawer"),
        in_flight(3, "tool", "Problem: What is 948 + 61 * 91?", "calculate 948 + 61 * 91"),
        in_flight(4, "scoring", "You hold a plate.", "put the plate on the table", "The plate is on the table."),
    ]
    (run / "status.json").write_text(json.dumps({**status, "in_flight": episodes}))
    page = new_visitor(run_viewer([tmp_path / "runs"]).url).open("/r/crashed/in-flight", "that were in flight")
    expect(page.get_by_text("The run ended without finishing.")).to_be_visible()
    cards = page.locator(".flight")
    expect(cards).to_have_count(4)
    expect(cards.nth(1)).to_contain_text("take the fork from the drawer")
    expect(cards.nth(1)).to_contain_text("14.5 s")
    keep_picture(page, "in-flight")
    (run / "status.json").write_text(json.dumps({**status, "in_flight": [in_flight(5, "generating", HOSTILE)]}))
    expect(cards.locator(".hidden-char").first).to_be_visible(timeout=20_000)
    expect(cards).to_have_count(1)


def test_a_token_is_chosen_by_key_by_click_and_by_address(visit) -> None:
    page = visit.open(f"{SHOP}?view=tokens", "shop-17")
    card = page.get_by_role("region", name="Token", exact=True)
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile(r"turn=0.*token=\d+|token=\d+.*turn=0"))
    expect(card).to_contain_text("sampled")
    expect(card).to_contain_text("Log-probability, engine")
    page.locator("[data-i='30']").click()
    expect(page).to_have_url(re.compile("token=30"))
    expect(card).to_contain_text("prompt")
    page.locator("[data-i='40']").hover()
    expect(card.get_by_role("heading")).to_contain_text("40")
    page.keyboard.press("Escape")
    expect(page.locator(".t.selected")).to_have_count(0)
    visit.open(f"{LONG}?token=9000&overlay=source", "long-1")
    expect(page.locator("[data-i='9000']")).to_be_in_viewport()


def test_only_tokens_near_the_screen_have_elements(visit) -> None:
    page = visit.open(f"{LONG}?view=tokens", "long-1")
    expect(page.locator(".content > p.muted")).to_have_count(0)  # all pages are there
    expect(page.locator(".token-block.sampled .stream")).to_contain_text("259: the shelf")
    total = page.locator(".gutter").evaluate_all(
        "all => Math.max(...all.map(one => Number(one.innerText.match(/–(\\d+)/)[1])))"
    )
    assert total > 8000
    assert 200 < page.locator(".t[data-i]").count() < 0.6 * total
    frames = page.evaluate(
        """async () => {
            let slowest = 0, last = performance.now();
            for (let y = 0; y < 4000; y += 80) {
                window.scrollTo(0, y);
                await new Promise(requestAnimationFrame);
                const now = performance.now();
                slowest = Math.max(slowest, now - last);
                last = now;
            }
            return slowest;
        }"""
    )
    assert frames < 2000  # on a machine that is busy with other tests; some 20 ms on an idle one
    expect(page.locator("[data-i='100']")).to_have_count(0)
    page.evaluate("window.scrollTo(0, 0)")
    expect(page.locator("[data-i='100']")).to_have_count(1)


def test_hostile_text_is_escaped_and_hidden_characters_are_visible(visit) -> None:
    for path in (HOSTILE_PAGE, f"{HOSTILE_PAGE}?view=tokens", f"{HOSTILE_PAGE}?view=json", "/r/second/episodes"):
        page = visit.open(path)
        page.get_by_text("<script>window.hacked").first.wait_for()
        page.wait_for_timeout(200)
        assert page.evaluate("window.hacked === undefined")
        assert page.locator("main script, main img[onerror], main template").count() == 0
    page = visit.open(HOSTILE_PAGE)
    marks = page.locator(".part.user .hidden-char, .part.observation .hidden-char").all_inner_texts()
    assert {"RLO", "PDF", "ZWSP", "ESC", "BEL"} <= set(marks)
    result = page.locator(".part.tool-result")
    expect(result).to_contain_text("THE-END")
    assert len(result.inner_text()) < 8000
    result.get_by_role("button", name="Show").click()
    assert len(result.inner_text()) > 9000
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
