"""Simulating other stalenesses with the durations of a run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.observe.run_folder import RunDirectory
from agentrl.runs import simulate
from agentrl.runs.simulate import read_measured_run

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def few_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "EPISODES", 100)


@pytest.mark.slow
def test_a_plan_of_other_stalenesses(agentrl: Cli, trained_run: Path) -> None:
    ended = agentrl("plan", "--simulate", str(trained_run), "--json")
    assert ended.code == 0, ended.err
    rows = json.loads(ended.out)
    assert [(row["max_staleness"], row["batch_order"]) for row in rows][:3] == [(0, ""), (1, "windowed"), (1, "greedy")]
    assert rows[-1]["max_staleness"] == 8
    assert all(row["steps_per_hour"] > 0 for row in rows)
    assert all(0 <= row["engine_idle"] <= 1 and 0 <= row["trainer_idle"] <= 1 for row in rows)
    assert all(row["dropped"] == row["bias_turns"] == 0 for row in rows if row["batch_order"] != "greedy")
    table = agentrl("plan", "--simulate", str(trained_run))
    assert "windowed" in table.out
    headings = itertools.takewhile(lambda line: not line.split()[0].isdigit(), table.out.splitlines())
    words = {word for line in headings for word in line.split()}
    assert {"staleness", "requests", "trainer", "dropped", "groups", "seconds"} <= words, "no heading is cut"
    assert "steps per hour with rollout.max_staleness 0; the simulation assumes" in " ".join(table.err.split())


def test_the_simulation_repeats_what_was_measured(trained_run: Path) -> None:
    measured = read_measured_run(RunDirectory(trained_run))
    found = measured.simulate(0, "windowed")
    assert len(measured.groups) == 4
    assert {len(group) for group in measured.groups} == {2}
    episodes = [sum(e.engine_s) + sum(e.outside_s) for group in measured.groups for e in group]
    steps = measured.train_s + measured.sync_s
    assert steps + min(episodes) <= found.seconds / found.steps <= steps + max(episodes)


def test_only_runs_can_be_simulated(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    other = agentrl("plan", "--simulate", str(trained_run), "trainer.steps=3")
    assert (other.code, "--simulate takes its settings from the run" in other.err) == (2, True)
    empty = workplace / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text((trained_run / "config.yaml").read_text())
    ended = agentrl("plan", "--simulate", str(empty))
    assert ended.code == 2
    assert "got 0 training steps and 0 groups with finished episodes" in " ".join(ended.err.split())
