"""Whole runs of several agents, each with an adapter of its own."""

import json

import torch
from safetensors.torch import load_file

from agentrl.builders.run import resume_run
from agentrl.models.lora import ADAPTER_WEIGHTS, adapter_folder
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.metrics import read_metrics
from agentrl.runs.rl import train

LOOP = ("agent={loop: 'two_agents:Telling', options: {}}", "agent.max_answer_tokens=6", "agent.max_tokens=256")
ADAPTERS = (
    *LOOP,
    "model.lora={rank: 4}",
    "agent.roles={teller: {adapter: teller}, writer: {adapter: writer}}",
    "adapters={teller: {learning_rate: 0.05, algorithm: {advantage: rloo}}, writer: {}}",
)


def numbers(run):
    lines = read_metrics(run.folder.metrics_file)
    return [
        {k: v for k, v in line.items() if "time/" not in k and not k.endswith(("seconds", "_per_s"))} for line in lines
    ]


def adapters(run, step=None):
    """The tensors of each adapter in the newest checkpoint."""
    found = Checkpoints(run.folder.checkpoints, keep=9)
    checkpoint = found.newest() if step is None else next(c for c in found.all() if c.step == step)
    return {
        name: load_file(adapter_folder(checkpoint.path / "model", name) / ADAPTER_WEIGHTS)
        for name in ("teller", "writer")
    }


def test_two_adapters_train_and_go_on_bit_for_bit(tiny_run):
    whole = tiny_run(*ADAPTERS, name="whole")
    train(whole)
    lines = numbers(whole)
    for line in lines:
        assert line["adapter/teller/tokens"] + line["adapter/writer/tokens"] == line["train/tokens"]
        assert line["adapter/teller/updates"] == line["adapter/writer/updates"] == 2
        assert (line["adapter/teller/learning_rate"], line["adapter/writer/learning_rate"]) == (0.05, 0.01)
        assert line["adapter/teller/staleness/max"] == 0
        assert line["adapter/teller/probe_difference"] < 1e-4
        print(json.dumps(line, indent=0))
        assert line["mismatch/turn_0"] < 1e-5
    cut = tiny_run(*ADAPTERS, "trainer.steps=2", name="cut")
    train(cut)
    train(resume_run(cut.folder.path, ["trainer.steps=4"]))
    assert numbers(cut) == lines
    for name, tensors in adapters(whole).items():
        for key, tensor in adapters(cut)[name].items():
            assert torch.equal(tensor, tensors[key])
