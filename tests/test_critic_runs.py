"""Whole runs of PPO with a critic, on groups of one."""

from pathlib import Path

import pytest
from support.runs import numbers

from agentrl.errors import UsageError
from agentrl.runs.rl import train
from agentrl.runs.start import resume_run

PPO = ("algorithm={advantage: gae, group_size: 1}", "trainer.tasks_per_step=6", "trainer.max_kl=1.0")


def weights(run):
    return (run.folder.checkpoints / "step-000004" / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.slow
def test_a_run_with_a_critic_goes_on_bit_for_bit(tiny_run, kind):
    settings = (*PPO, f"trainer.critic={{kind: {kind}, pretrain_steps: 1, learning_rate: 1e-2}}")
    whole = tiny_run(*settings, name="whole")
    train(whole)
    lines = numbers(whole.folder.path)
    assert [line["train/updates"] for line in lines] == [0, 2, 2, 2]
    assert all(line["critic/loss"] > 0 and line["groups/trained"] == 6 for line in lines)

    cut = tiny_run(*settings, "trainer.steps=2", name="cut")
    train(cut)
    train(resume_run(cut.folder.path, ["trainer.steps=4"]))
    assert numbers(cut.folder.path) == lines
    assert weights(cut) == weights(whole)


@pytest.mark.slow
def test_a_critic_starts_from_the_model_of_another_run(tiny_run):
    first = tiny_run("trainer.steps=1", name="first")
    train(first)
    critic = f"trainer.critic={{path: {first.folder.path}, learning_rate: 1e-2}}"
    run = tiny_run(*PPO, critic, "trainer.steps=1", name="second")
    assert Path(run.config.trainer.critic.path) == first.folder.checkpoints / "step-000001" / "model"
    train(run)
    assert numbers(run.folder.path)[0]["critic/loss"] > 0
    with pytest.raises(UsageError, match="nowhere"):
        tiny_run(*PPO, "trainer.critic.path=./nowhere", name="third")
