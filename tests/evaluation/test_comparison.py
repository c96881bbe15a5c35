"""Paired comparison of two evaluations, with hand-computed numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import Outcome
from agentrl.evaluation.comparison import MOST_EXACT, compare, sign_flip_test
from agentrl.evaluation.panel import EvaluatedEpisode
from agentrl.trajectory import Trajectory


def episode(task, success, sample=0, *, outcome=Outcome.FINISHED, content=""):
    trajectory = Trajectory(id=task, task_id=task, environment="e", seed=0, group_id=task)
    trajectory.success, trajectory.outcome = success, outcome
    return EvaluatedEpisode(task_id=task, sample=sample, trajectory=trajectory, task=content)


def test_wins_losses_and_ties_on_common_tasks():
    first = [episode(task, task in "ab") for task in "abcde"]
    second = [episode(task, task in "acd") for task in "abcdx"]
    found = compare(first, second)
    assert (found.n_tasks, found.won, found.lost, found.tied) == (4, ("c", "d"), ("b",), 1)
    assert found.difference.mean == pytest.approx(0.25)
    assert found.p_value == 1.0  # 2 to 1
    assert "+25.0 %" in str(found)
    assert "2 won, 1 lost, 1 tied" in str(found)


def test_samples_of_a_task_are_averaged_and_failures_do_not_count():
    first = [episode("a", False, 0), episode("a", True, 1), episode("a", True, 2, outcome=Outcome.ENGINE_ERROR)]
    second = [episode("a", True, 0), episode("a", True, 1)]
    assert compare(first, second).difference.mean == pytest.approx(0.5)


def test_without_common_tasks_or_successes_there_is_nothing_to_compare():
    assert compare([episode("a", True)], [episode("b", True)]) is None
    assert compare([episode("a", None)], [episode("a", True)]) is None
    assert compare([episode("a", True, content="1")], [episode("a", True, content="2")]) is None


@pytest.mark.parametrize(
    ("differences", "expected"),
    [([], 1.0), ([0.0, 0.0], 1.0), ([1.0], 1.0), ([1.0] * 5, 2 / 32), ([1.0] * 9 + [-1.0], 22 / 1024)],
)
def test_the_exact_test(differences, expected):
    assert sign_flip_test(differences) == pytest.approx(expected)


def test_many_tasks_are_drawn_at_random():
    mixed = [1.0, -1.0] * MOST_EXACT
    assert sign_flip_test(mixed) > 0.5
    assert sign_flip_test([1.0] * 2 * MOST_EXACT) < 1e-3
    assert sign_flip_test(mixed) == sign_flip_test(mixed)


@given(st.lists(st.floats(-1, 1), max_size=12))
def test_the_order_of_the_policies_does_not_matter(differences):
    assert sign_flip_test(differences) == pytest.approx(sign_flip_test([-value for value in differences]))
