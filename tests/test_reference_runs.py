"""A whole run with an implicit process reward model and a reference that is refreshed."""

from support.runs import numbers

from agentrl.runs.rl import train
from agentrl.runs.start import resume_run

SETTINGS = (
    "algorithm={advantage: prime, group_size: 3, kl_coef: 0.1, reference: {refresh_every: 2}}",
    "trainer.process_reward={learning_rate: 1e-2, beta: 0.2}",
)


def test_a_run_with_further_models_goes_on_bit_for_bit(tiny_run):
    whole = tiny_run(*SETTINGS, name="whole")
    train(whole)
    lines = numbers(whole.folder.path)
    assert [line["train/reference_round"] for line in lines] == [1, 1, 2, 2]
    assert all(line["process_reward/loss"] > 0 and line["process_reward/grad_norm"] > 0 for line in lines)
    assert lines[1]["train/kl_reference"] != lines[2]["train/kl_reference"]

    cut = tiny_run(*SETTINGS, "trainer.steps=3", name="cut")
    train(cut)
    train(resume_run(cut.folder.path, ["trainer.steps=4"]))
    assert numbers(cut.folder.path) == lines
