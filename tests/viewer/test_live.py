"""Runs that are being written, damaged, deleted, or of another version; evaluations without tokens; several roles."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.viewer import Viewer, an_episode, episode_path, open_viewer, store

from agentrl.errors import Outcome
from agentrl.evaluation.panel import EvaluatedEpisode
from agentrl.message import ImagePart, Message, TextPart, ToolCall, user
from agentrl.message.image import PlacedImage
from agentrl.message.message import TranscriptMessage
from agentrl.observe.files import JsonLinesWriter
from agentrl.observe.metrics import MetricsFile
from agentrl.observe.run_status import (
    CurrentWait,
    EpisodeInFlight,
    EpisodeState,
    RunEnd,
    RunSnapshot,
    TurnText,
    process_start,
    write_status,
)
from agentrl.trajectory import BranchPoint, Source, TokenSequence, Trajectory, Turn
from agentrl.viewer import library


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "POLL_S", 0.02)
    monkeypatch.setattr(library, "SEARCH_EVERY_S", 0.05)
    monkeypatch.setattr(library, "STATE_EVERY_S", 0.05)


async def until(viewer: Viewer, path: str, holds: Callable[[Any], bool]) -> None:
    """Ask until the answer is as expected."""
    async with asyncio.timeout(100):
        while True:
            if holds(await viewer.get(path)):
                return
            await asyncio.sleep(0.02)


async def wait_for(viewer: Viewer, kind: str, source: str | None, change: Any) -> dict[str, Any]:
    """Make a change, and return the body of the first event of a kind after it."""
    path = "/api/events" + ("" if source is None else f"?source={source}")
    async with asyncio.timeout(100), viewer.client.get(path) as stream:
        assert stream.content_type == "text/event-stream"
        assert await stream.content.readline() == b"event: connected\n"
        change()
        while True:
            if (await stream.content.readline()) == b"event: %s\n" % kind.encode():
                body: dict[str, Any] = orjson.loads((await stream.content.readline()).removeprefix(b"data: "))
                if source is None or body["source"] == source:
                    return body


def this_process(**changes: Any) -> RunSnapshot:
    """A status of this process, with an episode in flight."""
    turns = [TurnText(role="user", text="hi")]
    flying = EpisodeInFlight(
        id="9-new/0.0",
        environment="letters:Letters",
        task="new",
        state=EpisodeState.TOOL,
        since=0.0,
        started=0.0,
        turns=turns,
    )
    values: dict[str, Any] = {
        "pid": os.getpid(),
        "process_started": process_start(os.getpid()),
        "host": socket.gethostname(),
        "time": time.time(),
        "in_flight": [flying],
    }
    return RunSnapshot(**{**values, **changes})


@pytest.mark.slow
async def test_new_episodes_metrics_status_and_runs_are_announced(runs: Path) -> None:
    first = runs / "first"
    async with open_viewer(runs) as viewer:
        await viewer.indexed("first")

        def play() -> None:
            store(first, an_episode(0))

        await wait_for(viewer, "episodes", "first", play)
        await until(viewer, "/api/r/first/episodes?task=new", lambda found: found["total"] == 1)

        def train() -> None:
            metrics = MetricsFile(first / "metrics.jsonl")
            metrics.append_step(5, {"success/mean": 1.0, "new/metric": 2.0})
            metrics.close()

        body = await wait_for(viewer, "metrics", "first", train)
        assert body["step"] == 5
        found = await viewer.get("/api/r/first/metrics?after=4")
        assert (found["steps"], found["columns"]["new/metric"]) == ([5], [2.0])
        assert found["columns"]["reward/mean"] == [None]

        def report() -> None:
            write_status(first, this_process(phase="train", step=5))

        assert (await wait_for(viewer, "status", "first", report))["phase"] == "train"
        assert (await viewer.get("/api/r/first"))["state"] == "running"
        await wait_for(viewer, "sources", None, lambda: shutil.copytree(first, runs / "second"))
        await until(viewer, "/api/sources", lambda found: len(found["sources"]) == 2)


async def test_the_list_does_not_wait_for_many_runs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LINES_S", -1.0)
    monkeypatch.setattr(library, "POLL_S", 0.2)
    for number in range(30):
        (runs / f"many-{number}").mkdir()
        for part in ("config.yaml", "metrics.jsonl"):
            (runs / f"many-{number}" / part).write_bytes((runs / "first" / part).read_bytes())
    async with open_viewer(runs) as viewer:
        found = await viewer.get("/api/sources")
        assert found["unread"] > 0
        assert len(found["sources"]) + found["unread"] == 31
        await until(viewer, "/api/sources", lambda found: not found["unread"])
        assert len((await viewer.get("/api/sources"))["sources"]) == 31


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "running"),
        ({"age": 100.0}, "stalled"),
        ({"deadline": -60.0}, "stalled"),
        ({"deadline": 60.0}, "running"),
        ({"deadline": None}, "running"),
        ({"process_started": 1}, "crashed"),
        ({"end": RunEnd.FINISHED}, "finished"),
        ({"end": RunEnd.STOPPED}, "interrupted"),
        ({"end": RunEnd.FAILED}, "crashed"),
        (b"[1]", "crashed"),
        (b"{", "crashed"),
        (None, "crashed"),
    ],
)
async def test_the_state_of_a_run_before_its_last_step(runs: Path, changes: Any, state: str) -> None:
    first, now = runs / "first", time.time()
    (first / "diagnosis.json").unlink()
    lines = (first / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (first / "metrics.jsonl").write_bytes(b"".join(lines[:2]))
    if isinstance(changes, dict):
        own = dict(changes)
        own["time"] = now - own.pop("age", 0.0)
        if "deadline" in own:
            limit = own.pop("deadline")
            deadline = None if limit is None else now + limit
            own["waits"] = [CurrentWait(owner="e", kind="tool", what="search", since=now, deadline=deadline)]
        write_status(first, this_process(**own))
    elif changes is None:
        (first / "status.json").unlink()
    else:
        (first / "status.json").write_bytes(changes)
    async with open_viewer(runs) as viewer:
        assert (await viewer.get("/api/r/first"))["state"] == state
        found = await viewer.get("/api/r/first/in-flight")
        assert found["state"] == state
        assert len(found["in_flight"]) == isinstance(changes, dict)


async def test_runs_without_metrics_or_of_other_versions_are_shown(runs: Path) -> None:
    first = runs / "first"
    (first / "metrics.jsonl").unlink()
    (first / "config.yaml").write_text(
        "future: {key: [1, 2]}\nmodel: 7\nenvironment: maze/train\ntrainer: {steps: many}\n"
    )
    (first / "diagnosis.json").write_text('{"version": 9}')
    async with open_viewer(runs) as viewer:
        found = await viewer.get("/api/r/first")
        assert (found["step"], found["steps"], found["environments"]) == (None, None, ["maze"])
        assert found["config"]["future"] == {"key": [1, 2]}
        assert (await viewer.get("/api/r/first/metrics"))["names"] == []
        assert len(await viewer.rows("first", "limit=1000")) == 24
        for text in ("", "[1", "- 1", "a: &a [*a]", "\x00"):
            (first / "config.yaml").write_text(text)
            async with open_viewer(first) as other:
                assert (await other.get("/api/r/first"))["environments"] == []


async def test_damaged_files_hide_only_damaged_records(runs: Path) -> None:
    first = runs / "first"
    file = first / "trajectories" / "step-000002.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    lines[3] = b'{"kind": "turn", "id": 7}\n'
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    metrics = (first / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (first / "metrics.jsonl").write_bytes(b"".join([metrics[0], b"[]\n", metrics[1][:30] + b"\n", metrics[2]]))
    (first / "trajectories" / ".index.sqlite").write_bytes(b"SQLite format 3\x00 but damaged" * 100)
    (first / "status.json").write_bytes(b"{")
    (first / "notes.jsonl").write_bytes(b'{"id": 1}\n[]\n\xff\n{"deleted": []}\n')
    async with open_viewer(runs) as viewer:
        found = await viewer.rows("first", "limit=1000")
        assert 18 <= len(found) < 24
        listed = (await viewer.get("/api/r/first"))["damage"]
        assert listed == (await viewer.get("/api/r/first/episodes"))["damage"]
        assert listed[0]["file"] == "trajectories/step-000002.jsonl"
        assert 4 in listed[0]["lines"]
        assert listed[0]["records"] == len(listed[0]["lines"])
        assert listed[1] == {"file": "metrics.jsonl", "records": 2, "lines": [2, 3]}
        assert (await viewer.get("/api/r/first/metrics"))["steps"] == [1, 3]
        assert (await viewer.get("/api/r/first/notes"))["notes"] == []
        for row in found[:3]:
            assert (await viewer.get(episode_path("first", row["id"])))["row"]["id"] == row["id"]


async def test_a_run_may_be_rewritten_and_deleted_while_it_is_read(runs: Path) -> None:
    first = runs / "first"
    async with open_viewer(runs) as viewer:
        row = (await viewer.rows("first"))[-1]
        await asyncio.sleep(0.1)
        for file in (first / "trajectories").glob("step-*.jsonl"):
            os.truncate(file, 100)
        status = 200
        async with asyncio.timeout(100):
            while status == 200:
                answer, _ = await viewer.answer(episode_path("first", row["id"]))
                status = answer.status
                assert status in (200, 400, 404)
        await until(viewer, "/api/r/first/episodes", lambda found: found["total"] == 0)
        store(first, an_episode(1))
        await until(viewer, "/api/r/first/episodes", lambda found: found["total"] == 1)
        shutil.rmtree(first)
        async with asyncio.timeout(100):
            while (await viewer.get("/api/sources"))["sources"]:
                answer, _ = await viewer.answer("/api/r/first/episodes")
                assert answer.status in (200, 400, 404)
                await asyncio.sleep(0.02)
        assert (await viewer.refuse("/api/r/first/episodes"))[0] == 404


async def test_a_running_episode_and_a_branch_are_shown(runs: Path) -> None:
    running, branch = an_episode(2), an_episode(3)
    running.outcome = None
    branch.branches_from = BranchPoint(parent="9-new/0.0", turn=1)
    store(runs / "first", running, branch)
    async with open_viewer(runs) as viewer:
        (row,) = await viewer.rows("first", "running=true")
        assert (row["id"], row["complete"]) == ("9-new/2.0", False)
        found = await viewer.get(episode_path("first", row["id"]))
        assert [(turn["start"], turn["end"]) for turn in found["sequences"][0]["turns"]] == [(3, 5), (6, 8)]
        found = await viewer.get(episode_path("first", "9-new/3.0"))
        assert found["branches_from"] == {"parent": "9-new/0.0", "turn": 1}


def a_rich_episode() -> Trajectory:
    """An episode of two roles with a fork, an image, thinking, a tool call and a remark."""
    image = ImagePart(data=b"\x89PNG" + bytes(40_000), alternative="a cat")
    planner, worker = TokenSequence(), TokenSequence()
    for sequence in (planner, worker):
        sequence.extend([5, 6, 7, 7, 7, 7], Source.PROMPT)
    worker.place(PlacedImage(start=2, rows=2, columns=2, image=image))
    planner.extend_sampled([8], logprobs=[-0.5], versions=[1])
    planner.turns.append(Turn(index=0, start=6, end=7, role="planner"))
    worker.extend_sampled([9], logprobs=[-0.5], versions=[2])
    worker.turns.append(Turn(index=1, start=6, end=7, role="worker", valid=False))
    fork = worker.fork(6)
    fork.extend_sampled([9, 9], logprobs=[-0.5, -1.0], versions=[2, 3])
    fork.turns.append(Turn(index=2, start=6, end=8, role="worker", reward=0.5))
    episode = Trajectory(
        id="9-rich/0.0",
        task_id="rich",
        environment="rooms",
        seed=1,
        group_id="9-rich",
        sequences=[planner, worker, fork],
    )
    plan = Message(role="assistant", content="<think>first</think>plan <script>alert(1)</script>")
    call = ToolCall(name="look", arguments={"where": ["up"], "deep": {"n": 2**70}, "id": 107505301260286111}, id="c1")
    wrong = Message(role="assistant", content="what?")
    looks = Message(role="assistant", content="", reasoning="I look.", tool_calls=(call,))
    seen = user((TextPart(text="You see:"), image))
    remark = user("Your last answer had no <action> </action>, so nothing happened.")
    result = Message(role="tool", content="a cat", tool_call_id="c1", name="look")
    episode.conversations = [
        [Message(role="system", content="Plan."), user("Go."), plan],
        [seen, wrong, remark],
        [seen, wrong, remark, looks, result],
    ]
    episode.answers = [plan, wrong, looks]
    episode.completions = ["plan", "what?", ""]
    episode.outcome, episode.reward, episode.success, episode.error = Outcome.STOPPED_BY_TOOL, 1.0, True, "odd\ud83d"
    return episode


async def test_roles_forks_images_tools_and_remarks_are_parts(runs: Path) -> None:
    store(runs / "first", a_rich_episode())
    async with open_viewer(runs) as viewer:
        (row,) = await viewer.rows("first", "role=planner")
        assert row["roles"] == ["planner", "worker"]
        found = await viewer.get(episode_path("first", row["id"]))
        sequences = found["sequences"]
        assert [(one["role"], one["parent"], one["shared"]) for one in sequences] == [
            ("planner", None, 0),
            ("worker", None, 0),
            ("worker", 1, 6),
        ]
        kinds = [[part["kind"] for turn in one["turns"] for part in turn["parts"]] for one in sequences]
        assert kinds == [
            ["system", "user", "thinking", "assistant"],
            ["user", "image", "assistant", "remark"],
            ["thinking", "tool_call", "tool_result"],
        ]
        (turn,) = sequences[2]["turns"]
        assert turn["parts"][1]["name"] == "look"
        arguments = turn["parts"][1]["arguments"]
        assert (arguments["where"], arguments["id"]) == (["up"], "107505301260286111"), "exact in a browser, too"
        assert (turn["oldest_version"], turn["version"], turn["reward"]) == (2, 3, 0.5)
        assert sequences[1]["turns"][0]["invalid"] is True
        assert sequences[0]["turns"][0]["parts"][3]["text"] == "plan <script>alert(1)</script>"
        (image,) = [part for turn in sequences[1]["turns"] for part in turn["parts"] if part["kind"] == "image"]
        answer, body = await viewer.answer(image["data"])
        assert (answer.status, answer.content_type, body[:4]) == (200, "image/png", b"\x89PNG")
        assert (await viewer.answer(f"{image['data']}0"))[0].status == 404
        tokens = await viewer.get(f"{episode_path('first', row['id'])}/tokens?sequence=2")
        assert tokens["trained"] == [0] * 6 + [1, 1]
        assert [(one["start"], one["end"]) for one in tokens["images"]] == [(2, 6)]
        assert (await viewer.refuse(f"{episode_path('first', row['id'])}/tokens?sequence=3"))[0] == 400
        assert (await viewer.get(f"{episode_path('first', row['id'])}/raw"))["id"] == row["id"]
        found = await viewer.get("/api/r/first/episodes?text=<script>")
        assert [one["id"] for one in found["rows"]] == [row["id"]]


async def test_an_evaluation_of_a_text_service_has_no_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations" / "engine-4f0c"
    episode = Trajectory(id="evaluation/t/0.0", task_id="t", environment="maze", seed=1, group_id="evaluation/t")
    sequence = TokenSequence()
    sequence.turns.append(Turn(index=0, start=0, end=0, counted_tokens=12))
    episode.sequences.append(sequence)
    episode.transcript = [
        [
            TranscriptMessage(role="system", text="Be brief."),
            TranscriptMessage(role="user", text="Where?"),
            TranscriptMessage(role="assistant", text="<think>hm</think>here", turn=0),
            TranscriptMessage(role="user", text="No."),
        ]
    ]
    episode.outcome, episode.reward, episode.success = Outcome.FINISHED, 0.0, False
    writer = JsonLinesWriter(folder / "episodes.jsonl")
    writer.append(EvaluatedEpisode(task_id="t", sample=0, trajectory=episode, task="d", played_at=5.0).to_record())
    writer.close()
    async with open_viewer(tmp_path) as viewer:
        (line,) = (await viewer.get("/api/sources"))["sources"]
        assert (line["kind"], line["state"]) == ("evaluation", "crashed")
        key = line["key"]
        (row,) = await viewer.rows(key)
        found = await viewer.get(episode_path(key, row["id"]))
        (turn,) = found["sequences"][0]["turns"]
        assert [part["kind"] for part in turn["parts"]] == ["system", "user", "thinking", "assistant", "observation"]
        assert found["chat"][2]["content"] == "<think>hm</think>here"
        tokens = await viewer.get(f"{episode_path(key, row['id'])}/tokens")
        assert (tokens["total"], tokens["id"]) == (0, [])
        result = {"env": "maze/valid", "model": "gpt", "success": {"mean": 0.0}, "reward": None, "problems": []}
        (folder / "evaluation.json").write_bytes(orjson.dumps(result))
        page = await viewer.get(f"/api/r/{key}")
        assert (page["state"], page["environments"], page["model"], page["success"]) == (
            "finished",
            ["maze"],
            "gpt",
            0.0,
        )
        assert page["splits"] == {"maze": ["valid"]}


async def test_pages_need_not_wait_for_the_watcher(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first page may be one of episodes, and files may change before they are first watched."""
    monkeypatch.setattr(library, "POLL_S", 1000.0)
    async with open_viewer(runs) as viewer:
        page = await viewer.get("/api/r/first/episodes")
        assert page["facets"]["splits"] == ["train"]
        status = runs / "first" / "status.json"

        def change() -> None:
            status.write_bytes(status.read_bytes() + b" ")
            viewer.server.library._look_at("first", viewer.server.library["first"])

        await wait_for(viewer, "status", "first", change)
