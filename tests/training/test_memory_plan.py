"""Estimates of `agentrl plan` against measured steps."""

import json

import pytest
import torch
from support.models import tiny_model
from transformers import Qwen3Config, Qwen3MoeConfig

from agentrl.cli import main
from agentrl.cli.plan import parse_memory
from agentrl.config import load_config
from agentrl.config.config import ModelConfig
from agentrl.errors import Outcome, UsageError
from agentrl.models.lora import add_adapters
from agentrl.training.diagnostics.memory_plan import plan
from agentrl.training.diagnostics.memory_trace import TensorMemory, footprint
from agentrl.training.trainer import Trainer
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

TOLERANCE = 0.05
"""How far the planned peak may be from that of all tensors in two steps on the CPU."""
LENGTH = 192


def long_answers(vocabulary):
    """One group of four: a prompt of 4 tokens, and 188 that were sampled."""
    found = []
    for member in range(4):
        sequence = TokenSequence()
        sequence.extend([1, 2, 3, 4], Source.PROMPT)
        answer = [(7 * member + 3 * k) % vocabulary for k in range(LENGTH - 4)]
        sequence.extend_sampled(answer, logprobs=[-3.0] * len(answer), versions=[0] * len(answer))
        sequence.turns.append(Turn(index=0, start=4, end=LENGTH, reward=float(member)))
        trajectory = Trajectory(
            id=str(member), task_id="t", environment="e", seed=0, group_id="g", outcome=Outcome.FINISHED
        )
        trajectory.sequences.append(sequence)
        trajectory.reward = float(member)
        found.append(trajectory)
    return found


def planned_config(folder, *overrides):
    sizes = f"trainer={{tasks_per_step: 1, tokens_per_micro_batch: {2 * LENGTH}}}"
    agent = f"agent={{max_tokens: {LENGTH}, max_answer_tokens: {LENGTH}}}"
    plain = ["environment=e", f"model.path={folder}", "engine=scripted", "algorithm.group_size=4", sizes, agent]
    return load_config(None, [*plain, *overrides])


def measured_peak(model, config):
    """Of two steps: weights, gradients, moments and everything that passes need."""
    with TensorMemory() as memory:
        for parameter in model.parameters():
            memory.count(parameter)
        trainer = Trainer(model, config.algorithm, config.trainer, seed=0, max_tokens=LENGTH)
        for _ in range(2):
            trainer.step(long_answers(model.config.vocab_size), temperature=1.0)
    return memory.peak


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "float32"), ("llama", "float32"), ("qwen2", "bfloat16")])
@pytest.mark.slow
def test_the_planned_peak_is_the_measured_one(tmp_path, family, dtype, checkpointing):
    model = tiny_model(family, vocab_size=1024, layers=4, hidden_size=64).to(getattr(torch, dtype))
    model.config.save_pretrained(tmp_path)
    config = planned_config(
        tmp_path, f"model.dtype={dtype}", f"trainer.gradient_checkpointing={str(checkpointing).lower()}"
    )
    planned, measured = plan(config), measured_peak(model, config)
    assert planned.footprint.estimated is None
    assert planned.footprint.parameters == sum(p.numel() for p in model.parameters())
    assert planned.total == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "whole"), [("float32", ""), ("bfloat16", ""), ("bfloat16", "embed_tokens")])
def test_the_planned_peak_of_adapters_is_the_measured_one(tmp_path, dtype, whole):
    model = tiny_model("qwen3", vocab_size=1024, layers=4, hidden_size=64).to(getattr(torch, dtype))
    model.config.save_pretrained(tmp_path)
    config = planned_config(
        tmp_path, f"model={{dtype: {dtype}, lora: {{rank: 8, modules_to_save: [{whole}]}}}}", "algorithm.kl_coef=0.1"
    )
    add_adapters(model, config.model.lora, base="base", seed=0)
    planned = plan(config)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert planned.footprint.estimated is None
    assert planned.footprint.trained.parameters == trained
    assert ("reference" in {item.name for item in planned.items}) == bool(whole)
    assert planned.total == pytest.approx(measured_peak(model, config), rel=TOLERANCE)


def test_what_is_kept_by_hand(tmp_path):
    known = footprint(qwen3(tmp_path), tokens=2 * LENGTH, dtype=torch.float32)
    plans = {
        mode: plan(planned_config(tmp_path, f"trainer.gradient_checkpointing={mode}", "model.device=cuda"), known)
        for mode in ("full", "selective", "offload")
    }
    kept = {mode: {item.name: item.bytes for item in found.items} for mode, found in plans.items()}
    attended = 3 * 2 * LENGTH * 4 * (16 + 1) * 4
    assert kept["selective"]["activations"] - kept["full"]["activations"] == attended
    assert "activations" not in kept["offload"]
    waiting = {item.name: item.bytes for item in plans["offload"].off_device}
    assert waiting["activations, on the CPU"] == kept["full"]["activations"]


def qwen3(folder, **sizes):
    config = Qwen3Config(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, **sizes)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    config.save_pretrained(folder)
    return ModelConfig(path=str(folder))


@pytest.mark.slow
def test_a_model_has_no_weights_to_be_planned(tmp_path):
    model = qwen3(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    found = footprint(model, tokens=64, dtype=torch.float32)
    layer = 64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 128 + 2 * 64 + 2 * 16
    assert (found.layer_parameters, found.parameters) == (3 * layer, 3 * layer + 2 * 512 * 64 + 64)
    assert found.cache_values_per_token == 2 * 3 * 2 * 16
    assert found.checkpointed < found.activations / 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_experts_are_tried_or_estimated(tmp_path, dtype):
    Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ).save_pretrained(tmp_path)
    found = footprint(ModelConfig(path=str(tmp_path)), tokens=64, dtype=dtype)
    assert found.parameters > 2 * 4 * 3 * 64 * 32
    assert found.activations > 10 * 64 * 64 * dtype.itemsize
    assert (found.estimated is None) == (dtype == torch.bfloat16)


def items(config, **footprints):
    return {item.name: item.bytes for item in plan(config, **footprints).items}


def test_shards_by_hand(tmp_path):
    known = footprint(qwen3(tmp_path), tokens=64, dtype=torch.bfloat16)
    parameters, outside = known.parameters, known.parameters - known.layer_parameters
    config = planned_config(tmp_path, "model.dtype=bfloat16", "trainer.processes=4", "engine=local")
    found = items(config, known=known)
    share = -(-parameters // 4)
    assert (found["parameters"], found["gradients"], found["optimizer"]) == (4 * share, 4 * share, 8 * share)
    assert found["gathered"] == 2 * (outside + 2 * (known.layer_parameters // 3))
    assert found["whole gradients"] == 4 * parameters
    assert found["engine"] == 2 * parameters
    rows = items(planned_config(tmp_path, "trainer={processes: 4, fsdp: {replicas: 2, reduce: true}}"), known=known)
    assert rows["parameters"] == 4 * -(-parameters // 2)
    assert "whole gradients" not in rows
    offloaded = plan(planned_config(tmp_path, "trainer={processes: 4, fsdp: {offload: true}}"), known)
    assert "parameters" not in {item.name for item in offloaded.items}
    assert {item.name for item in offloaded.off_device} == {
        f"{n}, on the CPU" for n in ("parameters", "gradients", "optimizer")
    }


@pytest.mark.slow
def test_copies_references_caches_and_servers_by_hand(tmp_path):
    known = footprint(qwen3(tmp_path), tokens=64, dtype=torch.bfloat16)
    config = planned_config(
        tmp_path, "model.dtype=bfloat16", "algorithm.kl_coef=0.1", "engine={cache_tokens: 1000, type: local}"
    )
    found, parameters = items(config, known=known), known.parameters
    assert (found["parameters"], found["reference"]) == (2 * parameters,) * 2
    assert (found["gradients"], found["optimizer"]) == (4 * parameters, 12 * parameters)
    assert found["key-value cache"] == 1000 * known.cache_values_per_token * 2
    servers = plan(
        planned_config(tmp_path, "engine={type: vllm, max_num_seqs: 8, tensor_parallel: 2}"), known
    ).off_device
    assert [item.bytes for item in servers] == [
        4 * parameters // 2,
        8 * LENGTH * (known.cache_values_per_token * 4 // 2),
    ]


def test_critics_and_teachers_by_hand(tmp_path):
    known = footprint(qwen3(tmp_path), tokens=64, dtype=torch.float32)
    parameters = known.parameters
    critic = "trainer={critic: {kind: own}, processes: COUNT}"
    others = ("algorithm.advantage=gae", f"algorithm.teacher={{path: {tmp_path}}}")
    found = items(planned_config(tmp_path, critic.replace("COUNT", "1"), *others), known=known)
    assert (found["critic"], found["teacher"]) == (16 * parameters, 4 * parameters)
    found = items(planned_config(tmp_path, critic.replace("COUNT", "2"), *others), known=known)
    assert (found["critic"], found["teacher"]) == (16 * parameters // 2, 4 * parameters // 2)
    prime = ("algorithm.advantage=prime", "trainer.process_reward={}")
    assert items(planned_config(tmp_path, *prime), known=known)["process reward"] == (16 + 4) * parameters


def run(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main(["plan", *words])
    return end.value.code or 0, capsys.readouterr()


@pytest.mark.slow
def test_the_command_refuses_what_cannot_fit_and_says_what_would(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--env", "guess_number", "agent.max_tokens=1024"]
    code, told = run(capsys, *words, "--memory", "64GiB", "--json")
    found = json.loads(told.out)
    assert (code, found["fits"], found["memory_bytes"]) == (0, True, 64 * 2**30)
    assert found["total_bytes"] == sum(i["bytes"] for i in found["items"])  # nothing is there in the update only
    code, told = run(capsys, *words, "--memory", f"{found['total_bytes'] - 1}B")
    assert code == 2
    assert "error: this run does not fit into the memory of a rank: got" in told.err
    assert "It needs" in told.err
    assert "with engine.cache_tokens=" in told.err
    code, told = run(capsys, *words, "--memory", "1MiB")
    assert code == 2
    assert "trainer.gradient_checkpointing=true" in told.err
    assert "shard the model over more processes" in told.err


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("1.5 gb", 1_500_000_000), ("512MiB", 2**29), ("1000", 1000)]
)
def test_amounts_of_memory_are_read(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["much", "80 apples", "80", "-3GiB", "0GiB", ""])
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(UsageError, match="is not an amount of memory"):
        parse_memory(text)


def test_a_model_that_is_not_there_is_one_message(tmp_path, capsys):
    code, told = run(capsys, "--env", "guess_number", "--model", str(tmp_path / "nothing"))
    assert code == 2
    assert "nothing" in told.err
