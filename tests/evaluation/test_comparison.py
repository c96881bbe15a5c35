"""Comparison of two sides over their common tasks, and the paired test."""

import math

import pytest

from agentrl.errors import Outcome
from agentrl.evaluation.comparison import (
    MAX_BOOTSTRAPPED,
    TaskScore,
    Verdict,
    compare,
    evaluation_scores,
    paired_test,
    sign_test,
)
from agentrl.evaluation.panel import EvaluatedEpisode
from agentrl.trajectory import Trajectory


@pytest.mark.parametrize(("won", "lost"), [(0, 0), (1, 0), (5, 0), (6, 1), (12, 4), (40, 60), (3, 3), (1000, 1100)])
def test_the_sign_test_is_the_exact_binomial_one(won: int, lost: int) -> None:
    n, fewer = won + lost, min(won, lost)
    exact = min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n)
    assert sign_test(won, lost) == pytest.approx(exact, rel=1e-9)
    assert sign_test(lost, won) == sign_test(won, lost)


def test_one_episode_of_each_task_is_compared_by_mcnemars_test() -> None:
    test = paired_test([(0.0, 1.0)] * 8 + [(1.0, 0.0)] * 2 + [(1.0, 1.0)] * 10)
    assert test.name == "exact McNemar"
    assert test.p == pytest.approx(0.109375)
    assert test.difference == pytest.approx(0.3)
    assert test.low < 0.3 < test.high
    several = paired_test([(0.5, 0.75)] * 7 + [(0.5, 1.0)])
    assert (several.name, several.p) == ("sign test", 2 / 2**8)
    assert 0.25 <= several.low < several.difference < several.high


def test_many_tasks_get_a_normal_interval_close_to_the_bootstrap() -> None:
    pairs = [(0.0, 1.0)] * 300 + [(1.0, 0.0)] * 100 + [(1.0, 1.0)] * 1600
    few, many = paired_test(pairs), paired_test(pairs * 2)
    assert many.difference == few.difference
    assert many.low == pytest.approx(few.difference - (few.high - few.low) / 2 / math.sqrt(2), abs=0.003)


def score(success: float | None, reward: float | None = None, episodes: int = 1) -> TaskScore:
    return TaskScore(episodes=episodes, success=success, reward=reward)


def test_tasks_are_won_by_success_or_else_by_reward() -> None:
    first = {"x": score(0.0, 5.0), "y": score(1.0), "z": score(None, 1.0), "only": score(1.0)}
    second = {"x": score(1.0, 2.0), "y": score(0.5, episodes=2), "z": score(None, 1.0)}
    found = compare(first, second)
    assert {key: task.verdict for key, task in found.tasks.items()} == {
        "x": Verdict.WON,
        "y": Verdict.LOST,
        "z": Verdict.SAME,
    }
    assert (found.only_first, found.only_second) == (1, 0)
    assert found.test is not None
    assert found.test.measure == "success"
    by_reward = compare({"z": score(None, 1.0)}, {"z": score(None, 2.0)})
    assert by_reward.test is not None
    assert (by_reward.test.measure, by_reward.test.difference) == ("reward", 1.0)
    assert compare({}, second).test is None
    with pytest.raises(ValueError, match="nothing to test"):
        paired_test([])


def episode(task, success, sample=0, *, outcome=Outcome.FINISHED, content=""):
    trajectory = Trajectory(id=task, task_id=task, environment="e", seed=0, group_id=task)
    trajectory.success, trajectory.outcome = success, outcome
    return EvaluatedEpisode(task_id=task, sample=sample, trajectory=trajectory, task=content)


def compare_evaluations(first, second):
    return compare(evaluation_scores(first), evaluation_scores(second))


def test_evaluations_are_compared_on_their_common_tasks():
    first = [episode(task, task in "ab") for task in "abcde"]
    second = [episode(task, task in "acd") for task in "abcdx"]
    found = compare_evaluations(first, second)
    assert [found.count(verdict) for verdict in (Verdict.WON, Verdict.LOST, Verdict.SAME)] == [2, 1, 1]
    assert (found.only_first, found.only_second) == (1, 1)
    assert found.test.difference == pytest.approx(0.25)
    assert found.test.p == 1.0  # 2 to 1
    assert str(found.test).startswith("+25.0 % (")


def test_samples_of_a_task_are_averaged_and_failures_do_not_count():
    first = [episode("a", False, 0), episode("a", True, 1), episode("a", True, 2, outcome=Outcome.ENGINE_ERROR)]
    second = [episode("a", True, 0), episode("a", True, 1)]
    assert compare_evaluations(first, second).test.difference == pytest.approx(0.5)


@pytest.mark.parametrize("count", [2, MAX_BOOTSTRAPPED + 1])
def test_the_interval_of_equal_differences_is_unknown(count):
    assert str(paired_test([(0.0, 0.5)] * count, "reward")) == "+0.500 on each task"
    assert str(paired_test([(1.0, 1.0)] * count)) == "+0.0 % on each task"


def test_episodes_without_success_have_failed_if_others_report_it():
    """Many environments report it only at their own end, so not in episodes that a limit ends."""
    first = [episode("a", True), episode("b", None), episode("c", None)]
    second = [episode("a", True), episode("b", True), episode("c", None)]
    found = compare_evaluations(first, second)
    assert found.test.difference == pytest.approx(1 / 3)
    assert (found.count(Verdict.WON), found.tasks["b", ""].first.success) == (1, 0.0)
    assert compare_evaluations([episode("a", None)], [episode("a", None)]).test is None


def test_tasks_of_one_id_with_different_content_are_different_tasks():
    assert compare_evaluations([episode("a", True)], [episode("b", True)]).test is None
    assert compare_evaluations([episode("a", None)], [episode("a", True)]).test is None
    assert compare_evaluations([episode("a", True, content="1")], [episode("a", True, content="2")]).test is None
