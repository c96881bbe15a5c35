"""Padded, packed and shared layouts compute the same, and models that cannot be packed are told apart."""

from dataclasses import replace

import pytest
import torch
from support.models import FAMILIES, tiny_model
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, PhimoeConfig, PhimoeForCausalLM

from agentrl.config.config import TrainerConfig
from agentrl.errors import UsageError
from agentrl.training.compile import checkpoint_activations
from agentrl.training.forward.layout import (
    MIN_SHARED_TOKENS,
    PADDED,
    Layout,
    choose_layout,
)
from agentrl.training.forward.logprobs import score
from agentrl.training.forward.micro_batches import make_micro_batches
from agentrl.training.forward.runner import ModelRunner, RunnerSettings
from agentrl.training.forward.sequences import ScoredSequence, pack
from agentrl.training.forward.tree_attention import ATTENTION, AttentionTree

SHARED = TrainerConfig(share_prefixes=True)
LAYOUTS = {"packed": Layout(packed=True), "shared": Layout(packed=True, share=2)}


def forest(longest=24):
    """Three trajectories of a group, a branch of one of them, one that ends within another, and a stranger."""
    generator = torch.Generator().manual_seed(1)

    def ids(count):
        return torch.randint(3, 60, (count,), generator=generator)

    prompt = ids(longest // 2)
    members = [torch.cat([prompt, ids(count)]) for count in (longest // 2, 3, 7)]
    branch = torch.cat([members[0][: longest // 2 + 4], ids(5)])
    return [scored(own) for own in (*members, branch, members[0][: longest // 2 + 6], ids(9), members[0])]


def scored(ids):
    positions = torch.arange(1, len(ids) - 1, 2)
    return ScoredSequence(input_ids=ids[:-1], positions=positions, targets=ids[positions + 1])


def gradients(model, sequences, layout, batches=1, checkpointing=False):
    """Log-probabilities, and the gradients of a loss that treats every token of every sequence differently."""
    parts = [sequences[start::batches] for start in range(batches)]
    found, model.config._attn_implementation = [], ATTENTION
    with checkpoint_activations(model, enabled=checkpointing):
        for part in parts:
            scores = score(model, part, temperature=1.0, layout=layout, entropy_gradient=True)
            owners = torch.cat([torch.full((len(s.targets),), float(len(s))) for s in part])
            ((scores.logp * owners.cos()).exp() + 0.3 * scores.entropy).sum().backward()
            found += torch.split(scores.logp.detach(), [len(s.targets) for s in part])
    order = [i for start in range(batches) for i in range(start, len(sequences), batches)]
    by_parameter = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return [found[order.index(i)] for i in range(len(sequences))], by_parameter


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_padded_sequences(family, layout):
    model, sequences = tiny_model(family), forest()
    expected_logp, expected = gradients(model, sequences, PADDED)
    for batches, checkpointing in ((1, False), (1, True), (1, "selective"), (5, "offload"), (5, False)):
        logp, found = gradients(model, sequences, layout, batches, checkpointing)
        torch.testing.assert_close(logp, expected_logp, atol=2e-5, rtol=1e-5)
        for name, gradient in expected.items():
            assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-5, name


def test_what_is_shared_is_computed_once():
    sequences, shared = forest(), LAYOUTS["shared"]
    assert shared.tokens(sequences) < LAYOUTS["packed"].tokens(sequences) == sum(map(len, sequences))
    assert PADDED.tokens(sequences) == max(map(len, sequences)) * len(sequences)


def tokens_of_rows(sequences, layout, workers):
    return [
        row.tokens
        for row in make_micro_batches(range(len(sequences)), sequences, layout=layout, workers=workers, needs_grad=True)
    ]


@pytest.mark.parametrize("workers", [2, 3])
def test_a_row_is_divided_where_there_are_lanes(workers):
    sequences, layout = forest(), LAYOUTS["packed"]
    assert len(tokens_of_rows(sequences, layout, workers=1)) == 1
    found = tokens_of_rows(sequences, layout, workers)
    assert len(found) >= workers
    assert max(found) <= layout.tokens(sequences) / workers + 1


def test_a_long_prefix_is_repeated_once_per_lane_and_not_once_per_sequence():
    prompt = torch.arange(100) % 40 + 3
    sequences = [scored(torch.cat([prompt, torch.arange(first, first + 10)])) for first in range(3, 11)]
    assert tokens_of_rows(sequences, LAYOUTS["shared"], workers=1) == [100 + 8 * 9]
    assert tokens_of_rows(sequences, LAYOUTS["shared"], workers=2) == [100 + 4 * 9, 100 + 4 * 9]


@pytest.mark.parametrize("window", [None, 5])
def test_the_same_attention_by_nodes_and_by_masks(window):
    tree = AttentionTree(pack(forest(), share=2), torch.device("cpu"))
    tokens = len(tree.mask(None))
    query, key, value = (torch.randn(1, heads, tokens, 8, requires_grad=True) for heads in (4, 2, 2))
    attended = tree.attend(query, key, value, 0.3, window)
    scores = query.detach() @ key.detach().repeat_interleave(2, 1).mT * 0.3
    expected = scores.masked_fill(~tree.mask(window), -torch.inf).softmax(-1) @ value.detach().repeat_interleave(2, 1)
    torch.testing.assert_close(attended.detach(), expected)
    blocks = tree.block_mask(window)
    index = torch.arange(tokens)
    assert torch.equal(blocks.mask_mod(0, 0, index[:, None], index), tree.mask(window))


def test_many_nested_branches_round_hardly_more_than_one_pass():
    generator = torch.Generator().manual_seed(0)
    trunk = torch.randint(3, 60, (320,), generator=generator)
    own = torch.randint(3, 60, (40, 4), generator=generator)
    row = pack([scored(torch.cat([trunk[: 8 * k], own[k - 1]])) for k in range(1, 41)], share=1)
    tree = AttentionTree(row, torch.device("cpu"))
    tokens = len(row.depths)
    query, key, value = (torch.randn(1, 4, tokens, 16, generator=generator).bfloat16() for _ in range(3))
    mask = tree.mask(None)
    exact = scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask=mask, scale=0.3)
    once = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    attended = tree.attend(query, key, value, 0.3, None)
    assert attended.dtype is torch.bfloat16
    assert (attended - exact).abs().mean() < 1.5 * (once - exact).abs().mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_known_families_are_packed(family):
    model = tiny_model(family)
    windows = family in ("gemma2", "gemma3", "mistral")  # a dense mask would cost more than padding
    assert choose_layout(model, TrainerConfig(tokens_per_micro_batch=99)) == Layout(budget=99, packed=not windows)
    assert choose_layout(model, SHARED).share == MIN_SHARED_TOKENS
    assert model.config._attn_implementation == ATTENTION


def state_space():
    config = MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4, intermediate_size=32)
    return MambaForCausalLM(config).eval()


def growing_rope():
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    return model


def linear_layer():
    model = tiny_model()
    model.config.layer_types = ["full_attention", "linear_attention"]
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (state_space, "attention cannot be replaced"),
        (growing_rope, "type dynamic"),
        (linear_layer, "linear_attention"),
    ],
)
def test_others_are_padded_and_refuse_to_share(build, reason):
    model = build()
    before = model.config._attn_implementation
    assert replace(choose_layout(model, TrainerConfig()), longest_together=None) == PADDED
    assert model.config._attn_implementation == before
    with pytest.raises(UsageError, match=f"cannot share prefixes.*{reason}.*share_prefixes=false"):
        choose_layout(model, SHARED)


def test_a_window_that_only_a_mask_knows_is_found_out():
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "sliding_window": 100,
    }
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "initializer_range": 0.2,
        "num_hidden_layers": 1,
    }
    config = PhimoeConfig(**sizes, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")))
    torch.manual_seed(0)
    model = PhimoeForCausalLM(config).eval()
    assert choose_layout(model, TrainerConfig()) == PADDED
    assert model.config.sliding_window == 100
    with pytest.raises(UsageError, match=r"cannot share prefixes.*hidden states of a packed row differ"):
        choose_layout(model, SHARED)


def test_long_sequences_do_not_change_the_rotary_positions_of_others():
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}
    longrope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    model = LlamaForCausalLM(LlamaConfig(**tiny_model("llama").config.to_dict() | {"rope_parameters": longrope})).eval()
    layout = choose_layout(model, TrainerConfig())
    sequences = [scored(torch.arange(n) % 60) for n in (42, 31, 62, 40, 50)]
    found = ModelRunner(model, RunnerSettings(layout=layout)).logprobs(sequences, temperature=1.0).logp
    assert layout.micro_batches(sequences) == [[0], [2], [4], [3, 1]]
    alone = [ModelRunner(model, RunnerSettings()).logprobs([own], temperature=1.0).logp for own in sequences]
    torch.testing.assert_close(found, torch.cat(alone), atol=1e-5, rtol=0)


def test_a_model_that_packs_wrongly_is_found_out(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(AttentionTree, "mask", lambda *_: None)
    monkeypatch.setattr("agentrl.training.forward.tree_attention.attention_blocks", lambda nodes: ())
    assert choose_layout(model, TrainerConfig()) == PADDED
    assert model.config._attn_implementation == "sdpa"
