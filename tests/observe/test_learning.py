"""Runs whose rewards teach nothing: the warning, its cause and its frequency."""

import pytest

from agentrl.errors import Outcome
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
    told = [step for step in range(1, 101) if watch.add_step(IDLE, failed)]
    assert told == [3, 9, 27, 81]
    assert watch.add_step({**IDLE, "groups/zero_variance": 0.0}, failed) is None
    assert [step for step in range(1, 9) if watch.add_step(IDLE, failed)] == [3]


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
    text = explain_cause(episodes)
    for word in words:
        assert word in text


def test_the_message_counts_the_steps_and_names_the_cause():
    watch, failed = LearningWatch(), [episode(False), episode(False)]
    assert [watch.add_step(IDLE, failed) for _ in range(2)] == [None, None]
    text = watch.add_step(IDLE, failed)
    assert text.startswith("nothing is being learned: in the last 3 steps")
    assert watch.cause in text
    assert "All 2 episodes of the newest step failed" in watch.cause


def test_a_cause_that_is_known_of_the_whole_run_takes_the_place_of_the_newest_step():
    watch, failed = LearningWatch(), [episode(False), episode(False)]
    for _ in range(2):
        watch.add_step(IDLE, failed)
    text = watch.add_step(IDLE, failed, cause="reward function exact (my.py line 12) gave the same reward, 0")
    assert watch.cause == "Reward function exact (my.py line 12) gave the same reward, 0"
    assert f"no episode was better than another. {watch.cause}. Look at the episodes" in text
    assert "failed" not in text


def test_episodes_that_all_succeeded_need_harder_tasks():
    assert "succeeded: the tasks are too easy" in explain_cause([episode(True, reward=1.0)] * 3)


def test_equal_rewards_of_solved_and_other_episodes_are_no_matter_of_difficulty():
    text = explain_cause([episode(True, reward=0.5), episode(False, reward=0.5)])
    assert "The returns of the newest step are 0.5" in text
    assert "succeeded" not in text


def test_rewards_that_differ_are_listed():
    text = explain_cause([episode(None, reward=0.0), episode(None, reward=0.25)])
    assert "The returns of the newest step are 0, 0.25" in text
