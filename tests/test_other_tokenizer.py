"""Whole runs with a teacher that has another tokenizer."""

import pytest

from agentrl.errors import ConfigError
from agentrl.observe.metrics import read_metrics
from agentrl.runs.rl import train
from agentrl.runs.start import resume_run

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
    train(run)
    for line in lines_of(run):
        assert line["train/kl_teacher"] > 0
        assert line["train/grad_norm"] > 0
        assert 0.3 < line["train/teacher_equal_tokens"] < 1
        assert line["train/teacher_unaligned_tokens"] < 0.3
    assert "the teacher has another tokenizer" in caplog.text
    assert "% of the policy's tokens are also tokens of the teacher" in caplog.text


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["synchronous", "asynchronous"])
def test_a_resumed_run_plays_episodes_again_whose_messages_are_gone(tiny_run, teacher, staleness):
    steps = "trainer.steps=2", f"rollout.max_staleness={staleness}"
    part = tiny_run(*DISTILL, teacher, *steps, "checkpoint.every=1", name="part")
    train(part)
    train(resume_run(part.folder.path, ["trainer.steps=4"]))
    assert [line["train/kl_teacher"] > 0 for line in lines_of(part)] == [True] * 4


@pytest.mark.parametrize(
    ("override", "what"),
    [
        (("algorithm.teacher.top_k=4", "algorithm.loss=distill_top_k"), r"algorithm\.teacher\.top_k"),
        (("trainer.episodes=runs/none",), r"trainer\.episodes"),
    ],
)
def test_what_needs_the_policys_ids_is_refused(tiny_run, teacher, override, what):
    run = tiny_run(*DISTILL, teacher, *override, name="student")
    with pytest.raises(ConfigError, match=rf"{what} needs a teacher with the policy's tokenizer: got \d+ ids"):
        train(run)
