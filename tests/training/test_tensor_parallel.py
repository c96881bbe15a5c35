"""Ranks that share the matrices of layers compute what one rank computes, and save what one reads."""

import pytest
import torch
from ranks_here import group_of
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.config.config import Config
from agentrl.errors import UsageError
from agentrl.training.checkpoint import save_model_folder
from agentrl.training.distributed.fsdp import FAMILIES, check_tensor_parallel

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 41,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
MODELS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True, "num_hidden_layers": 2}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
}
CASES = [
    ("qwen3", 2, {"gradient_checkpointing": True}),
    ("qwen2", 4, {"tokens_per_micro_batch": 60}),
    ("llama", 4, {"context_parallel": 2}),
    ("mistral", 2, {}),
]
"""Models, numbers of ranks, and what else they are trained with."""


class NoTokenizer:
    def save_pretrained(self, folder):
        """There is nothing to save."""


def settings(path, count, trainer):
    if count == 1:
        trainer = {name: value for name, value in trainer.items() if "parallel" not in name}
    return Config(
        environment={"name": "maze"},
        model={"path": str(path), "device": "cpu"},
        algorithm={"kl_coef": 0.1},
        trainer={"learning_rate": 1e-3, "processes": count, **trainer},
    )


@pytest.fixture
def path_of(tmp_path):
    def save(name, **changes):
        kind, config, own = MODELS[name]
        with torch.random.fork_rng():
            torch.manual_seed(5)
            kind(config(**{**SIZES, **own, **changes})).save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


def step(parts, trajectories):
    return parts.trainer.step(trajectories, temperature=0.9).metrics


def moments(parts):
    state = parts.trainer._optimizer.named_state()
    return {name: value for name, value in state.items() if name.endswith("/exp_avg")}


def weights(parts):
    return {name: tensor.clone() for name, tensor in parts.source.weights().items()}


def assert_same(found, expected):
    for name, value in expected.items():
        if not any(word in name for word in ("seconds", "per_s", "tokens_saved")):
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(("name", "count", "trainer"), CASES)
def test_ranks_that_share_matrices_compute_what_one_computes(path_of, module_trajectories, name, count, trainer):
    path, trainer = path_of(name), {**trainer, "tensor_parallel": 2}
    with group_of(1) as group:
        parts = group.build(settings(path, 1, trainer))
        expected, gradients, after = step(parts, module_trajectories), moments(parts), weights(parts)
    with group_of(count) as group:
        parts = group.build(settings(path, count, trainer))
        assert_same(step(parts, module_trajectories), expected)
        own, found = moments(parts), weights(parts)
        layer = parts.trainer.model.model.layers[0]
        assert layer.self_attn.q_proj.weight.to_local().numel() == layer.self_attn.q_proj.weight.numel() // count
    for key, gradient in gradients.items():
        largest, part = float(gradient.abs().max()), own[key].to_local()
        same = gradient[tuple(slice(size) for size in part.shape)]  # rank 0 has the first rows and columns
        assert largest > 0
        assert float((part - same).abs().max()) < 1e-5 * largest, key
    assert list(found) == list(after)
    for key, value in after.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5)


def test_checkpoints_go_from_one_rank_to_two_that_share_matrices_and_back(path_of, module_trajectories, tmp_path):
    path, trainer = path_of("qwen3"), {"tensor_parallel": 2}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with group_of(1) as group:
        parts = group.build(settings(path, 1, trainer))
        step(parts, module_trajectories)
        parts.trainer.checkpoint.save(tmp_path / "one")
        save_model_folder(parts.trainer.model, NoTokenizer(), tmp_path / "one" / "model")
        second, after = step(parts, module_trajectories), weights(parts)
    with group_of(2) as group:
        parts = group.build(settings(path, 2, trainer), tmp_path / "one" / "model", reference=str(path))
        parts.trainer.checkpoint.load(tmp_path / "one")
        parts.trainer.checkpoint.save(tmp_path / "two")
        assert_same(step(parts, module_trajectories), second)
    with group_of(1) as group:
        parts = group.build(settings(path, 1, trainer), tmp_path / "one" / "model", reference=str(path))
        parts.trainer.checkpoint.load(tmp_path / "two")
        step(parts, module_trajectories)
        for key, value in weights(parts).items():
            torch.testing.assert_close(value, after[key], rtol=0, atol=0)


def test_every_family_is_tested():
    assert sorted(MODELS) == sorted(FAMILIES)


def test_sizes_that_do_not_divide_are_named():
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_attention_heads": 6, "num_key_value_heads": 3}))
    check_tensor_parallel(model, 1)
    with pytest.raises(UsageError, match="key-value heads 3, 2 ranks, expected a divisor of each"):
        check_tensor_parallel(model, 2)


def test_other_models_are_refused():
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=8))
    with pytest.raises(UsageError, match="model type gpt2, expected one of llama, mistral"):
        check_tensor_parallel(model, 2)


def test_muon_makes_the_updates_of_one_rank(path_of, module_trajectories):
    """To what bfloat16, in which matrices are orthogonalized, makes of a gradient's last digits."""
    path, trainer = path_of("llama"), {"tensor_parallel": 2, "optimizer": "muon", "learning_rate": 0.01}
    with group_of(1) as group:
        parts = group.build(settings(path, 1, trainer))
        before = weights(parts)
        step(parts, module_trajectories)
        expected = weights(parts)
    with group_of(2) as group:
        parts = group.build(settings(path, 2, trainer))
        step(parts, module_trajectories)
        found = weights(parts)
    for name, value in expected.items():
        largest = float((value - before[name]).abs().max())
        assert largest > 1e-3
        assert float((found[name] - value).abs().max()) < 0.03 * largest, name
