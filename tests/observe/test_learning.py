"""A run whose rewards teach nothing says so, with the cause, and not too often."""

import pytest

from agentrl.errors import Outcome
from agentrl.observe.learning import LearningWatch, explanation, learns_nothing, share_that_differs
from agentrl.trajectory import TokenSequence, Trajectory, Turn

IDLE = {"groups/trained": 4.0, "groups/zero_variance": 4.0, "train/advantage_abs_mean": 0.0}


def episode(success, outcome=Outcome.FINISHED, *, error=None, reward=0.0, invalid=0):
    turns = [Turn(index=i, start=0, end=1) for i in range(4)]
    found = Trajectory(id="a", task_id="a", environment="e", seed=0, group_id="g", sequences=[TokenSequence()])
    found.sequences[0].turns.extend(turns)
    found.success, found.outcome, found.error, found.reward = success, outcome, error, reward
    found.metrics["invalid_answers"] = invalid
    return found


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (IDLE, True),
        ({**IDLE, "groups/zero_variance": 3.0}, False),
        ({**IDLE, "train/advantage_abs_mean": 0.4}, False),  # gigpo, or single episodes that differ
        ({**IDLE, "train/advantage_abs_mean": 0.4, "critic/loss": 1.0, "reward/min": 0.0, "reward/max": 0.0}, True),
        ({**IDLE, "train/advantage_abs_mean": 0.4, "critic/loss": 1.0, "reward/min": 0.0, "reward/max": 1.0}, False),
        ({"sft/loss": 1.0}, False),
    ],
)
def test_a_step_learns_nothing_where_no_episode_is_better_than_another(metrics, expected):
    assert learns_nothing(metrics) is expected


def test_the_share_of_groups_that_differ():
    assert share_that_differs({"groups/trained": 4.0, "groups/zero_variance": 1.0}) == 0.75
    assert share_that_differs({}) is None


def test_it_is_said_after_three_steps_and_then_seldom():
    watch, failed = LearningWatch(), [episode(False)]
    told = [step for step in range(1, 101) if watch.look(IDLE, failed)]
    assert told == [3, 9, 27, 81]
    assert watch.look({**IDLE, "groups/zero_variance": 0.0}, failed) is None
    assert [step for step in range(1, 9) if watch.look(IDLE, failed)] == [3]


@pytest.mark.parametrize(
    ("episodes", "words"),
    [
        ([episode(False), episode(False, Outcome.TRUNCATED_TURNS)], ["All 2 episodes", "failed", "1 truncated_turns"]),
        ([episode(True, reward=1.0)], ["succeeded", "too easy"]),
        (
            [episode(False, Outcome.POLICY_ERROR, error="10 unusable answers")],
            ["most often: 10 unusable", "100% of the"],
        ),
        ([episode(False, invalid=3)], ["75% of the answers could not be used", "agentrl sft"]),
        ([episode(None, reward=0.5)], ["returns of the newest step are 0.5", "easier tasks"]),
    ],
)
def test_the_cause_is_named(episodes, words):
    text = explanation(3, episodes)
    assert text.startswith("nothing is being learned: in the last 3 steps")
    for word in words:
        assert word in text
