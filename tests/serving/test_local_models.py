"""Models that the local engine would compute otherwise than they do are refused when it is made."""

import asyncio
import re

import pytest
import torch
import transformers
from support.models import FAMILIES, tiny_model

from agentrl.config.engines import LocalEngineConfig
from agentrl.errors import UsageError
from agentrl.serving.local import LocalEngine
from agentrl.serving.local.runner import TOLERANCE, Trial

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2}
SIZES |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
LINEAR = ["linear_attention", "full_attention"]
OTHERS = [
    ("Bert", "BertLMHeadModel", {}, "differ by"),
    ("DiffLlama", "DiffLlamaForCausalLM", {}, "differ by"),
    ("Phimoe", "PhimoeForCausalLM", {**EXPERTS, "sliding_window": 300}, "differ by"),
    ("GptOss", "GptOssForCausalLM", EXPERTS, "s_aux"),
    ("Nemotron", "NemotronForCausalLM", {}, "step"),
    ("Lfm2", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, "layers of conv"),
    ("MiniMax", "MiniMaxForCausalLM", {**EXPERTS, "layer_types": LINEAR}, "layers of linear_attention"),
    ("Llama4Text", "Llama4ForCausalLM", {**EXPERTS, "intermediate_size_mlp": 64}, "layers of chunked_attention"),
]
"""Models whose tokens depend on the whole row, on later tokens, on attention of their own, on a mask, or on chunks."""


def build(config, model, **settings):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, model)(getattr(transformers, f"{config}Config")(**SIZES | settings)).eval()


@pytest.mark.parametrize(("config", "model", "settings", "reason"), OTHERS, ids=[name for name, *_ in OTHERS])
def test_models_that_compute_otherwise_are_refused(config, model, settings, reason):
    with pytest.raises(UsageError, match=rf"local engine does not support {model}: got .*{reason}.*engine=vllm"):
        LocalEngine(build(config, model, **settings), LocalEngineConfig())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trial_finds_no_fault_in_known_families(family, dtype, monkeypatch):
    monkeypatch.setattr("agentrl.serving.local.runner.can_pack", lambda *_, **__: False)
    monkeypatch.setitem(TOLERANCE, torch.float32, 1e-5)
    tried = []
    check = Trial.check
    monkeypatch.setattr(Trial, "check", lambda self, compute: tried.append(check(self, compute)))
    model = tiny_model(family).to(dtype)
    windows = [getattr(module, "sliding_window", None) for module in [model.config, *model.modules()]]
    LocalEngine(model, LocalEngineConfig())
    assert tried
    assert windows == [getattr(module, "sliding_window", None) for module in [model.config, *model.modules()]]


ROPES = {
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0], "factor": 8.0},
    "dynamic": {"factor": 8.0},
}


@pytest.mark.parametrize("by_layer", [False, True], ids=["", "by layer"])
@pytest.mark.parametrize("rope", ROPES)
async def test_rotary_positions_that_change_with_the_longest_sequence_limit_the_context(
    rope, by_layer, request_of, reference_of
):
    own = {"rope_type": rope, "rope_theta": 1e4, **ROPES[rope]}
    own |= {"original_max_position_embeddings": 64} if rope == "longrope" else {}
    limit = 512 if rope == "dynamic" else 64
    model = build("Llama", "LlamaForCausalLM", rope_parameters=own)
    engine = LocalEngine(model, LocalEngineConfig(max_context=limit))
    prompts = [list(range(n)) for n in (20, 50)]
    answers = await asyncio.gather(
        *(engine.generate(request_of(p, str(n), max_tokens=20, seed=n)) for n, p in enumerate(prompts))
    )
    await engine.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference_of(model)([*prompt, *answer.token_ids], 1.0)[len(prompt) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=1e-5)
    if by_layer:
        model.config.rope_parameters = {"full_attention": own, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(
        UsageError, match=re.escape(f"rope_type {rope}, expected engine.max_context of at most {limit}")
    ):
        LocalEngine(model, LocalEngineConfig(max_context=limit + 1))
