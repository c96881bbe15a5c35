"""Several adapters on the command line: export, evaluation by role, view and plan."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from agentrl.models.lora import ADAPTER_WEIGHTS, adapter_folder
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.metrics import read_metrics
from agentrl.runs.rl import train

SETTINGS = (
    "agent={loop: 'two_agents:Telling', options: {}, max_answer_tokens: 6, max_tokens: 256}",
    "model.lora={rank: 4}",
    "agent.roles={teller: {adapter: teller}, writer: {adapter: writer}}",
    "adapters={teller: {learning_rate: 0.05}, writer: {}}",
    "trainer.steps=1",
    "evaluation={every: 1, tasks: 2, split: test}",
)


@pytest.fixture
def run(tiny_run):
    found = tiny_run(*SETTINGS)
    train(found)
    yield found
    sys.modules.pop("two_agents", None)


@pytest.mark.slow
def test_adapters_are_exported_evaluated_and_shown_by_role(agentrl, run, tmp_path):
    folder, out = str(run.folder.path), tmp_path / "out"
    (line,) = read_metrics(run.folder.metrics_file)
    assert (line["eval/turns"], line["eval/failed"]) == (6, 0)
    assert agentrl("export", folder, str(out), "--adapter").code == 0
    assert sorted(one.name for one in out.iterdir()) == ["README.md", "teller", "writer"]
    model = Checkpoints(run.folder.checkpoints, keep=9).newest().path / "model"
    for name in ("teller", "writer"):
        exported, own = (load_file(one / ADAPTER_WEIGHTS) for one in (out / name, adapter_folder(model, name)))
        assert all(torch.equal(tensor, exported[key]) for key, tensor in own.items())
    assert agentrl("export", str(out / "writer"), str(tmp_path / "merged")).code == 0
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    found = tmp_path / "result.json"
    assert agentrl("eval", folder, "--tasks", "2", "--json", str(found)).code == 0
    result = json.loads(found.read_text())
    assert (result["turns"], result["failed"]) == (6, 0)
    page = tmp_path / "page.html"
    assert agentrl("view", folder, "--output", str(page)).code == 0
    assert "writer · adapter writer" in page.read_text()


@pytest.mark.slow
def test_one_model_is_asked_for_where_there_are_several_adapters(agentrl, run, tmp_path):
    folder = str(run.folder.path)
    said = agentrl("export", folder, str(tmp_path / "out"))
    assert said.code == 2
    assert "has several adapters, which cannot be merged" in said.err
    said = agentrl("eval", folder, "--tasks", "1", "adapters=null", "agent.roles=null")
    assert said.code == 2
    assert "contains several adapters" in said.err
    said = agentrl("eval", folder, "--tasks", "1", "--model", str(run.folder.model))
    assert said.code == 2


@pytest.mark.slow
def test_a_dry_run_counts_each_adapter(agentrl, run):
    said = agentrl("train", str(run.folder.config_file), "--dry-run")
    assert said.code == 0
    assert "adapter teller" in said.out
    assert "adapter writer" in said.out
