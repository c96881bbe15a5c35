"""Runs whose settings change by step: values in force are metrics, reach what plays and trains, and resume exactly."""

import itertools

import pytest
from support.fixtures import tiny_runs
from support.runs import Snapshots, numbers

from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.runs.rl import train
from agentrl.runs.start import Run

SCHEDULES = (
    "schedules={sampling.temperature: {0: 1.0, 3: 1.4}, trainer.learning_rate: {points: {0: 1e-3, 4: 1e-4}, "
    "shape: cosine}, algorithm.entropy_coef: {target: 0.2, step: 1e-4, min: 0, max: 0.005}, "
    "algorithm.kl_coef: {target: 1e-4, horizon: 60}, 2: {agent.max_answer_tokens: 3}}"
)
SETTINGS = ("trainer.steps=5", "algorithm.kl_coef=0.01", "checkpoint.every=1", "checkpoint.keep=9", SCHEDULES)
MOMENTS = (7, 22, 41)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    with tiny_runs(tmp_path_factory.mktemp("expected")) as start:
        run = start(*SETTINGS)
        train(run, watcher=Snapshots(run.folder.path.with_name("cut"), MOMENTS))
    return run


@pytest.mark.slow
def test_the_values_in_force_are_metrics(expected):
    lines = numbers(expected.folder.path)
    assert [line["settings/sampling.temperature"] for line in lines] == [1.0, 1.0, 1.0, 1.4, 1.4]
    assert [line["settings/agent.max_answer_tokens"] for line in lines][1:] == [
        lines[1]["settings/agent.max_answer_tokens"],
        3,
        3,
        3,
    ]
    rates = [line["settings/trainer.learning_rate"] for line in lines]
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[2], rates[4]) == (1e-3, pytest.approx(5.5e-4), 1e-4)
    assert [line["train/learning_rate"] for line in lines] == rates


def test_targets_adapt_by_their_rules(expected):
    lines = numbers(expected.folder.path)
    assert lines[0]["settings/algorithm.entropy_coef"] == 0
    for before, after in itertools.pairwise(lines):
        change = 1e-4 if before["train/entropy"] < 0.2 else -1e-4
        entropy = min(max(before["settings/algorithm.entropy_coef"] + change, 0), 0.005)
        assert after["settings/algorithm.entropy_coef"] == pytest.approx(entropy, abs=1e-12)
        error = min(max(before["train/kl_reference"] / 1e-4 - 1, -0.2), 0.2)
        kl = before["settings/algorithm.kl_coef"] * (1 + error * before["trajectories/trained"] / 60)
        assert after["settings/algorithm.kl_coef"] == pytest.approx(kl)


def test_a_budget_of_a_stage_limits_the_episodes_of_its_steps(expected):
    longest = {}
    for stored in read_trajectories(RunDirectory(expected.folder.path).trajectories):
        step = int(stored.trajectory.sequences[0].versions.max())
        own = max(turn.end - turn.start for turn in stored.trajectory.turns)
        longest[step] = max(longest.get(step, 0), own)
    assert max(longest[step] for step in (2, 3, 4)) <= 3 < max(longest[step] for step in (0, 1))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_with_schedules_resumes_bit_for_bit(tiny_run, expected, moment):
    folder = expected.folder.path.with_name("cut") / str(moment)
    assert train(Run(RunDirectory(folder), expected.config)).step == 5
    assert numbers(folder) == numbers(expected.folder.path)
    weights = [path / "checkpoints/step-000005/model/model.safetensors" for path in (folder, expected.folder.path)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def tasks_by_version(folder):
    found = {}
    for stored in read_trajectories(RunDirectory(folder).trajectories):
        found.setdefault(int(stored.trajectory.sequences[0].versions.max()), set()).add(stored.trajectory.task_id)
    return found


@pytest.mark.slow
def test_a_stage_with_its_own_tasks_plays_them_and_resumes(tmp_path):
    file = tmp_path / "later.jsonl"
    file.write_text("".join(f'{{"id": "later-{number}", "seed": {number}}}\n' for number in range(4)))
    stage = f"schedules={{2: {{environment.tasks: '{file}', agent.max_turns: 2}}}}"
    settings = ("trainer.steps=4", "checkpoint.every=1", "checkpoint.keep=9", stage)
    with tiny_runs(tmp_path) as start:
        run = start(*settings)
        train(run, watcher=Snapshots(tmp_path / "cut", (30,)))
        played = tasks_by_version(run.folder.path)
        assert all(task.startswith("train-") for version in (0, 1) for task in played[version])
        assert all(task.startswith("later-") for version in (2, 3) for task in played[version])
        assert [line["settings/environment"] for line in numbers(run.folder.path)] == [0, 0, 1, 1]
        cut = tmp_path / "cut" / "30"
        train(Run(RunDirectory(cut), run.config))
        assert numbers(cut) == numbers(run.folder.path)


@pytest.mark.slow
def test_an_asynchronous_run_changes_its_environment_and_budgets(tmp_path):
    stage = "schedules={2: {environment.split: valid, agent.max_turns: 2}}"
    with tiny_runs(tmp_path) as start:
        run = start("trainer.steps=6", "rollout.max_staleness=2", stage)
        train(run)
        stored = [entry.trajectory for entry in read_trajectories(RunDirectory(run.folder.path).trajectories)]
    early = [trajectory for trajectory in stored if trajectory.task_id.startswith("train-")]
    late = [trajectory for trajectory in stored if trajectory.task_id.startswith("valid-")]
    assert early
    assert late
    assert len(early) + len(late) == len(stored)


@pytest.mark.slow
def test_groups_outside_a_band_of_accuracy_are_replaced(tiny_run):
    run = tiny_run("trainer.steps=3", "algorithm.selection={min_accuracy: 0.01, max_accuracy: 0.9, top_p: 0.9}")
    result = train(run)
    trained = [s.trajectory for s in read_trajectories(RunDirectory(run.folder.path).trajectories)]
    assert result.step == 3
    assert trained
    assert all("groups/trained" in line for line in numbers(run.folder.path))
