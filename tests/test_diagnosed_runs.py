"""Whole runs with faulty rewards: warnings during the run, and problems at its end."""

import inspect
import json
import sys

import pytest

from agentrl.cli.reports import write_run_report
from agentrl.evaluation.diagnosis.watch import read_findings
from agentrl.observe.progress import RunWatcher
from agentrl.observe.run_folder import RunDirectory
from agentrl.runs.rl import train


class Listener(RunWatcher):
    def __init__(self):
        self.said = []

    def on_message(self, text):
        self.said.append(text)


def line_of(name, words):
    """Number of the line of a function that holds some words."""
    lines, first = inspect.getsourcelines(getattr(sys.modules["letters"], name))
    return next(first + number for number, line in enumerate(lines) if words in line)


@pytest.fixture
def ended(tiny_run):
    """Train with a reward function; gives the result and what was said."""

    def run(function, *words):
        listener = Listener()
        settings = (
            f'agent.reward=["letters:{function}"]',
            "trainer.steps=3",
            "trainer.tasks_per_step=4",
            "algorithm.group_size=4",
            *words,
        )
        return train(tiny_run(*settings), watcher=listener), listener.said

    return run


@pytest.mark.slow
def test_a_reward_that_raises_for_half_of_the_answers_is_said_at_once_and_at_the_end(ended):
    result, said = ended("raising")
    problem = result.problems[0]
    assert problem.kind == "reward_error"
    assert problem.line == line_of("raising", "raise ValueError")
    assert problem.file.endswith("letters.py")
    assert 0.2 < problem.count / problem.of < 0.8
    assert f"failed in {problem.count} of {problem.of} attempts: ValueError: an odd answer" in problem.text
    assert any(text.startswith("step 1: reward function letters:raising failed in") for text in said)
    assert f"problem 1: {problem.text}" in said


@pytest.mark.slow
def test_a_reward_of_the_wrong_sign_is_named(ended):
    result, said = ended("against_success")
    problem = result.problems[0]
    assert problem.kind == "reward_against_success"
    assert problem.line == line_of("against_success", "def ")
    assert any("solved episodes get lower rewards than others" in text for text in said if text.startswith("step "))


def test_a_constant_reward_is_not_reported_as_failure_of_all_episodes(ended):
    result, said = ended("constant")
    problem = result.problems[0]
    assert (problem.kind, problem.count, problem.of) == ("constant_reward", 48, 48)
    assert problem.line == line_of("constant", "def ")
    (idle,) = [text for text in said if "nothing is being learned" in text]
    assert "Reward function letters:constant" in idle
    assert "the same reward, 0.75, to all 48 episodes" in idle
    assert "failed" not in idle


@pytest.mark.slow
def test_problems_are_in_the_folder_and_in_the_report(ended):
    result, _ = ended("constant")
    (first, *_) = json.loads((result.folder / "diagnosis.json").read_text())["problems"]
    assert (first["kind"], first["line"]) == ("constant_reward", line_of("constant", "def "))
    report = write_run_report(result.folder)
    assert f"1. {result.problems[0].text}" in report.markdown.read_text()
    assert "<h2>Problems</h2>" in report.html.read_text()


def test_a_damaged_diagnosis_is_as_none(tmp_path):
    folder = RunDirectory(tmp_path)
    assert read_findings(folder) == ()
    for text in ("", "[]", '{"problems": [{"kinds": 1}]}', '{"problems": 3}'):
        folder.diagnosis_file.write_text(text)
        assert read_findings(folder) == ()


def test_a_learning_rate_far_from_usual_is_said_at_the_start_only(tiny_run):
    run = tiny_run("trainer.learning_rate=1.0", "trainer.steps=1")
    listener = Listener()
    train(run, watcher=listener)
    (said,) = [text for text in listener.said if "times the usual rate" in text]
    assert "trainer.learning_rate 1 is" in said
    assert "no warm-up" in said
