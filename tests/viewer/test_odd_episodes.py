"""Episodes and files that have broken viewers of other projects, and texts that were made to break one."""

from __future__ import annotations

import os
import time
from pathlib import Path
from urllib.parse import quote

import orjson
import pytest
from support.viewer import an_episode, episode_path, open_viewer, store

from agentrl.cli.view import show_episodes
from agentrl.errors import Outcome
from agentrl.message import ImagePart, TextPart, user
from agentrl.observe.metrics import MetricsFile
from agentrl.observe.trajectory_index import EpisodeFilter
from agentrl.trajectory import TurnTimings
from agentrl.viewer.episode_view import _text_answer

PATHS = ["../../etc/passwd", "evals/id_2", "a/b?c#d&e=f", "x%2Fy%00", "C:\\tasks\\1", " ", ".", "é\u2028✓", "t" * 900]


@pytest.mark.parametrize("task", PATHS)
async def test_a_task_may_be_named_like_a_path_or_an_address(runs: Path, task: str) -> None:
    episode = an_episode(0)
    episode.task_id, episode.group_id, episode.id = task, f"9-{task}", f"9-{task}/0.0"
    store(runs / "first", episode)
    async with open_viewer(runs) as viewer:
        await viewer.indexed("first")
        (row,) = (await viewer.get("/api/r/first/episodes", params={"task": task}))["rows"]
        assert row["id"] == episode.id
        found = await viewer.get(episode_path("first", episode.id))
        assert found["row"]["task_id"] == task
        assert (await viewer.get(f"{episode_path('first', episode.id)}/tokens"))["total"] == 9
        group = await viewer.get(f"/api/r/first/group/{quote(episode.group_id, safe='')}")
        assert group["task"] == task


@pytest.mark.slow
async def test_episode_with_many_turns_and_metrics_is_read_quickly(runs: Path) -> None:
    episode = an_episode(0, turns=3000)
    episode.metrics = {f"tool/{number}/seconds": float(number) for number in range(7000)}
    store(runs / "first", episode)
    async with open_viewer(runs) as viewer:
        await viewer.indexed("first")
        used = time.process_time()
        found = await viewer.get(episode_path("first", episode.id))
        assert time.process_time() - used < 4.0
        assert len(found["sequences"][0]["turns"]) == 3000
        assert len(found["metrics"]) == 7000


async def test_images_of_megabytes_are_not_part_of_the_document(runs: Path) -> None:
    episode = an_episode(0)
    images = [ImagePart(data=bytes([number]) * 2**20, alternative=f"picture {number}") for number in range(12)]
    episode.conversations[0].insert(1, user((*images, TextPart(text="Twelve pictures."))))
    store(runs / "first", episode)
    async with open_viewer(runs) as viewer:
        await viewer.indexed("first")
        answer, body = await viewer.answer(episode_path("first", episode.id))
        assert (answer.status, len(body) < 20_000) == (200, True)
        parts = [part for turn in orjson.loads(body)["sequences"][0]["turns"] for part in turn["parts"]]
        pictures = [part["data"] for part in parts if part["kind"] == "image"]
        assert len(pictures) == 12
        answer, body = await viewer.answer(pictures[3])
        assert (answer.status, body) == (200, images[3].data)


@pytest.mark.parametrize("kind", ["image/svg+xml", "text/html", 'image/png" onerror="alert(1)'])
async def test_an_image_that_is_a_program_is_not_sent_as_one(runs: Path, kind: str) -> None:
    episode = an_episode(0)
    program = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>" + b" " * 40_000
    image = ImagePart(data=program, media_type=kind, alternative="a program")
    episode.conversations[0].insert(1, user((image,)))
    store(runs / "first", episode)
    async with open_viewer(runs) as viewer:
        await viewer.indexed("first")
        answer, _ = await viewer.answer(f"{episode_path('first', episode.id)}/image/{image.checksum}")
        assert answer.content_type == "application/octet-stream"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_the_next_page_continues_while_episodes_end(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        await viewer.indexed("first")
        first = await viewer.get("/api/r/first/episodes?limit=10&descending=true")
        store(runs / "first", *(an_episode(number) for number in range(5)))
        await viewer.indexed("first")
        rest = await viewer.get(f"/api/r/first/episodes?limit=100&descending=true&cursor={first['cursor']}")
        ids = [row["id"] for row in (*first["rows"], *rest["rows"])]
        assert len(ids) == len(set(ids)) == 24
        assert rest["total"] in (24, 29)  # the index may not have been read again


async def test_filter_with_few_matches_has_a_separate_first_page(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        page = await viewer.get("/api/r/first/episodes?limit=10")
        status, error = await viewer.refuse(f"/api/r/first/episodes?limit=10&cursor={page['cursor']}999")
        assert (status, "start at the first page" in error["hint"]) == (400, True)
        found = await viewer.get("/api/r/first/episodes?limit=10&step_from=4&step_to=4")
        assert (len(found["rows"]), found["cursor"]) == (6, None)


async def test_steps_that_are_written_again_replace_the_earlier_ones(runs: Path) -> None:
    metrics = MetricsFile(runs / "first" / "metrics.jsonl")
    for step in (3, 4, 5):
        metrics.append_step(step, {"reward/mean": 9.0 + step, "late/metric": 1.0})
    metrics.close()
    async with open_viewer(runs) as viewer:
        found = await viewer.get("/api/r/first/metrics")
        assert found["steps"] == [1, 2, 3, 4, 5]
        assert found["columns"]["reward/mean"][2:] == [12.0, 13.0, 14.0]
        assert found["columns"]["late/metric"] == [None, None, 1.0, 1.0, 1.0]


async def test_numbers_that_are_not_finite_are_unknown(runs: Path) -> None:
    episode = an_episode(0)
    episode.metrics = {"ratio": float("nan"), "best": float("inf")}
    episode.turns[0].timings = TurnTimings(decode=7300.0, tool=1e-7, started=0.5)
    store(runs / "first", episode)
    metrics = MetricsFile(runs / "first" / "metrics.jsonl")
    metrics.append_step(5, {"reward/mean": float("nan"), "train/loss": float("-inf")})
    metrics.close()
    async with open_viewer(runs) as viewer:
        await viewer.indexed("first")
        found = await viewer.get(episode_path("first", episode.id))
        assert found["metrics"] == {"ratio": None, "best": None}
        timings = found["sequences"][0]["turns"][0]["timings"]
        assert (timings["decode"], timings["started"]) == (7300.0, 0.5)
        columns = (await viewer.get("/api/r/first/metrics"))["columns"]
        assert (columns["reward/mean"][-1], columns["train/loss"][-1]) == (None, None)


def test_markup_of_terminals_is_printed_as_it_is(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    episode = an_episode(0)
    text = "[/dim] [bold red]no[/] [link=file:///etc/passwd]x[/link] \x1b]0;title\x07 {0} %s"
    episode.conversations[0].insert(1, user(text))
    episode.task_id = "[/b] {task}"
    episode.outcome, episode.error = Outcome.ENVIRONMENT_ERROR, "[/red] failed"
    store(runs / "first", episode)
    show_episodes(runs / "first", EpisodeFilter(task_id=episode.task_id), count=1, output=None)
    shown = capsys.readouterr().out
    assert "[/b] {task}" in shown
    assert "\x1b]0;" not in shown


def test_many_opened_tags_take_no_quadratic_time() -> None:
    text = "<tool_call>{}" * 40_000 + "<think>" * 10_000
    used = time.process_time()
    (part,) = _text_answer(text, is_valid=True)
    assert part["kind"] == "assistant"
    calls = list(_text_answer('<tool_call>\n{"name": "look"}\n</tool_call>' * 5_000, is_valid=True))
    assert {call["name"] for call in calls} == {"look"}
    assert time.process_time() - used < 5.0


async def test_a_run_may_have_any_name(tmp_path: Path, finished_run: Path) -> None:
    names = ["a?b#c&d=e", "<img src=x onerror=alert(1)>", "a..b%2f..", "two words", os.fsdecode(b"bytes-\xff")]
    for name in names:
        (tmp_path / name).symlink_to(finished_run)  # a link is not followed
        folder = tmp_path / f"{name}-1"
        folder.mkdir()
        for part in ("config.yaml", "metrics.jsonl"):
            (folder / part).write_bytes((finished_run / part).read_bytes())
    async with open_viewer(tmp_path) as viewer:
        found = (await viewer.get("/api/sources"))["sources"]
        assert len(found) == len({source["key"] for source in found}) == len(names)
        for source in found:
            assert (await viewer.get(f"/api/r/{quote(source['key'], safe='')}"))["key"] == source["key"]
            assert (await viewer.get(f"/api/r/{quote(source['key'], safe='')}/metrics"))["steps"] == [1, 2, 3, 4]
