"""Several ranks compute what one computes: losses, gradients, checkpoints. Real processes, over gloo."""

import math
import os
import random
import socket
import threading

import pytest
import torch
from ranks_here import Group, forked, group_of
from safetensors.torch import load_file
from support.forks import exit_code
from support.models import tiny_model
from support.waiting import join
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.builders.workers import serve_launched_rank
from agentrl.config.config import Config
from agentrl.models.memory import FREED_SHARE, memory_limit
from agentrl.training.checkpoint import save_adapter_folder, save_model_folder
from agentrl.training.diagnostics.repeated_update import repeat_update
from agentrl.training.diagnostics.watch import read_dump
from agentrl.training.distributed.launch import open_ranks
from agentrl.trajectory import Source, TokenSequence, Turn

CHUNK = 7
"""Tokens whose logits exist at once."""
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
    "has a kink": {
        "trainer": {"tokens_per_micro_batch": 60, "mini_batches": 2, "learning_rate": 1e-3},
        "algorithm": {"loss": "kl_cov", "loss_options": {"share": 0.2}},
    },
}


CRITICS = {
    "critic": {
        "trainer": {
            "mini_batches": 2,
            "tokens_per_micro_batch": 60,
            "critic": {"kind": "own", "learning_rate": 1e-2},
        },
        "algorithm": {"advantage": "gae", "kl_coef": 0.0},
    },
    "shared critic": {
        "trainer": {
            "tokens_per_micro_batch": 60,
            "epochs": 2,
            "max_kl": 5.0,
            "learning_rate": 1e-3,
            "critic": {"kind": "shared", "learning_rate": 1e-2},
        },
        "algorithm": {"advantage": "gae_turn", "kl_coef": 0.0},
    },
    "process reward": {
        "trainer": {
            "mini_batches": 2,
            "tokens_per_micro_batch": 60,
            "process_reward": {"learning_rate": 1e-3, "beta": 0.2},
        },
        "algorithm": {"advantage": "prime", "kl_coef": 0.0},
    },
}
SETTINGS |= CRITICS

CASES = [
    ("many micro-batches", 2),
    ("rows of ranks", 4),
    ("looks ahead", 2),
    ("has a kink", 2),
    ("critic", 2),
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


@pytest.fixture(scope="module", autouse=True)
def _small_chunks():
    """Of the head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.training.forward.logprobs.chunk_tokens", lambda *_: CHUNK)
        yield


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
    return parts.trainer.step(trajectories, temperature=0.9).metrics


def weights(parts):
    return {name: tensor.clone() for name, tensor in parts.source.weights().items()}


def save(parts, folder):
    folder.mkdir(parents=True)
    weights = parts.source.weights() if parts.trainer.ranks.is_distributed else None
    save_model_folder(parts.trainer.model, NoTokenizer(), folder / "model", weights=weights)
    parts.trainer.checkpoint.save(folder)
    return folder


def gradients(parts):
    """Of the first update: the first moment is a tenth of it."""
    state = parts.trainer._optimizer.named_state()
    return {name: value for name, value in state.items() if name.endswith("/exp_avg")}


def critic_weights(parts):
    """Of a trainer without other ranks, by name."""
    signals = parts.trainer.signals
    state = (signals.get("critic") or signals["process_reward"]).named_state()
    return {name: tensor.detach().clone() for name, tensor in state.items() if "masters/" in name}


def assert_same_numbers(found, expected):
    for name, value in expected.items():
        if "seconds" not in name and "per_s" not in name and name != "train/tokens_saved":  # parts repeat prefixes
            rel = 1e-4 if name == "critic/explained_variance" else 1e-5  # the rest of a division of alike variances
            assert found[name] == pytest.approx(value, rel=rel, abs=1e-6), name  # a loss may be 0 but for rounding


def assert_same_gradients(found, expected):
    """Relative to the largest of a parameter's: sums in another order differ in the last digits."""
    assert len(found) == len(expected) == 24
    for key, gradient in expected.items():
        largest = float(gradient.abs().max())
        assert largest > 0
        assert float((found[key] - gradient).abs().max()) < 1e-5 * largest, key


def assert_same_tensors(found, expected, **tolerance):
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def two_steps(group, name, path, trajectories, folder):
    """Numbers of two steps, the checkpoint between them, and the weights after them."""
    parts = group.build(settings(name, path, group.ranks.count))
    first = step(parts, trajectories)
    saved = save(parts, folder / f"{name}-{group.ranks.count}")
    second = step(parts, trajectories)
    end = save(parts, folder / f"{name}-{group.ranks.count}-end") if name in CRITICS else None
    return {"first": first, "saved": saved, "second": second, "weights": weights(parts), "end": end}


def resumed(group, name, path, trajectories, saved):
    """Gradients as the checkpoint has them, and the second step from there."""
    parts = group.build(settings(name, path, group.ranks.count), saved / "model", reference=str(path))
    parts.trainer.checkpoint.load(saved)
    found = {"gradients": gradients(parts)} if not group.ranks.is_distributed else {}
    found |= {"second": step(parts, trajectories), "weights": weights(parts)}
    again = saved.with_name(f"{saved.name}-resumed-by-{group.ranks.count}")
    return {**found, "end": save(parts, again) if name in CRITICS else None}


def saved_critic(name, path, saved):
    """The weights of a checkpoint's critic, by name."""
    with group_of(1) as group:
        parts = group.build(settings(name, path, 1), saved / "model", reference=str(path))
        parts.trainer.checkpoint.load(saved)
        return critic_weights(parts)


@pytest.fixture(scope="module")
def alone(path, module_trajectories, tmp_path_factory):
    """The two steps of one process, by settings."""
    found = {}

    def run(name):
        if name not in found:
            with group_of(1) as group:
                folder = tmp_path_factory.mktemp("alone")
                found[name] = two_steps(group, name, path, module_trajectories, folder)
                again = resumed(group, name, path, module_trajectories, found[name]["saved"])
                found[name] |= {"gradients": again["gradients"], "resumed": again}
        return found[name]

    return run


@pytest.mark.parametrize(
    ("name", "count"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_ranks_compute_what_one_computes(alone, path, module_trajectories, tmp_path, name, count):
    one = alone(name)
    with group_of(count) as group:
        many = two_steps(group, name, path, module_trajectories, tmp_path)
    for number in ("first", "second"):
        assert_same_numbers(many[number], one[number])
    assert_same_tensors(many["weights"], one["weights"], rtol=1e-5, atol=1e-5)
    with group_of(1) as group:
        again = resumed(group, name, path, module_trajectories, many["saved"])
    assert_same_gradients(again["gradients"], one["gradients"])
    assert_same_numbers(again["second"], one["second"])
    assert_same_tensors(again["weights"], one["weights"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensors"), [("shared critic", 2), ("process reward", 24)])
def test_several_ranks_train_and_resume_the_same_critic_as_one(
    alone, path, module_trajectories, tmp_path, name, tensors
):
    one = alone(name)
    assert one["first"]["process_reward/loss" if name == "process reward" else "critic/loss"] > 0
    with group_of(2) as group:
        two = two_steps(group, name, path, module_trajectories, tmp_path)
        same = resumed(group, name, path, module_trajectories, two["saved"])
        of_one = resumed(group, name, path, module_trajectories, one["saved"])
    expected, found = saved_critic(name, path, one["end"]), saved_critic(name, path, two["end"])
    assert len(expected) == tensors
    assert_same_tensors(found, expected, rtol=1e-5, atol=1e-5)
    assert_same_tensors(saved_critic(name, path, same["end"]), found, rtol=0, atol=0)
    assert_same_tensors(saved_critic(name, path, of_one["end"]), expected, rtol=1e-5, atol=1e-5)
    for again in (same, of_one):
        assert_same_numbers(again["second"], one["second"])


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_any_number_of_ranks(alone, path, module_trajectories, tmp_path):
    name = "one micro-batch"
    one = alone(name)
    assert one["resumed"]["second"]["train/loss"] == one["second"]["train/loss"]
    assert_same_tensors(one["resumed"]["weights"], one["weights"], rtol=0, atol=0)
    with group_of(2) as group:
        two = two_steps(group, name, path, module_trajectories, tmp_path)
        same = resumed(group, name, path, module_trajectories, two["saved"])
        of_one = resumed(group, name, path, module_trajectories, one["saved"])
    assert same["second"]["train/loss"] == two["second"]["train/loss"]
    assert_same_tensors(same["weights"], two["weights"], rtol=0, atol=0)
    assert_same_numbers(of_one["second"], one["second"])
    assert_same_tensors(of_one["weights"], one["weights"], rtol=1e-5, atol=1e-5)
    with group_of(4) as group:
        four = resumed(group, name, path, module_trajectories, two["saved"])
    assert_same_numbers(four["second"], one["second"])
    assert_same_tensors(four["weights"], one["weights"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_copy_of_the_state_is_written_while_the_next_step_runs(alone, path, module_trajectories, tmp_path):
    name = "one micro-batch"
    with group_of(2) as group:
        parts = group.build(settings(name, path, 2))
        step(parts, module_trajectories)
        model = save(parts, tmp_path / "at once") / "model"
        write = parts.trainer.checkpoint.copy()
        (tmp_path / "beside").mkdir()
        thread = threading.Thread(target=write, args=(tmp_path / "beside",))
        thread.start()
        second = step(parts, module_trajectories)
        join(thread)
        parts = group.build(settings(name, path, 2), model, reference=str(path))
        parts.trainer.checkpoint.load(tmp_path / "beside")
        assert step(parts, module_trajectories)["train/loss"] == second["train/loss"]
    assert_same_numbers(second, alone(name)["second"])


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_share_the_memory_that_a_run_keeps_between_steps(path, count):
    with group_of(count) as group:
        kept = group.build(settings("", path, count)).trainer._freed.most
    assert kept == memory_limit() // FREED_SHARE // count


@pytest.mark.parametrize(("count", "computed"), [(1, 30 + 4 * 3), (2, 2 * 30 + 4 * 3)])
def test_tokens_saved_are_those_of_all_ranks_together(path, make_trajectory, count, computed):
    """Four answers to one prompt, whose last tokens nobody reads; two ranks compute the prompt twice."""
    group_of_four = []
    for member in range(4):
        sequence = TokenSequence()
        sequence.extend(list(range(5, 35)), Source.PROMPT)
        sequence.extend_sampled([4 + member, 6, 7, 8], logprobs=[-2.0] * 4, versions=[0] * 4)
        sequence.turns.append(Turn(index=0, start=30, end=34))
        trajectory = make_trajectory(random.Random(member), "g", member, turns=1, reward=float(member))
        trajectory.sequences[:] = [sequence]
        sequence.turns[0].reward = float(member)
        group_of_four.append(trajectory)
    with group_of(count) as group:
        numbers = step(group.build(settings("", path, count, share_prefixes=True)), group_of_four)
    assert numbers["train/tokens_saved"] == pytest.approx(1 - computed / (4 * 33))


@pytest.mark.slow
def test_a_short_format_is_computed_from_shards_in_float32(path, module_trajectories):
    changes = {"model": {"path": str(path), "device": "cpu", "dtype": "bfloat16"}}
    found = {}
    for count in (1, 2):
        config = settings("many micro-batches", path, count).model_copy(update={})
        config = Config.model_validate(config.model_dump() | changes)
        with group_of(count) as group:
            parts = group.build(config)
            found[count] = step(parts, module_trajectories), weights(parts)
    assert {parameter.dtype for parameter in parts.trainer.model.parameters()} == {torch.float32}
    assert found[2][0]["train/loss"] == pytest.approx(found[1][0]["train/loss"], rel=0.02)
    assert {tensor.dtype for tensor in found[2][1].values()} == {torch.bfloat16}
    assert_same_tensors(found[2][1], found[1][1], rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_adapters_are_trained_by_ranks_as_by_one(path, module_trajectories, tmp_path):
    """Numbers, merged weights and a checkpoint of the adapters, with the base as reference."""
    changes = {
        "model": {"path": str(path), "device": "cpu", "lora": {"rank": 3, "target_modules": ["q_proj", "down_proj"]}}
    }
    found = {}

    def run(group, count):
        config = Config.model_validate(settings("many micro-batches", path, count).model_dump() | changes)
        parts = group.build(config)
        first = step(parts, module_trajectories)
        folder = tmp_path / str(count)
        save_adapter_folder(
            parts.trainer.model, NoTokenizer(), folder / "model", trained=parts.source.trained_tensors()
        )
        parts.trainer.checkpoint.save(folder)
        expected = step(parts, module_trajectories)
        again = group.build(config, folder / "model", reference=str(path))
        again.trainer.checkpoint.load(folder)
        assert_same_numbers(step(again, module_trajectories), expected)
        found[count] = first, expected, weights(again)

    for count in (1, 2):
        with group_of(count) as group:
            run(group, count)
    for many, one in zip(found[2][:2], found[1][:2], strict=True):
        assert_same_numbers(many, one)
    assert found[1][1]["train/kl_reference"] > 0
    assert_same_tensors(found[2][2], found[1][2], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_experts_are_balanced_over_ranks_as_by_one(module_trajectories, tmp_path):
    """The files of a mixture name each expert, the model has one tensor for all of them."""
    tiny_model("qwen3_moe", vocab_size=41).save_pretrained(tmp_path)
    found = {}

    def run(group, count):
        parts = group.build(settings("many micro-batches", tmp_path, count, moe={"aux_loss_coef": 0.5}))
        found[count] = step(parts, module_trajectories), step(parts, module_trajectories), weights(parts)

    for count in (1, 2):
        with group_of(count) as group:
            run(group, count)
    for many, one in zip(found[2][:2], found[1][:2], strict=True):
        assert_same_numbers(many, one)
    assert found[1][0]["train/moe_max_load"] > 1
    assert_same_tensors(found[2][2], found[1][2], rtol=1e-5, atol=1e-5)


def test_files_with_other_names_are_loaded_by_rank_0(path, tmp_path):
    """A base model's files lack the prefix that the whole model's names have."""
    whole = Qwen3ForCausalLM.from_pretrained(path)
    whole.model.save_pretrained(tmp_path)
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "model.safetensors"))
    with group_of(2) as group:
        found = weights(group.build(settings("", tmp_path, 2)))
    assert_same_tensors(found, whole.state_dict(), rtol=0, atol=0)


@pytest.mark.slow
def test_processes_that_a_launcher_has_started_meet(path, module_trajectories, tmp_path, monkeypatch):
    """What torchrun tells its processes, but for its own store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    told = {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in {**told, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert not serve_launched_rank()

    def other():
        os.environ["RANK"] = "1"
        assert serve_launched_rank()

    child = forked(other)
    with open_ranks(2, logs=tmp_path) as ranks:
        parts = Group(ranks).build(settings("many micro-batches", path, 2))
        found = step(parts, module_trajectories)
    assert exit_code(child) == 0
    with group_of(1) as group:
        expected = step(group.build(settings("many micro-batches", path, 1)), module_trajectories)
    assert_same_numbers(found, expected)


@pytest.mark.slow
def test_a_rank_holds_its_part_only_and_a_gathered_tensor_is_whole(path, module_trajectories):
    with group_of(2) as group:
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


@pytest.mark.slow
def test_gradients_that_are_not_finite_are_found_by_all_and_repeated_by_one(path, module_trajectories, tmp_path):
    config = settings("many micro-batches", path, 2)
    with group_of(2) as group:
        parts = group.build(config)
        parts.trainer.watch.write_dumps(tmp_path, config.model_dump(mode="json"))
        with torch.no_grad():  # of rank 0's shard only
            parts.trainer.model.model.norm.weight.to_local().fill_(math.nan)
        report = parts.trainer.step(module_trajectories, temperature=1.0)
    assert report.metrics["train/updates_skipped"] == 1
    assert "gradients are not finite in" in report.warnings[0]
    found = repeat_update(read_dump(tmp_path / "step-000001-update-1.pt"))
    assert found.weights_not_finite == ("model.norm.weight",)
    assert found.first_forward.startswith("model.norm (")
    assert found.now.non_finite == found.recorded.non_finite
    assert len(found.micro_batches) > 2
