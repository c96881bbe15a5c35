"""Ranks that share the tokens of a row compute what one rank computes."""

import pytest
import torch
from ranks_here import group_of, in_ranks
from support.models import tiny_model
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.config.config import Config
from agentrl.errors import ConfigError, UsageError
from agentrl.training.distributed.context_parallel import key_value_copies

SIZES = {
    "vocab_size": 41,
    "hidden_size": 24,
    "intermediate_size": 30,
    "num_hidden_layers": 2,
    "head_dim": 6,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
CASES = {
    "packed": ({"tokens_per_micro_batch": 70}, {"entropy_coef": 0.05}),
    "shares prefixes": ({"share_prefixes": True, "gradient_checkpointing": True, "mini_batches": 2}, {"loss": "gspo"}),
}


def settings(path, *, processes, trainer, algorithm=None):
    return Config(
        environment={"name": "maze"},
        model={"path": str(path), "device": "cpu"},
        algorithm={"kl_coef": 0.1, **(algorithm or {})},
        trainer={"learning_rate": 1e-2, "processes": processes, **trainer},
    )


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Four heads on two key-value heads."""
    config = Qwen3Config(num_attention_heads=4, num_key_value_heads=2, **SIZES)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return saved(Qwen3ForCausalLM(config), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Layers that see twelve tokens, which the CPU computes padded."""
    config = MistralConfig(num_attention_heads=4, num_key_value_heads=1, sliding_window=12, **SIZES)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return saved(MistralForCausalLM(config), tmp_path_factory.mktemp("windowed"))


def gradients(group, config, trajectories):
    """Numbers of a step, and the gradients of its first update, of which the first moment holds a tenth."""
    parts = group.build(config)
    numbers = parts.trainer.step(trajectories, temperature=0.9).metrics
    state = parts.trainer._optimizer.named_state()
    moments = {name: value for name, value in state.items() if name.endswith("/exp_avg")}
    packed = parts.trainer._policy.passes.layout.packed
    return {"numbers": numbers, "moments": moments, "weights": dict(parts.source.weights()), "packed": packed}


def assert_same(found, expected):
    for name, value in expected["numbers"].items():
        if not any(word in name for word in ("seconds", "per_s", "tokens_saved")):
            assert found["numbers"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert list(found["weights"]) == list(expected["weights"])
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-5, atol=1e-4)  # AdamW divides small numbers
    for name, value in expected["moments"].items():
        own = found["moments"][name]
        assert float((own.to_local() - part_of(value, own)).abs().max()) <= 1e-5 * float(value.abs().max()), name


def part_of(value, like):
    """Rank 0's part of a whole tensor."""
    return value[tuple(slice(size) for size in like.to_local().shape)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_two_ranks_that_share_rows_compute_what_one_computes(path, module_trajectories, name):
    trainer, algorithm = CASES[name]
    with group_of(1) as group:
        one = gradients(group, settings(path, processes=1, trainer=trainer, algorithm=algorithm), module_trajectories)
    many = settings(path, processes=2, trainer={**trainer, "context_parallel": 2}, algorithm=algorithm)
    with group_of(2) as group:
        two = gradients(group, many, module_trajectories)
    assert one["packed"] is two["packed"] is True
    assert_same(two, one)


@pytest.mark.slow
def test_padded_rows_with_a_window_and_two_teams(windowed, module_trajectories):
    trainer = {"tokens_per_micro_batch": 70, "gradient_checkpointing": True}
    with group_of(1) as group:
        one = gradients(group, settings(windowed, processes=1, trainer=trainer), module_trajectories)
    with group_of(4) as group:
        config = settings(windowed, processes=4, trainer={**trainer, "context_parallel": 2})
        four = gradients(group, config, module_trajectories)
        assert (group.ranks.dp_rank, group.ranks.dp_size, group.ranks.is_dp_leader) == (0, 2, True)
    assert one["packed"] is four["packed"] is False
    assert_same(four, one)


@pytest.mark.slow
def test_scores_that_are_capped(tmp_path, module_trajectories):
    """In layers with windows and without."""
    saved(tiny_model("gemma2", vocab_size=41), tmp_path)
    trainer = {"tokens_per_micro_batch": 70}
    with group_of(1) as group:
        one = gradients(group, settings(tmp_path, processes=1, trainer=trainer), module_trajectories)
    with group_of(2) as group:
        config = settings(tmp_path, processes=2, trainer={**trainer, "context_parallel": 2})
        two = gradients(group, config, module_trajectories)
    assert one["packed"] is two["packed"] is False
    assert_same(two, one)


@pytest.mark.slow
def test_adapters_in_shared_rows(path, module_trajectories):
    trainer = {"tokens_per_micro_batch": 70, "gradient_checkpointing": "selective"}
    lora = {"model": {"path": str(path), "device": "cpu", "lora": {"rank": 3}}}
    found = {}
    for count, extra in ((1, {}), (2, {"context_parallel": 2})):
        config = settings(path, processes=count, trainer={**trainer, **extra}).model_dump() | lora
        with group_of(count) as group:
            found[count] = gradients(group, Config.model_validate(config), module_trajectories)
    assert_same(found[2], found[1])


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "ranks", "copies"),
    [(8, 8, 4, 1), (8, 4, 2, 1), (8, 2, 4, 2), (8, 1, 8, 8), (6, 3, 2, 2), (12, 6, 4, 2), (4, 2, 1, 1)],
)
def test_key_value_heads_are_repeated_as_often_as_needed(heads, key_value_heads, ranks, copies):
    assert key_value_copies(heads, key_value_heads, ranks) == copies
    repeated, group = key_value_heads * copies, heads // key_value_heads
    assert repeated % ranks == 0
    own = torch.arange(key_value_heads).repeat_interleave(copies).chunk(ranks)
    wanted = torch.arange(heads).div(group, rounding_mode="floor").chunk(ranks)
    for held, looked_at in zip(own, wanted, strict=True):
        assert torch.equal(held.repeat_interleave(len(looked_at) // len(held)), looked_at)


def exchanged(ranks):
    ranks.arrange(context=2, tensor=1)
    context = ranks.context
    whole = torch.arange(2.0 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    own = whole[:, :, context.own(6)].clone().requires_grad_(True)
    heads = context.by_heads(own)
    assert torch.equal(heads, whole[:, 2 * context.rank : 2 * context.rank + 2])
    back = context.by_tokens(heads)
    (back * whole[:, :, context.own(6)]).sum().backward()
    columns = context.gather_columns(own[:, :, 0, 0] * 2, torch.tensor([1, 0, 0, 1, 1, 0, 1, 0]))
    mine = whole[:, 0, 0] if context.rank == 1 else whole[:, 0, 0, :0]
    assert torch.equal(context.gather_columns(mine, torch.ones(3, dtype=torch.long)), whole[:, 0, 0])
    return torch.equal(back, own), torch.equal(own.grad, own), columns.shape


def test_the_exchange_of_tokens_and_heads_is_invertible_with_gradients():
    assert in_ranks(2, exchanged) == (True, True, (2, 8))


def test_heads_that_cannot_be_shared_are_named():
    with pytest.raises(UsageError, match="got 6 heads, 4 ranks, expected a divisor of the number of heads"):
        key_value_copies(6, 3, 4)


def test_processes_that_make_no_teams_are_refused(path):
    with pytest.raises(ValueError, match=r"context_parallel \(2\) times trainer.tensor_parallel \(1\) must divide"):
        settings(path, processes=3, trainer={"context_parallel": 2})
    with group_of(1) as group, pytest.raises(ConfigError, match="expected a divisor of 1"):
        group.ranks.arrange(context=2, tensor=1)
