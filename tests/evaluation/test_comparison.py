"""Comparison of two sides over their common tasks, and the paired test."""

import math

import pytest

from agentrl.evaluation.comparison import TaskScore, Verdict, compare, paired_test, sign_test


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
    several = paired_test([(0.5, 0.75)] * 8)
    assert (several.name, several.p) == ("sign test", 2 / 2**8)
    assert several.low == several.high == 0.25


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
