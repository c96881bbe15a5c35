"""Whole runs with a teacher that has another tokenizer."""

import logging

import pytest

from agentrl.observe.metrics import read_metrics
from agentrl.runs.rl import train

DISTILL = ("algorithm={advantage: reinforce, loss: distill, group_size: 3}", "trainer.mini_batches=1")


def lines_of(run):
    return read_metrics(run.folder.metrics_file)


@pytest.fixture
def teacher(tiny_run):
    """A model whose tokenizer has other merges."""
    other = tiny_run(
        "trainer={steps: 1, learning_rate: 0.0}", "model.scratch.vocab_size=280", "run.seed=4", name="other"
    )
    train(other)
    return f"algorithm.teacher.path={other.folder.path}"


def test_a_policy_is_taught_in_other_tokens(tiny_run, teacher, caplog):
    run = tiny_run(*DISTILL, teacher, "trainer.steps=2", name="student")
    with caplog.at_level(logging.INFO):
        train(run)
    for line in lines_of(run):
        assert line["train/kl_teacher"] > 0
        assert line["train/grad_norm"] > 0
        assert 0.5 < line["train/teacher_equal_tokens"] < 1
        assert line["train/teacher_unaligned_tokens"] < 0.5
    print(lines_of(run)[0])
    print(caplog.text[-600:])
