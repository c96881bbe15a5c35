"""Whole runs whose episodes branch, and runs with an algorithm for each environment."""

import asyncio

import pytest
from support.runs import Snapshots, numbers
from support.token_tables import check_token_tables

from agentrl.builders.branches import branch_rows
from agentrl.builders.checks import check_training
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.evaluation.replay import find_episode, make_replay_request, replay_episode
from agentrl.observe.metrics import read_metrics
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.runs.rl import train
from agentrl.runs.start import Run

BRANCHED = ("agent.branch={roots: 2, turns: [1, 2]}", "algorithm={advantage: tree, group_size: 6}")


def stored(folder):
    found = read_trajectories(RunDirectory(folder).trajectories, messages=True)
    return {one.trajectory.id: one.trajectory for one in found}


@pytest.mark.slow
def test_a_branched_run_trains_and_a_killed_one_ends_as_if_it_had_not_been(tiny_run, tmp_path):
    run = tiny_run(*BRANCHED, "observe.tokens=all")
    watcher = Snapshots(tmp_path / "cut", [20, 45])
    train(run, watcher=watcher)
    check_token_tables(run.folder.path)
    lines = numbers(run.folder.path)
    assert len(lines) == 4
    for line in read_metrics(run.folder.metrics_file):
        own = line["tokens/sampled"] * (1 - line["branch/shared_tokens"])
        assert line["time/tokens_per_s"] * line["time/step_s"] == pytest.approx(own), "repeated turns take no time"
    for line in lines:
        assert line["branch/share"] == pytest.approx(4 / 6)
        assert line["branch/turn"] == 1.5
        assert line["episodes"] == 12
        assert 0.3 < line["branch/shared_tokens"] < 0.5
    episodes = stored(run.folder.path)
    assert watcher.sampled == sum(one.sampled_tokens - one.repeated_tokens for one in episodes.values())
    branches = [one for one in episodes.values() if one.branches_from is not None]
    assert len(branches) == 4 * 2 * 4
    for one in branches:
        parent = episodes[one.branches_from.parent]
        own, first = one.sequences[0], parent.sequences[0]
        end = first.turns[one.branches_from.turn - 1].end
        assert own.ids_list()[:end] == first.ids_list()[:end]
        assert own.versions[:end].tolist() == first.versions[:end].tolist()
        assert one.answers[: one.branches_from.turn] == parent.answers[: one.branches_from.turn]
        assert one.group_id == parent.group_id
        rewards = [turn.reward for turn in one.turns[: one.branches_from.turn]]
        assert rewards == [turn.reward for turn in parent.turns[: one.branches_from.turn]]
    cut = sorted((tmp_path / "cut").iterdir())
    assert len(cut) == 2
    for folder in cut:
        train(Run(RunDirectory(folder), run.config))
        assert numbers(folder) == lines
        assert {t.id: t.reward for t in stored(folder).values()} == {t.id: t.reward for t in episodes.values()}


@pytest.mark.slow
def test_an_asynchronous_branched_run_keeps_groups_and_staleness(tiny_run):
    run = tiny_run(*BRANCHED, "rollout.max_staleness=1")
    train(run)
    lines = numbers(run.folder.path)
    assert [line["episodes"] for line in lines] == [12] * 4
    assert max(line["staleness/max"] for line in lines) <= 1


@pytest.mark.slow
def test_prefixes_that_are_computed_once_give_the_same_run(tiny_run):
    plain, shared = tiny_run(*BRANCHED), tiny_run(*BRANCHED, "trainer.share_prefixes=true", name="shared")
    for run in (plain, shared):
        train(run)
    first, second = (numbers(run.folder.path)[0] for run in (plain, shared))
    assert second["train/tokens_saved"] > 0.3
    assert second["train/loss"] == pytest.approx(first["train/loss"], abs=1e-5)
    assert second["train/grad_norm"] == pytest.approx(first["train/grad_norm"], rel=1e-3)


GUESS = "environment=guess_number"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([GUESS, "algorithm.advantage=tree"], "compares episodes that branch, but agent.branch is not set"),
        ([GUESS, "agent.branch={turns: [1]}"], "as if they were independent"),
        ([GUESS, *BRANCHED, "algorithm.group_size=2"], "no episode of a group can branch"),
        ([GUESS, *BRANCHED, "agent.loop=external", "agent.options={command: 'true'}"], "agent loop external cannot"),
        ([GUESS, *BRANCHED, "agent.roles={helper: {as_tool: {description: helps}}}"], "episodes of one agent"),
        (
            [GUESS, *BRANCHED, "trainer.moe={router_replay: true}"],
            "trainer.moe.router_replay does not work with agent.branch",
        ),
        ([GUESS, "agent.branch={turns: [1], every: 2}"], "set one of agent.branch.turns"),
        ([GUESS, "agent.branch={roots: 3}"], "has no turns"),
        ([GUESS, "agent.branch={turns: [3, 1]}"], "expected increasing numbers"),
    ],
)
def test_what_cannot_branch_is_refused_before_the_run(words, message):
    with pytest.raises(ConfigError, match=message):
        check_training(load_config(None, words))


def test_a_dry_run_shows_the_branches():
    config = load_config(None, [GUESS, *BRANCHED])
    check_training(config)
    assert branch_rows(config) == [("branches per group", "4 from 2 roots", "after turns 1, 2 (agent.branch)")]
    assert branch_rows(load_config(None, [GUESS])) == []


TWO = (
    "environments={vowels: {name: 'letters:Letters', isolation: inline, weight: 2, algorithm: {advantage: rloo}}, "
    "digits: {name: 'letters:Digits', isolation: inline, algorithm: {loss: gspo}}}"
)


@pytest.mark.slow
def test_two_ranks_train_two_algorithms_as_one_does(tiny_run):
    words = (TWO, "trainer.tasks_per_step=3", "trainer.steps=1", "trainer.mini_batches=1", "observe.tokens=all")
    runs = [tiny_run(*words, f"trainer.processes={ranks}", name=f"ranks-{ranks}") for ranks in (1, 2)]
    for run in runs:
        train(run)
        check_token_tables(run.folder.path)
    one, two = (numbers(run.folder.path)[0] for run in runs)
    for name in ("train/loss", "train/grad_norm", "env/vowels/train/loss", "env/digits/train/loss"):
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_a_run_with_two_algorithms_reports_each_and_resumes(tiny_run, tmp_path):
    run = tiny_run(TWO, "trainer.tasks_per_step=3", "algorithm.dynamic_sampling=true")
    train(run, watcher=Snapshots(tmp_path / "cut", [30]))
    lines = numbers(run.folder.path)
    for line in lines:
        assert line["train/updates"] == 2
        for label in ("vowels", "digits"):
            assert (f"env/{label}/train/loss" in line) == (line.get(f"env/{label}/groups", 0) > 0)
    assert any(line.get("env/vowels/train/loss") and line.get("env/digits/train/loss") for line in lines)
    digits = next(one for one in stored(run.folder.path).values() if one.environment == "letters:Digits")
    horizon = ["curriculum.horizon={turns: [2, 3], at_steps: [0, 1]}"]
    request = make_replay_request(run.folder, digits, turn=1, samples=2, overrides=horizon)
    assert request.config.sole_environment.name == "letters:Digits"
    said = []
    found = asyncio.run(replay_episode(request, say=said.append))
    assert "curriculum.horizon limited the turns" in said[0]
    assert [one.branches_from.turn for one in found.valid_continuations] == [1, 1]
    assert find_episode(run.folder, digits.id.rpartition(".")[0]).id == digits.id
    (folder,) = (tmp_path / "cut").iterdir()
    train(Run(RunDirectory(folder), run.config))
    assert numbers(folder) == lines
