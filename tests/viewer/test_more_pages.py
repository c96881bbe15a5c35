"""Groups, comparisons, notes, overlays and raw episodes."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from support.viewer import Viewer, episode_path, open_viewer

from agentrl.observe.token_table import read_token_rows
from agentrl.observe.trajectory_index import TrajectoryIndex
from agentrl.runs.rl import train
from agentrl.runs.start import Run


def write_tables(run: Path, step: int) -> list[str]:
    """Write the trainer's tables of a step: every sampled token with its position as the advantage."""
    tokens: list[dict[str, Any]] = []
    episodes: list[dict[str, Any]] = []
    with TrajectoryIndex(run / "trajectories") as index:
        for row in index.select():
            if row.step != step:
                continue
            stored = index.read(row).trajectory
            episodes.append({"episode": row.id, "group": row.group_id, "advantage_mean": 0.5, "dropped": None})
            for number, sequence in enumerate(stored.sequences):
                for position in sequence.loss_mask.nonzero()[0].tolist():
                    is_masked = position % 2 == 1
                    tokens.append(
                        {
                            "episode": row.id,
                            "sequence": number,
                            "position": position,
                            "token": int(sequence.token_ids[position]),
                            "advantage": float(position),
                            "ratio": 1.0,
                            "entropy": None,
                            "trainer_logprob": -1.0,
                            "clipped": is_masked,
                            "masked_by": "stale" if is_masked else None,
                        }
                    )
    folder = run / "tokens"
    folder.mkdir(exist_ok=True)
    types = [("entropy", pa.float32())]
    table = pa.Table.from_pylist(tokens)
    for name, kind in types:
        table = table.set_column(table.column_names.index(name), name, pa.nulls(len(tokens), kind))
    pq.write_table(table, folder / f"step-{step:06d}.parquet")
    pq.write_table(pa.Table.from_pylist(episodes), folder / f"episodes-{step:06d}.parquet")
    return [row["episode"] for row in episodes]


async def test_tokens_have_the_overlays_of_the_trainers_table(runs: Path) -> None:
    (identity, *_) = write_tables(runs / "first", 2)
    async with open_viewer(runs) as viewer:
        assert (await viewer.get("/api/r/first"))["has_tokens"] is True
        await viewer.indexed("first")
        found = await viewer.get(f"{episode_path('first', identity)}/tokens?to=1000")
        for position, trained in enumerate(found["trained"]):
            assert found["advantage"][position] == (position if trained else None)
            assert found["masked_by"][position] == ("stale" if trained and position % 2 else None)
            assert found["clipped"][position] == int(bool(trained and position % 2))
        assert set(found["entropy"]) == {None}
        assert found["episode_return"] is None
        part = await viewer.get(f"{episode_path('first', identity)}/tokens?from=5&to=30")
        assert part["advantage"] == found["advantage"][5:30]
        other = (await viewer.rows("first", "step_from=4"))[0]["id"]
        assert (await viewer.get(f"{episode_path('first', other)}/tokens"))["advantage"] is None


async def test_overlays_equal_the_trainers_values(tiny_run: Callable[..., Run]) -> None:
    run = tiny_run("trainer.steps=1", "observe.tokens=all")
    await asyncio.to_thread(train, run)
    async with open_viewer(run.folder.path) as viewer:
        await viewer.indexed("run")
        for row in await viewer.rows("run"):
            found = await viewer.get(f"{episode_path('run', row['id'])}/tokens")
            table = read_token_rows(run.folder.path, 1, row["id"])
            assert table is not None
            positions = table["position"].to_pylist()
            assert positions == [place for place, trained in enumerate(found["trained"]) if trained]
            for name in ("advantage", "ratio", "entropy", "trainer_logprob"):
                assert [found[name][place] for place in positions] == table[name].to_pylist()
                assert sum(value is not None for value in found[name]) == len(positions)


async def test_a_damaged_table_leaves_the_tokens_readable(runs: Path) -> None:
    (identity, *_) = write_tables(runs / "first", 2)
    for file in (runs / "first" / "tokens").iterdir():
        file.write_bytes(file.read_bytes()[:-20])
    async with open_viewer(runs) as viewer:
        await viewer.indexed("first")
        found = await viewer.get(f"{episode_path('first', identity)}/tokens")
        assert found["advantage"] is None
        assert "cannot be read" in found["overlay_problem"]
        row = (await viewer.get(episode_path("first", identity)))["row"]
        group = await viewer.get(f"/api/r/first/group/{quote(row['group_id'], safe='')}")
        assert "cannot be read" in group["overlay_problem"]


async def test_a_group_shows_where_its_members_part(runs: Path) -> None:
    write_tables(runs / "first", 2)
    async with open_viewer(runs) as viewer:
        row = (await viewer.rows("first", "step_from=2&step_to=2"))[0]
        found = await viewer.get(f"/api/r/first/group/{row['group_id']}")
        assert [member["row"]["member"] for member in found["members"]] == [0, 1, 2]
        assert found["members"][0]["parts_at"] is None
        assert {member["advantage"] for member in found["members"]} == {0.5}
        rewards = [member["row"]["reward"] for member in found["members"]]
        assert abs(found["mean"] - sum(rewards) / 3) < 1e-9
        tokens = [
            await viewer.get(f"{episode_path('first', member['row']['id'])}/tokens") for member in found["members"]
        ]
        for member, own in zip(found["members"][1:], tokens[1:], strict=True):
            place = member["parts_at"]["position"]
            assert own["id"][:place] == tokens[0]["id"][:place]
            assert own["id"][place : place + 1] != tokens[0]["id"][place : place + 1]
            assert own["turn"][place] in (member["parts_at"]["turn"], None)
        assert found["first_difference"]["position"] == min(m["parts_at"]["position"] for m in found["members"][1:])
        assert (await viewer.refuse("/api/r/first/group/nothing"))[0] == 404


def change_success(run: Path, step: int) -> int:
    """Make all episodes of a step succeed with reward 9; return how many did not before."""
    file = run / "trajectories" / f"step-{step:06d}.jsonl"
    changed = 0
    lines = []
    for line in file.read_bytes().splitlines():
        record = orjson.loads(line)
        record.pop("checksum", None)
        if record["kind"] == "end":
            changed += not record["trajectory"]["success"]
            record["trajectory"] |= {"success": True, "reward": 9.0}
        lines.append(orjson.dumps(record))
    file.write_bytes(b"\n".join(lines) + b"\n")
    return changed


async def test_two_runs_are_compared_task_by_task(runs: Path) -> None:
    shutil.copytree(runs / "first", runs / "second")
    for step in (1, 2, 3, 4):
        change_success(runs / "second", step)
    async with open_viewer(runs) as viewer:
        await viewer.indexed("first")
        await viewer.indexed("second")
        found = await viewer.get("/api/compare?a=first&b=second")
        assert found["lost"] == 0
        assert found["won"] + found["same"] == len(found["tasks"]) == 8
        assert found["test"]["difference"] >= 0
        assert 0 < found["test"]["p"] <= 1
        assert found["only_a"] == found["only_b"] == 0
        assert found["panels"] == {"a": None, "b": None, "match": "unknown"}, "runs have no panel"
        assert {task["b"]["success"] for task in found["tasks"]} == {1.0}
        back = await viewer.get("/api/compare?a=second&b=first")
        assert (back["won"], back["lost"]) == (found["lost"], found["won"])
        task = found["tasks"][0]["task"]
        two = await viewer.get(f"/api/compare/episodes?a=first&b=second&task={quote(task)}")
        assert two["a"]["row"]["task_id"] == two["b"]["row"]["task_id"] == task
        assert len(two["episodes_a"]) == 3
        assert (await viewer.get("/api/compare/episodes?a=first&b=second&task=no"))["a"] is None
        assert (await viewer.refuse("/api/compare?a=first"))[1]["message"] == "b is missing"


async def test_the_record_and_the_prompts_of_an_episode_can_be_read(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        row = (await viewer.rows("first"))[0]
        path = episode_path("first", row["id"])
        raw = await viewer.get(f"{path}/raw")
        assert raw["id"] == row["id"]
        assert raw["messages"]["answers"]
        tokens = await viewer.get(f"{path}/tokens")
        turns = (await viewer.get(path))["sequences"][0]["turns"]
        prompt = await viewer.get(f"{path}/prompt?turn=1")
        assert prompt["ids"] == tokens["id"][: turns[1]["start"]]
        assert prompt["text"] == "".join(tokens["text"][: turns[1]["start"]])
        assert (await viewer.refuse(f"{path}/prompt?turn=9"))[0] == 404


async def post(viewer: Viewer, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **headers}
    async with viewer.client.post(path, data=data, headers=sent) as answer:
        return answer.status, orjson.loads(await answer.read())


async def test_notes_are_kept_in_the_runs_folder(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        row = (await viewer.rows("first"))[0]
        path = "/api/r/first/notes"
        status, note = await post(viewer, path, {"episode": row["id"], "turn": 1, "text": "<b>why</b>?"})
        assert status == 200
        _, other = await post(viewer, path, {"episode": row["id"], "turn": None, "text": "\ud83d"})
        found = (await viewer.get(episode_path("first", row["id"])))["notes"]
        assert [one["text"] for one in found] == ["<b>why</b>?", "?"]
        assert (runs / "first" / "notes.jsonl").read_bytes().count(b"\n") == 2
        async with viewer.client.delete(f"{path}/{note['id']}") as answer:
            assert answer.status == 200
        assert [one["id"] for one in (await viewer.get(path))["notes"]] == [other["id"]]
        async with viewer.client.delete(f"{path}/{note['id']}") as answer:
            assert answer.status == 404


async def test_invalid_notes_are_rejected(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        row = (await viewer.rows("first"))[0]
        path, good = "/api/r/first/notes", {"episode": row["id"], "turn": 0, "text": "x"}
        for wrong in ({"text": ""}, {"text": "x" * 10_001}, {"turn": True}, {"turn": -1}, {"episode": 3}, {"text": 1}):
            status, answer = await post(viewer, path, {**good, **wrong})
            assert (status, "not valid" in answer["error"]["message"]) == (400, True)
        assert (await post(viewer, path, {**good, "episode": "no"}))[0] == 404
        assert (await post(viewer, path, b"no json"))[0] == 400
        assert (await post(viewer, path, good, **{"Content-Type": "text/plain"}))[0] == 400
        assert (await post(viewer, path, {**good, "text": "x" * 2**19}))[0] == 413
        assert (await post(viewer, path, good, Origin="https://evil.example"))[0] == 403
        assert not (runs / "first" / "notes.jsonl").exists()
        outside = runs.parent / "outside.jsonl"
        (runs / "first" / "notes.jsonl").symlink_to(outside)
        status, answer = await post(viewer, path, good)
        assert (status, "is outside" in answer["error"]["message"]) == (400, True)
        assert not outside.exists()
