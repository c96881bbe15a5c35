"""Curves with intervals over episodes, evaluations and seeds."""

import pytest

from agentrl.evaluation.curves import NamedRuns, curve, draw_curves
from agentrl.evaluation.result import wilson_interval

LINES = [
    {"step": 1, "episodes": 100, "success/mean": 0.2, "reward/mean": 0.5, "reward/std": 1.0, "train/entropy": 2.0},
    {"step": 2, "episodes": 100, "success/mean": 0.4, "reward/mean": 0.7, "reward/std": 0.5, "train/entropy": None},
    {
        "step": 3,
        "success/mean": 0.6,
        "eval/success": 0.5,
        "eval/success_low": 0.4,
        "eval/success_high": 0.6,
        "eval/at_step": 2.0,
    },
]


def test_the_interval_of_a_step_is_that_of_its_episodes():
    run = NamedRuns(name="a", metrics=[LINES])
    success = curve(run, "success/mean")
    expected = wilson_interval(20, 100)
    assert (success[0].low, success[0].high) == (expected.low, expected.high)
    assert (success[2].low, success[2].high) == (0.6, 0.6), "the number of episodes is unknown"
    reward = curve(run, "reward/mean")
    assert reward[0].high - reward[0].value == pytest.approx(0.196)
    assert [point.step for point in curve(run, "train/entropy")] == [1]


def test_an_evaluation_belongs_to_the_step_that_it_measured():
    (point,) = curve(NamedRuns(name="a", metrics=[LINES]), "eval/success")
    assert (point.step, point.low, point.high) == (2, 0.4, 0.6)


def test_the_interval_of_several_seeds_is_that_of_their_mean():
    seeds = [[{"step": step, "success/mean": value} for step in (1, 2)] for value in (0.4, 0.5, 0.6)]
    (first, _) = curve(NamedRuns(name="a", metrics=[*seeds]), "success/mean")
    assert first.value == pytest.approx(0.5)
    assert first.high - first.value == pytest.approx(4.30 * 0.1 / 3**0.5)
    longer = [*seeds, [{"step": 1, "success/mean": 0.5}]]
    assert len(curve(NamedRuns(name="a", metrics=longer), "success/mean")) == 1, "steps that all runs have"


def test_a_picture_has_a_panel_for_each_metric(tmp_path):
    file = tmp_path / "curves.png"
    assert not draw_curves([], file)
    assert not draw_curves([NamedRuns(name="a", metrics=[[{"step": 1}]])], file)
    assert draw_curves([NamedRuns(name="a", metrics=[LINES]), NamedRuns(name="b", metrics=[LINES, LINES])], file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_an_interval_of_success_over_seeds_stays_between_0_and_1():
    runs = NamedRuns(name="a", metrics=[[{"step": 1, "success/mean": share}] for share in (0.6, 1.0)])
    (point,) = curve(runs, "success/mean")
    assert (point.low, point.value, point.high) == (0.0, 0.8, 1.0)
