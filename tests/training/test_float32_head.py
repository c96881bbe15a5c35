"""Logits in float32 of a model in bfloat16: in the trainer, on the local engine, in the files that servers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import tiny_model

from agentrl.config.engines import LocalEngineConfig
from agentrl.engine import GenerateRequest, SamplingParams
from agentrl.models.load import load_model
from agentrl.models.matrix_products import FLOAT32_HEAD, float32_linear
from agentrl.serving.local import LocalEngine
from agentrl.training.forward.logprobs import score
from agentrl.training.forward.sequences import scored_sequence

VOCABULARY = 9000
"""More than one block of a weight."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_model("llama", vocab_size=VOCABULARY, initializer_range=1.0)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def with_float32_head(folder: Path) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **FLOAT32_HEAD}))
    return folder


def expected(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of all but the first id, from the model's own hidden states, with exact logits."""
    hidden = model.model(input_ids=ids[None, :-1], use_cache=False).last_hidden_state[0]
    logits = hidden.double() @ model.lm_head.weight.double().T
    return logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1).float()


def scores(model: Any, ids: torch.Tensor) -> torch.Tensor:
    wanted = torch.ones(len(ids), dtype=torch.bool)
    wanted[0] = False
    return score(model, [scored_sequence(ids.numpy(), wanted.numpy())], temperature=1.0).logp


@torch.no_grad()
def test_the_trainer_computes_exact_logits(folder: Path) -> None:
    ids = torch.tensor([3, 8999, 17, 8200, 5, 40])
    rounded = load_model(folder, dtype="bfloat16", device="cpu")
    exact = load_model(with_float32_head(folder), dtype="bfloat16", device="cpu")
    target = expected(exact, ids)
    assert (scores(exact, ids) - target).abs().max() < 1e-4
    assert (scores(rounded, ids) - target).abs().max() > 1e-2


def test_gradients_are_those_of_the_rounded_head(folder: Path) -> None:
    ids = torch.tensor([3, 8999, 17, 8200, 5, 40])
    found = []
    for path in (folder, with_float32_head(folder)):
        model = load_model(path, dtype="bfloat16", device="cpu")
        scores(model, ids).sum().backward()
        found.append(model.lm_head.weight.grad.float())
    assert torch.nn.functional.cosine_similarity(*(grad.flatten() for grad in found), dim=0) > 0.999


@pytest.mark.parametrize("packed", [True, False])
async def test_the_local_engine_samples_with_exact_logits(
    folder: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.serving.local.runner.can_pack", lambda model, *, copies: packed)
    model = load_model(with_float32_head(folder), dtype="bfloat16", device="cpu")
    engine = LocalEngine(model, LocalEngineConfig(max_context=64, cache_tokens=256))
    params = SamplingParams(max_tokens=1, seed=3)
    answer = await engine.generate(GenerateRequest(request_id="a", session_id="a", prompt_ids=[3, 8999], params=params))
    await engine.close()
    with torch.no_grad():
        target = expected(model, torch.tensor([3, 8999, *answer.token_ids]))[-1]
    assert abs(answer.logprobs[0] - float(target)) < (0.2 if packed else 1e-3)  # other layers round, too
    logits = torch.tensor(answer.logprobs)
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_has_its_bias(dtype: torch.dtype) -> None:
    rows, weight, bias = torch.randn(3, 8).to(dtype), torch.randn(VOCABULARY, 8).to(dtype), torch.randn(VOCABULARY)
    target = rows.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(float32_linear(rows, weight, bias).double(), target, atol=1e-4, rtol=1e-4)
