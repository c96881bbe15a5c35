"""Pages of runs that are damaged, crashed or stalled, or whose every text tries to run a script in the browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import orjson
import pytest
from aiohttp import ClientSession, web
from playwright.sync_api import expect
from support.written_episodes import HOSTILE, EpisodeWriter, Script, call
from transformers import AutoTokenizer
from yarl import URL

from agentrl.evaluation.diagnosis.finding import ExampleEpisode, Finding
from agentrl.message import ImagePart, Message, TextPart, tool_result, user
from agentrl.observe.metrics import MetricsFile
from agentrl.observe.run_status import CurrentWait, RunEnd, RunSnapshot, process_start, write_status

SVG = b"<svg xmlns='http://www.w3.org/2000/svg' onload='window.hacked=8'><script>window.hacked=9</script></svg>"
NAME = "<img src=x onerror=window.hacked=5>"


@pytest.fixture
def copies(small_runs: Path, tmp_path: Path) -> Path:
    """A folder for copies of the first run, which the returned path names."""
    shutil.copytree(small_runs / "first", tmp_path / "runs" / "first")
    return tmp_path / "runs"


def unfinished(run: Path, **status: object) -> None:
    """Make a run look as if it had more steps to do, with the status of this process."""
    (run / "diagnosis.json").unlink(missing_ok=True)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("steps: 4", "steps: 9"))
    known = {
        "pid": os.getpid(),
        "process_started": process_start(os.getpid()),
        "host": socket.gethostname(),
        "time": time.time() + 600,
        "phase": "rollout",
    }
    write_status(run, RunSnapshot(**{**known, **status}))  # type: ignore[arg-type]


def test_the_list_shows_the_state_of_each_run(new_visitor, run_viewer, copies) -> None:
    for name in ("crashed", "stalled", "interrupted", "running"):
        shutil.copytree(copies / "first", copies / name)
    unfinished(copies / "crashed", process_started=1)
    wait = CurrentWait(owner="e", kind="tool", what="search", since=time.time() - 90, deadline=time.time() - 60)
    unfinished(copies / "stalled", waits=[wait])
    unfinished(copies / "interrupted", end=RunEnd.STOPPED)
    unfinished(copies / "running")
    page = new_visitor(run_viewer([copies]).url).open("/", "Runs and evaluations")
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(5)
    for name in ("crashed", "stalled", "interrupted", "running", "finished"):
        row = rows.filter(has=page.get_by_role("link", name="first" if name == "finished" else name, exact=True))
        expect(row.locator(f".badge.state-{name}")).to_contain_text(name)
    page.keyboard.press("G")
    expect(rows.last).to_have_class(re.compile("current"))
    page.keyboard.press("g")
    page.keyboard.press("g")
    expect(rows.first).to_have_class(re.compile("current"))


def test_damaged_records_are_named_with_their_lines(new_visitor, run_viewer, copies) -> None:
    run = copies / "first"
    file = run / "trajectories" / "step-000002.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:40] + b"#" + lines[2][41:]
    file.write_bytes(b"".join(lines))
    metrics = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([metrics[0], b"{\n", *metrics[2:]]))
    viewer = run_viewer([copies])
    viewer.wait_for_index("first")
    visit = new_visitor(viewer.url)
    for path in ("/r/first", "/r/first/episodes"):
        notice = visit.open(path).get_by_role("region", name="Damaged records")
        expect(notice).to_contain_text(re.compile(r"records? of trajectories/step-000002.jsonl, lines? 3"))
        expect(notice).to_contain_text("1 record of metrics.jsonl, line 2")


def test_findings_are_at_the_top_of_a_run(new_visitor, run_viewer, copies) -> None:
    run = copies / "first"
    viewer = run_viewer([copies])
    viewer.wait_for_index("first")
    with viewer.server.library["first"].index.reader() as index:
        row = index.select(limit=1)[0]
    finding = Finding(
        kind="constant_reward",
        sentence="the reward is constant",
        evidence=("reward 0.5 in 24 episodes",),
        example=ExampleEpisode(id=row.id, task_id=row.task_id),
        weight=0.9,
    )
    (run / "diagnosis.json").write_text(json.dumps({"problems": [finding.to_json()]}))
    page = new_visitor(viewer.url).open("/r/first", "first")
    problems = page.get_by_role("region", name="Problems")
    expect(problems).to_contain_text("the reward is constant")
    expect(problems).to_contain_text("reward 0.5 in 24 episodes")
    problems.get_by_role("link", name="an example").click()
    page.get_by_role("heading", name=row.task_id).wait_for()


def hostile_run(run: Path) -> None:
    """Put a text that tries to run a script wherever a run has text."""
    program = ImagePart(data=SVG, media_type="image/svg+xml", alternative=HOSTILE)
    odd = call(NAME, **{NAME: HOSTILE})
    script = Script(
        id=f"9-{NAME}/0.0",
        group=f"9-{NAME}",
        task=NAME,
        task_type=HOSTILE,
        role=NAME,
        log=HOSTILE,
        error=HOSTILE,
        reward=0.5,
        success=False,
        messages=[
            user((TextPart(text=HOSTILE), program)),
            Message(role="assistant", content=HOSTILE, reasoning=HOSTILE, tool_calls=(odd,)),
            tool_result(odd, HOSTILE),
        ],
    )
    writer = EpisodeWriter(run, AutoTokenizer.from_pretrained(run / "model"))
    writer.write(5, [script])
    metrics = MetricsFile(run / "metrics.jsonl")
    metrics.append_step(5, {f"success/{NAME}": 1.0, f"reward/component/{NAME}": 2.0})
    metrics.close()
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(f"{settings}\n{json.dumps(NAME)}: {json.dumps(HOSTILE)}\n")
    example = ExampleEpisode(id=script.id, task_id=NAME)
    finding = Finding(kind=NAME, sentence=HOSTILE, advice=HOSTILE, evidence=(HOSTILE,), example=example)
    (run / "diagnosis.json").write_text(json.dumps({"problems": [finding.to_json()]}))
    note = {"id": "1", "episode": script.id, "turn": 0, "text": HOSTILE, "time": 1.0}
    (run / "notes.jsonl").write_bytes(orjson.dumps(note) + b"\n")


def test_no_text_of_a_run_becomes_a_script(new_visitor, run_viewer, copies) -> None:
    run = copies / NAME
    shutil.copytree(copies / "first", run)
    hostile_run(run)
    viewer = run_viewer([copies])
    key = next(line["key"] for line in viewer.server.library.lines() if line["name"] == NAME)
    viewer.wait_for_index(key)
    visit = new_visitor(viewer.url)
    visit.page.on("dialog", lambda dialog: visit.errors.append(dialog.message))
    identity = quote(f"9-{NAME}/0.0", safe="")
    episode = f"/r/{key}/episode/{identity}"
    views = ["", "?view=tokens", "?view=timeline", "?view=prompt", "?view=json", "?view=log"]
    compared = f"/compare?a={key}&b={key}&task={quote(NAME)}"
    group = f"/r/{key}/group/{quote(f'9-{NAME}', safe='')}"
    pages = ["/", f"/r/{key}", f"/r/{key}/episodes", *(episode + view for view in views), group, compared]
    for path in pages:
        page = visit.open(path)
        page.wait_for_timeout(250)
        assert page.evaluate("window.hacked === undefined"), path
        found = page.locator("main script, main img[onerror], main [onload], main template, main iframe, main object")
        assert found.count() == 0, path
        assert page.title().endswith("agentrl"), page.title()
    page = visit.open(episode)
    picture = page.locator(".part.image img")
    assert picture.get_attribute("src").startswith("data:image/svg+xml;base64,")
    expect(page.locator(".notes li")).to_contain_text("<script>window.hacked")


def test_an_address_that_is_not_text_shows_a_message(visit) -> None:
    page = visit.open("/r/%E0%A4%A")
    expect(page.get_by_role("alert").first).to_contain_text("no such run")


def test_the_keys_of_a_run_lead_to_its_pages(visit) -> None:
    page = visit.open("/r/second", "second")
    for keys, address in (("ge", "/r/second/episodes"), ("gi", "/r/second/in-flight"), ("go", "/r/second")):
        for key in keys:
            page.keyboard.press(key)
        expect(page).to_have_url(re.compile(f"{address}$"))
    page.keyboard.press("g")
    page.keyboard.press("c")
    expect(page).to_have_url(re.compile("/compare"))
    page = visit.open("/r/second", "second")
    page.keyboard.press("/")
    expect(page.get_by_label("Metric")).to_be_focused()


PREFIX = "/user/me/proxy/8800"


@asynccontextmanager
async def prefix_proxy(target: str):
    """A proxy like that of Jupyter, which removes its prefix from the path and keeps the host of the request."""

    async def forward(request: web.Request) -> web.StreamResponse:
        path = request.raw_path.removeprefix(PREFIX)
        url = URL(target + path, encoded=True)
        sent = {"method": request.method, "headers": request.headers, "data": await request.read()}
        async with session.request(url=url, **sent, allow_redirects=False) as found:
            response = web.StreamResponse(status=found.status, headers=found.headers)
            await response.prepare(request)
            async for data in found.content.iter_any():
                await response.write(data)
        return response

    async with ClientSession(auto_decompress=False) as session:
        application = web.Application()
        application.router.add_route("*", PREFIX + "/{path:.*}", forward)
        runner = web.AppRunner(application, shutdown_timeout=10)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}{PREFIX}"
        await runner.cleanup()


def test_the_pages_work_behind_a_proxy_with_a_prefix(new_visitor, run_viewer, small_runs) -> None:
    viewer = run_viewer([small_runs], token="secret")
    proxy = prefix_proxy(viewer.url.rstrip("/"))
    url = viewer.call(proxy.__aenter__())
    try:
        visit = new_visitor(url)
        page = visit.open("/?token=secret", "Runs")
        expect(page).to_have_url(f"{url}/")
        page.get_by_role("link", name="second", exact=True).click()
        expect(page).to_have_url(f"{url}/r/second")
        page.get_by_role("link", name="Episodes").click()
        page.locator("tbody tr, [role=row]").nth(1).wait_for()
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile(f"^{re.escape(url)}/r/second/episode/"))
        page.reload()
        page.locator(".turn").first.wait_for()
        visit.open("/r/second/episodes?task=x&token=secret")
        expect(page).to_have_url(f"{url}/r/second/episodes?task=x")
    finally:
        viewer.loop.call_soon_threadsafe(viewer.server.hub.close)  # ends the streams that the proxy forwards
        viewer.call(proxy.__aexit__(None, None, None))


def test_dragging_zooms_into_a_chart_and_a_double_click_zooms_out(visit) -> None:
    page = visit.open("/r/second", "second")
    chart = page.locator(".chart").first
    over = chart.locator(".u-over")
    over.scroll_into_view_if_needed()
    drawn = "all => Array.from(all[0].getContext('2d').getImageData(0, 0, all[0].width, all[0].height).data).join()"
    before = chart.locator("canvas").evaluate_all(drawn)
    box = over.bounding_box()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 40, steps=6)
    page.mouse.up()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 50)
    page.wait_for_timeout(600)
    zoomed = chart.locator("canvas").evaluate_all(drawn)
    assert zoomed != before
    over.dblclick()
    page.wait_for_timeout(600)
    assert chart.locator("canvas").evaluate_all(drawn) == before
    expect(page).to_have_url(re.compile("/r/second$"))  # neither a drag nor a double click opens a step
