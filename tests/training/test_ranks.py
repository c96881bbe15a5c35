"""Several ranks compute what one computes: losses, gradients, checkpoints. Real processes, over gloo."""

import math
import os
import subprocess
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.assembly.trainers import BUILD, build_trainer
from agentrl.config.schema import Config
from agentrl.testing.models import tiny_model
from agentrl.training.checkpoint import save_adapter_folder, save_model_folder
from agentrl.training.ranks import Ranks, join
from agentrl.training.ranks.group import leave

PROGRAM = Path(__file__).parent / "rank_program.py"
CHUNK = 7
"""Tokens whose logits exist at once."""
RESUMED = {(1, 2), (2, 2), (4, 2), (4, 4)}
"""Ranks that saved, and ranks that went on."""
SETTINGS = {
    "many micro-batches": {"trainer": {"tokens_per_micro_batch": 40}, "algorithm": {"entropy_coef": 0.05}},
    "one micro-batch": {
        "trainer": {"mini_batches": 2, "gradient_checkpointing": True},
        "algorithm": {"shaping": {"kl": {"coef": 0.1, "target": 1.0, "horizon": 20.0}}},
    },
    "rows of ranks": {
        "trainer": {"tokens_per_micro_batch": 60, "fsdp": {"replicas": 2, "reduce": True, "reshard": False}},
        "algorithm": {"kl_coef": 0.0, "correction": {"mode": "icepop"}},
    },
    "looks ahead": {
        "trainer": {
            "tokens_per_micro_batch": 60,
            "mini_batches": 2,
            "share_prefixes": True,
            "learning_rate": 1e-3,
        },
        "algorithm": {
            "loss": "clip_cov",
            "loss_options": {"share": 0.2, "cov_low": 0.01, "cov_high": 9.0},
            "filters": {"geometric": {"band": [0.2, 5.0]}},
        },
    },
}


CASES = [
    ("many micro-batches", 2),
    ("one micro-batch", 2),
    ("one micro-batch", 4),
    ("rows of ranks", 4),
    ("looks ahead", 2),
]
"""Settings, and numbers of ranks that are compared with one."""


def settings(name, path, count, **trainer):
    changes = SETTINGS.get(name, {})
    common = {"learning_rate": 1e-2, "processes": count}
    if count == 1:
        trainer["fsdp"] = {}
    return Config(
        environment={"name": "maze"},
        model={"path": str(path), "device": "cpu"},
        algorithm={"kl_coef": 0.1, **changes.get("algorithm", {})},
        trainer={**common, **changes.get("trainer", {}), **trainer},
    )


class NoTokenizer:
    def save_pretrained(self, folder):
        """There is nothing to save."""


class Group:
    """Ranks of which this process is the first; the others build again what they are told to."""

    def __init__(self, ranks):
        self.ranks = ranks

    def build(self, config, path=None, reference=None):
        path = path or config.model.path
        with self.ranks.led(BUILD, config.model_dump(mode="json"), str(path), reference):
            return build_trainer(config, model_path=str(path), reference_path=reference, reader=None, ranks=self.ranks)


@pytest.fixture(scope="module", autouse=True)
def _small_chunks():
    """Of the head, as in the other ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.training.logprobs.chunk_tokens", lambda *_: CHUNK)
        yield


@pytest.fixture(scope="module")
def processes():
    """Three ranks besides this process; their libraries are imported once."""
    command, environment = [sys.executable, str(PROGRAM), str(CHUNK)], {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
        for _ in range(3)
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield started
    torch.set_num_threads(before)
    for process in started:
        process.kill()
        process.communicate()


@contextmanager
def group_of(count, processes):
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
    for rank, process in enumerate(processes[: count - 1], start=1):
        process.stdin.write(f"{store.port} {rank} {count}\n")
        process.stdin.flush()
    try:
        ranks = join(store, rank=0, count=count)
        yield Group(ranks)
        ranks.dismiss()
    finally:
        leave()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model whose sizes no number of ranks divides."""
    config = Qwen3Config(
        vocab_size=41,
        hidden_size=18,
        intermediate_size=30,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=6,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def step(parts, trajectories):
    return parts.trainer.step(trajectories, temperature=0.9, pad_id=0).metrics


def weights(parts):
    return {name: tensor.clone() for name, tensor in parts.source.weights().items()}


def save(parts, folder):
    folder.mkdir(parents=True)
    weights = parts.source.weights() if parts.trainer.ranks.are_many else None
    save_model_folder(parts.trainer.model, NoTokenizer(), folder / "model", weights=weights)
    parts.trainer.save(folder)
    return folder


def gradients(parts):
    """Of the first update: the first moment is a tenth of it."""
    state = parts.trainer._optimizer.named_state()
    return {name: value for name, value in state.items() if name.endswith("/exp_avg")}


def assert_same_numbers(found, expected):
    for name, value in expected.items():
        if "seconds" not in name and "per_s" not in name:
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name  # a loss may be 0 but for rounding


def assert_same_tensors(found, expected, **tolerance):
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.fixture(scope="module")
def steps(path, processes, tmp_path_factory, module_trajectories):
    """Two steps of every setting with 1, 2 and 4 ranks: numbers, checkpoints after the first, weights after both."""
    folder, found = tmp_path_factory.mktemp("steps"), {}

    def both(name, count, group):
        parts = group.build(settings(name, path, count))
        first = step(parts, module_trajectories)
        saved = save(parts, folder / f"{name}-{count}")
        second = step(parts, module_trajectories)
        found[name, count] = {"first": first, "saved": saved, "second": second, "weights": weights(parts)}

    def load(count, group, name, saved):
        parts = group.build(settings(name, path, count), saved / "model", reference=str(path))
        parts.trainer.load(saved)
        return parts

    alone = Group(Ranks())
    for name in SETTINGS:
        both(name, 1, alone)
    for count in (4, 2):
        with group_of(count, processes) as group:
            for name in SETTINGS:
                if (name, count) in CASES:
                    both(name, count, group)
            for before in (1, 2, 4):
                if (before, count) in RESUMED:
                    parts = load(count, group, "one micro-batch", found["one micro-batch", before]["saved"])
                    numbers = step(parts, module_trajectories)
                    found["resumed", before, count] = {"second": numbers, "weights": weights(parts)}
    for name in SETTINGS:
        for count in [1, *(ranks for case, ranks in CASES if case == name)]:
            parts = load(1, alone, name, found[name, count]["saved"])
            found[name, count]["gradients"] = gradients(parts)
            if name == "one micro-batch":
                found["resumed", count, 1] = {"second": step(parts, module_trajectories), "weights": weights(parts)}
    return found


@pytest.mark.parametrize(("name", "count"), CASES)
def test_ranks_compute_what_one_computes(steps, name, count):
    one, many = steps[name, 1], steps[name, count]
    assert_same_numbers(many["first"], one["first"])
    assert_same_numbers(many["second"], one["second"])
    assert_same_tensors(many["weights"], one["weights"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "count"), [case for case in CASES if case[0] != "one micro-batch"])
def test_gradients_are_those_of_one_rank(steps, name, count):
    """Relative to the largest of a parameter's: sums in another order differ in the last digits."""
    expected = steps[name, 1]["gradients"]
    assert len(expected) == len(steps[name, count]["gradients"]) == 24
    for key, gradient in expected.items():
        largest = float(gradient.abs().max())
        assert largest > 0
        assert float((steps[name, count]["gradients"][key] - gradient).abs().max()) < 1e-5 * largest, key


@pytest.mark.parametrize(("before", "after"), sorted({*RESUMED, (2, 1), (4, 1)} - {(2, 2), (4, 4)}))
def test_a_checkpoint_goes_on_with_any_number_of_ranks(steps, before, after):
    expected, resumed = steps["one micro-batch", before], steps["resumed", before, after]
    assert_same_numbers(resumed["second"], expected["second"])
    assert_same_tensors(resumed["weights"], expected["weights"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_same_number_of_ranks_goes_on_bit_for_bit(steps, count):
    expected, resumed = steps["one micro-batch", count], steps["resumed", count, count]
    assert resumed["second"]["train/loss"] == expected["second"]["train/loss"]
    assert_same_tensors(resumed["weights"], expected["weights"], rtol=0, atol=0)


def test_a_short_format_is_computed_from_shards_in_float32(path, processes, module_trajectories):
    changes = {"model": {"path": str(path), "device": "cpu", "dtype": "bfloat16"}}
    found = {}
    for count in (1, 2):
        config = settings("many micro-batches", path, count).model_copy(update={})
        config = Config.model_validate(config.model_dump() | changes)
        if count == 1:
            parts = Group(Ranks()).build(config)
            found[count] = step(parts, module_trajectories), weights(parts)
            continue
        with group_of(count, processes) as group:
            parts = group.build(config)
            found[count] = step(parts, module_trajectories), weights(parts)
            assert {parameter.dtype for parameter in parts.trainer.model.parameters()} == {torch.float32}
    assert found[2][0]["train/loss"] == pytest.approx(found[1][0]["train/loss"], rel=0.02)
    assert {tensor.dtype for tensor in found[2][1].values()} == {torch.bfloat16}
    assert_same_tensors(found[2][1], found[1][1], rtol=0.02, atol=0.02)


def test_adapters_are_trained_by_ranks_as_by_one(path, processes, module_trajectories, tmp_path):
    """Numbers, merged weights and a checkpoint of the adapters, with the base as reference."""
    changes = {"model": {"path": str(path), "device": "cpu", "lora": {"rank": 3, "targets": ["q_proj", "down_proj"]}}}
    found = {}

    def run(group, count):
        config = Config.model_validate(settings("many micro-batches", path, count).model_dump() | changes)
        parts = group.build(config)
        first = step(parts, module_trajectories)
        folder = tmp_path / str(count)
        save_adapter_folder(parts.trainer.model, NoTokenizer(), folder / "model", trained=parts.source.trained())
        parts.trainer.save(folder)
        expected = step(parts, module_trajectories)
        again = group.build(config, folder / "model", reference=str(path))
        again.trainer.load(folder)
        assert_same_numbers(step(again, module_trajectories), expected)
        found[count] = first, expected, weights(again)

    run(Group(Ranks()), 1)
    with group_of(2, processes) as group:
        run(group, 2)
    for many, one in zip(found[2][:2], found[1][:2], strict=True):
        assert_same_numbers(many, one)
    assert found[1][1]["train/kl_reference"] > 0
    assert_same_tensors(found[2][2], found[1][2], rtol=1e-5, atol=1e-5)


def test_experts_are_balanced_over_ranks_as_by_one(processes, module_trajectories, tmp_path):
    """The files of a mixture name each expert, the model has one tensor for all of them."""
    tiny_model("qwen3_moe", vocab_size=41).save_pretrained(tmp_path)
    found = {}

    def run(group, count):
        parts = group.build(settings("many micro-batches", tmp_path, count, router_balance=0.5))
        found[count] = step(parts, module_trajectories), step(parts, module_trajectories), weights(parts)

    run(Group(Ranks()), 1)
    with group_of(2, processes) as group:
        run(group, 2)
    for many, one in zip(found[2][:2], found[1][:2], strict=True):
        assert_same_numbers(many, one)
    assert found[1][0]["train/busiest_expert"] > 1
    assert_same_tensors(found[2][2], found[1][2], rtol=1e-5, atol=1e-5)


def test_files_with_other_names_are_loaded_by_rank_0(path, processes, tmp_path):
    """A base model's files lack the prefix that the whole model's names have."""
    whole = Qwen3ForCausalLM.from_pretrained(path)
    whole.model.save_pretrained(tmp_path)
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "model.safetensors"))
    with group_of(2, processes) as group:
        found = weights(group.build(settings("", tmp_path, 2)))
    assert_same_tensors(found, whole.state_dict(), rtol=0, atol=0)


def test_a_rank_holds_its_part_only_and_a_gathered_tensor_is_whole(path, processes, module_trajectories):
    with group_of(2, processes) as group:
        parts = group.build(settings("many micro-batches", path, 2))
        step(parts, module_trajectories)
        model = parts.trainer.model
        held = sum(parameter.to_local().numel() for parameter in model.parameters())
        assert held < 0.6 * sum(parameter.numel() for parameter in model.parameters())
        given = parts.source.weights()
        assert given["lm_head.weight"].shape == (41, 18)
        assert "no.such.tensor" not in given
        with pytest.raises(KeyError):
            given["no.such.tensor"]


def test_gradients_that_are_not_finite_are_found_by_all(path, processes, module_trajectories):
    with group_of(2, processes) as group:
        parts = group.build(settings("many micro-batches", path, 2))
        with torch.no_grad():  # of rank 0's shard only
            parts.trainer.model.model.norm.weight.to_local().fill_(math.nan)
        report = parts.trainer.step(module_trajectories, temperature=1.0, pad_id=0)
    assert report.metrics["train/updates_skipped"] == 1
    assert "gradients are not finite in" in report.warnings[0]
