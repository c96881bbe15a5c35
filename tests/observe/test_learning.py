"""A run whose rewards teach nothing says so, with the cause, and not too often."""

import pytest

from agentrl.errors import Outcome, Place
from agentrl.observe.learning import LearningWatch, explain_cause, learns_nothing, share_that_differs
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
    text = explain_cause(episodes, {})
    for word in words:
        assert word in text


def test_the_message_counts_the_steps_and_names_the_cause():
    watch, failed = LearningWatch(), [episode(False), episode(False)]
    assert [watch.look(IDLE, failed) for _ in range(2)] == [None, None]
    text = watch.look(IDLE, failed)
    assert text.startswith("nothing is being learned: in the last 3 steps")
    assert watch.cause in text
    assert "All 2 episodes of the newest step failed" in watch.cause


@pytest.mark.parametrize(
    ("reward", "successes", "words"),
    [
        (1.0, [False, False, False], ["gave the same reward, 1, to all 3 episodes", "the function receives"]),
        (0.0, [False, False, False], ["gave the same reward, 0, to all 3 episodes", "If they all deserve it"]),
        (0.5, [True, False, None], ["gave the same reward, 0.5, to all 3 episodes"]),
    ],
)
def test_a_constant_reward_function_is_named_with_its_line(reward, successes, words):
    places = {"reward function exact": Place("/home/me/rewards.py", 12)}
    text = explain_cause([episode(success, reward=reward) for success in successes], places)
    assert text.startswith("reward function exact (/home/me/rewards.py line 12) gave the same reward")
    assert "failed" not in text
    for word in words:
        assert word in text


def test_a_reward_function_whose_tasks_are_all_solved_is_not_blamed():
    text = explain_cause([episode(True, reward=1.0)] * 3, {"reward function exact": Place("/home/me/rewards.py", 12)})
    assert "succeeded: the tasks are too easy" in text


def test_reward_functions_that_differ_between_tasks_are_not_called_constant():
    places = {"reward function exact": Place("/home/me/rewards.py", 12)}
    text = explain_cause([episode(False, reward=0.0), episode(False, reward=0.25)], places)
    assert "gave the same" not in text


def test_an_environment_that_pays_all_alike_though_some_succeed_is_named():
    text = explain_cause([episode(True, reward=0.3), episode(False, reward=0.3), episode(True, reward=0.3)], {})
    assert "The environment gave the same reward, 0.3, to all 3 episodes" in text
    assert "although 2 of them succeeded" in text
