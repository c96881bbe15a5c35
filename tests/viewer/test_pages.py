"""The pages of a finished run: sources, metrics, episodes, an episode, its tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.viewer import episode_path, open_viewer

from agentrl.observe.trajectory_index import TrajectoryIndex
from agentrl.viewer.decoding import load_decoder


async def test_a_finished_run_is_listed_with_its_newest_figures(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        (line,) = (await viewer.get("/api/sources"))["sources"]
        assert line["key"] == line["name"] == "first"
        assert (line["kind"], line["state"], line["step"], line["steps"]) == ("run", "finished", 4, 4)
        assert line["environments"] == ["letters:Letters"]
        assert len(line["sparkline"]) == 4
        page = await viewer.get("/api/r/first")
        assert page["config"]["trainer.learning_rate"] == 0.01
        assert "trainer.max_grad_norm" not in page["config"]
        assert page["has_tokens"] is False


async def test_metrics_are_columns_with_intervals_and_evaluations(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        found = await viewer.get("/api/r/first/metrics")
        assert found["steps"] == [1, 2, 3, 4]
        assert all(len(column) == 4 for column in found["columns"].values())
        interval = found["intervals"]["success/mean"]
        success = found["columns"]["success/mean"]
        assert all(
            low <= share <= high for low, share, high in zip(interval["low"], success, interval["high"], strict=True)
        )
        assert [one["step"] for one in found["evaluations"]] == [2, 4]
        assert found["evaluations"][0]["low"] <= found["evaluations"][0]["success"]
        titles = {group["title"]: group["names"] for group in found["groups"]}
        assert "train/entropy" in titles["Entropy"]
        assert sorted(name for names in titles.values() for name in names) == found["names"]
        newer = await viewer.get("/api/r/first/metrics?after=3")
        assert newer["steps"] == [4]
        assert newer["columns"]["reward/mean"] == found["columns"]["reward/mean"][3:]


async def test_episodes_come_in_pages_and_can_be_filtered(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        everything = await viewer.rows("first", "limit=1000")
        assert len(everything) == 24
        first = await viewer.get("/api/r/first/episodes?limit=10&order=reward&descending=true")
        assert (first["total"], len(first["rows"])) == (24, 10)
        second = await viewer.get(
            f"/api/r/first/episodes?limit=20&order=reward&descending=true&cursor={first['cursor']}"
        )
        assert second["cursor"] is None
        ids = [row["id"] for row in (*first["rows"], *second["rows"])]
        assert sorted(ids) == sorted(row["id"] for row in everything)
        rewards = [row["reward"] for row in (*first["rows"], *second["rows"])]
        assert rewards == sorted(rewards, reverse=True)
        assert first["facets"]["environments"] == ["letters:Letters"]
        step = await viewer.rows("first", "step_from=2&step_to=2")
        assert {row["step"] for row in step} == {2}
        assert await viewer.rows("first", "text=no such text") == []
        assert len(await viewer.rows("first", "text=write&limit=1000")) == 24
        group = await viewer.rows("first", f"group={everything[0]['group_id']}")
        assert len(group) == 3


async def test_an_episode_has_its_turns_as_messages_and_its_tokens_as_columns(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        row = (await viewer.rows("first"))[0]
        found = await viewer.get(episode_path("first", row["id"]))
        assert found["row"] == row
        (sequence,) = found["sequences"]
        assert [turn["number"] for turn in sequence["turns"]] == [0, 1, 2]
        kinds = [part["kind"] for part in sequence["turns"][0]["parts"]]
        assert kinds[0] == "user"
        assert "assistant" in kinds
        assert sequence["turns"][0]["parts"][0]["text"].startswith("Write ")
        assert found["chat"][0]["role"] == "user"
        assert row["id"] in found["replay"]
        best = max(await viewer.rows("first"), key=lambda row: row["reward"])
        shown = await viewer.get(episode_path("first", best["id"]))
        assert shown["reward_sources"] == {"environment/step": best["reward"]}
        assert best["reward"] > 0
        tokens = await viewer.get(f"{episode_path('first', row['id'])}/tokens?from=0&to=100000")
        with TrajectoryIndex(runs / "first" / "trajectories") as index:
            known = index.find(row["id"])
            assert known is not None
            stored = index.read(known).trajectory.sequences[0]
        assert tokens["id"] == stored.token_ids.tolist()
        assert tokens["trained"] == stored.loss_mask.astype(int).tolist()
        assert tokens["logprob"] == [None if np.isnan(one) else one for one in stored.logprobs.astype(float).tolist()]
        decoder = load_decoder(str(runs / "first" / "model"))
        assert "".join(tokens["text"]) == decoder.text(tokens["id"])
        assert tokens["turn"][sequence["turns"][1]["start"]] == 1
        part = await viewer.get(f"{episode_path('first', row['id'])}/tokens?from=3&to=7")
        assert part["text"] == tokens["text"][3:7]
        assert part["advantage"] is None


async def test_outcomes_are_counted_by_step_and_success_by_type(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        await viewer.indexed("first")
        found = await viewer.get("/api/r/first/outcomes")
        assert found["steps"] == [1, 2, 3, 4]
        assert sum(map(sum, found["outcomes"].values())) == 24
        (only,) = found["by_task_type"]
        assert only["episodes"] == 24
        assert only["low"] <= only["success"] <= only["high"]
