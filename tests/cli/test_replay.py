"""`agentrl replay`: continuations of stored episodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.trajectory import Trajectory

Cli = Callable[..., Any]


@pytest.fixture
def longest(trained_run: Path) -> Trajectory:
    """A stored episode with the most turns."""
    found = read_trajectories(RunDirectory(trained_run).trajectories)
    return max((one.trajectory for one in found), key=lambda trajectory: len(trajectory.turns))


def test_without_an_id_the_episodes_are_listed(agentrl: Cli, trained_run: Path, longest: Trajectory) -> None:
    ended = agentrl("replay", str(trained_run))
    assert ended.code == 0, ended.err
    assert longest.id in ended.out
    assert "agentrl replay" in ended.err


def test_continuations_repeat_the_first_turns_and_are_stored(
    agentrl: Cli, trained_run: Path, longest: Trajectory
) -> None:
    turns = len(longest.turns) - 1
    assert turns >= 1
    ended = agentrl("replay", str(trained_run), longest.id, "--turn", str(turns), "--n", "4", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["episode"], found["turn"], found["failed"]) == (longest.id, turns, 0)
    assert [one["turns"] > turns for one in found["continuations"]] == [True] * 4
    assert 0 <= found["success"]["low"] <= found["success"]["mean"] <= found["success"]["high"] <= 1
    assert found["reward"]["low"] <= found["reward"]["mean"] <= found["reward"]["high"]
    lines = (Path(found["folder"]) / "episodes.jsonl").read_text().splitlines()
    assert len(lines) == 4
    for line in lines:
        record = json.loads(line)["trajectory"]
        assert record["branches_from"] == {"parent": longest.id, "turn": turns}
        (sequence,) = record["sequences"]
        end = longest.sequences[0].turns[turns - 1].end
        assert sequence["token_ids"][:end] == longest.sequences[0].ids_list()[:end]
    viewed = agentrl("view", found["folder"], "--terminal", "--count", "4")
    assert viewed.code == 0, viewed.err


def test_the_table_shows_returns_and_the_first_other_answer(
    agentrl: Cli, trained_run: Path, longest: Trajectory
) -> None:
    name = longest.id.rpartition(".")[0]
    ended = agentrl("replay", str(trained_run), name, "--n", "3", "--temperature", "1.5", "--seed", "3")
    assert ended.code == 0, ended.err
    assert "stored" in ended.out
    assert "success after turn 0:" in ended.out
    assert "95 % interval" in ended.out
    assert "turn 1:" in ended.out
    assert "agentrl view" in ended.err


def test_the_history_is_shown_without_an_engine(agentrl: Cli, trained_run: Path, longest: Trajectory) -> None:
    ended = agentrl("replay", str(trained_run), longest.id, "--turn", "1", "--n", "0")
    assert ended.code == 0, ended.err
    assert f"1 of {len(longest.turns)} turns" in ended.out
    assert "[prompt]" in ended.out
    assert ended.out.count("[sampled · turn 1") == 1
    assert "[sampled · turn 2" not in ended.out


def test_wrong_names_and_turns_are_explained(
    agentrl: Cli, trained_run: Path, longest: Trajectory, tmp_path: Path
) -> None:
    ended = agentrl("replay", str(trained_run), "nosuch/0.0")
    assert ended.code == 2
    assert "no such episode" in ended.err
    ended = agentrl("replay", str(trained_run), longest.id, "--turn", "99")
    assert ended.code == 2
    assert "cannot be continued from turn 99" in ended.err
    ended = agentrl("replay", str(tmp_path), longest.id)
    assert ended.code == 2
    assert "is not a run" in ended.err
