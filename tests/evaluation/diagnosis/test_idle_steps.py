"""Runs whose rewards teach nothing: the warning, its cause and its frequency."""

import pytest

from agentrl.errors import Outcome, SourceLocation
from agentrl.evaluation.diagnosis.episodes import explain_equal_returns
from agentrl.evaluation.diagnosis.summary import EpisodeCounts, RunSummary
from agentrl.evaluation.diagnosis.watch import RunDiagnosis
from agentrl.trajectory import TokenSequence, Trajectory, Turn

IDLE = {"groups/trained": 4.0, "groups/zero_variance": 4.0, "train/advantage_abs_mean": 0.0}


def episode(success, outcome=Outcome.FINISHED, *, error=None, reward=0.0, invalid=0, answer=1):
    sequence = TokenSequence()
    sequence.extend_sampled([answer] * 4, logprobs=[-1.0] * 4, versions=[0] * 4)
    sequence.turns.extend(Turn(index=i, start=i, end=i + 1, valid=i >= invalid) for i in range(4))
    found = Trajectory(id="a", task_id="a", environment="e", seed=0, group_id="g", sequences=[sequence])
    found.success, found.outcome, found.error, found.reward = success, outcome, error, reward
    found.metrics["invalid_answers"] = invalid
    return found


def said(diagnosis, steps, episodes, metrics=IDLE):
    """The steps that warn that nothing is learned."""
    warnings = {step: diagnosis.add_step(step, metrics, episodes) for step in steps}
    return [step for step, texts in warnings.items() if any("nothing is being learned" in text for text in texts)]


def test_it_is_said_once_after_three_steps():
    diagnosis, failed = RunDiagnosis(RunSummary()), [episode(False)]
    assert said(diagnosis, range(1, 101), failed) == [3]
    assert said(diagnosis, [101], failed, {**IDLE, "groups/zero_variance": 0.0}) == []
    assert said(diagnosis, range(102, 104), failed) == []


def test_a_policy_that_has_learned_its_tasks_has_nothing_more_to_learn():
    learning = {"groups/trained": 4.0, "groups/zero_variance": 1.0, "train/advantage_abs_mean": 0.5, "episodes": 24.0}
    rising = [learning | {"success/mean": step / 10} for step in range(11)]
    for start, expected in ((rising, False), ([learning | {"success/mean": 0.98}] * 11, True)):
        diagnosis = RunDiagnosis(RunSummary())
        for step, line in enumerate(start, 1):
            diagnosis.add_step(step, line, [])
        found = said(diagnosis, range(12, 60), [episode(True, reward=1.0)] * 24, {**IDLE, **start[-1], **IDLE})
        assert bool(found) is expected
        assert bool(diagnosis.findings()) is expected


def test_groups_of_one_are_not_compared():
    lines = {"groups/trained": 16.0, "groups/zero_variance": 16.0, "train/advantage_abs_mean": 0.5}
    diagnosis = RunDiagnosis(RunSummary())
    for step in range(1, 9):
        diagnosis.add_step(step, lines, [episode(step % 2 == 0, reward=step / 8)] * 16)
    assert diagnosis.findings() == ()


@pytest.mark.parametrize(
    ("episodes", "words"),
    [
        ([episode(False), episode(False, Outcome.TRUNCATED_TURNS)], ["all 2 episodes", "failed", "1 truncated_turns"]),
        ([episode(True, reward=1.0)], ["succeeded", "too easy"]),
        (
            [episode(False, Outcome.POLICY_ERROR, error="10 unusable answers")],
            ["most often: 10 unusable", "100% of the"],
        ),
        ([episode(False, invalid=3)], ["75% of the answers could not be used", "agentrl sft"]),
        ([episode(None, reward=0.5)], ["returns of the newest step are 0.5", "easier tasks"]),
        ([episode(None, reward=0.0), episode(None, reward=0.25)], ["from 0 to 0.25", "equal within each group"]),
        ([episode(True, reward=0.5), episode(False, reward=0.5)], ["returns of the newest step are 0.5"]),
    ],
)
def test_the_cause_is_named(episodes, words):
    summary = EpisodeCounts()
    summary.add_step(episodes, 1)
    text = ": ".join(explain_equal_returns(summary))
    for word in words:
        assert word in text
    assert ("succeeded" in text) == ("succeeded" in words)


def test_a_cause_that_is_known_of_the_whole_run_takes_the_place_of_the_newest_step():
    rule = {"reward function exact": SourceLocation("my.py", 12)}
    diagnosis = RunDiagnosis(RunSummary(definitions=rule))
    episodes = [episode(False, reward=0.5, answer=answer) for answer in range(4)]
    texts = [diagnosis.add_step(step, IDLE, episodes) for step in (1, 2, 3)]
    assert texts[:2] == [[], []]
    (text,) = texts[2]
    assert text.startswith("nothing is being learned: in the last 3 steps all episodes of a task had the same return")
    assert "no episode was better than another. Reward function exact (my.py line 12) gave the same reward" in text
    assert "failed" not in text


def test_a_run_that_has_solved_its_tasks_is_not_faulty():
    solved, diagnosis = [episode(True, reward=1.0)], RunDiagnosis(RunSummary())
    learning = {**IDLE, "groups/zero_variance": 1.0, "train/advantage_abs_mean": 0.5}
    for step in range(1, 7):
        diagnosis.add_step(step, learning, [episode(step % 2 == 0, reward=float(step % 2))])
    assert said(diagnosis, range(7, 12), solved) == []
    assert diagnosis.findings() == ()
    assert said(diagnosis, range(12, 30), solved) != []
    assert "too easy" in diagnosis.findings()[0].text
