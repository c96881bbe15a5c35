"""Model families: trainer, local engine and transformers' own forward pass agree on log-probabilities."""

import pytest
import torch
from support.models import FAMILIES, tiny_model

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.config.engines import LocalEngineConfig
from agentrl.engine import GenerateRequest, SamplingParams
from agentrl.models.load import load_model
from agentrl.serving.local import LocalEngine
from agentrl.training.forward.layout import PADDED, Layout, choose_layout
from agentrl.training.forward.logprobs import score
from agentrl.training.forward.sequences import ScoredSequence
from agentrl.training.trainer import Trainer

SHARED = TrainerConfig(share_prefixes=True, learning_rate=1e-3)


def group(count=3, prompt=18, answer=9):
    """Sequences longer than the windows of those families that have one, with a prompt in common."""
    generator = torch.Generator().manual_seed(2)
    first = torch.randint(3, 60, (prompt,), generator=generator)
    answers = torch.randint(3, 60, (count, answer), generator=generator)
    return [torch.cat([first, own[: answer - 2 * number]]) for number, own in enumerate(answers)]


def scored(ids):
    return ScoredSequence(input_ids=ids[:-1], positions=torch.arange(len(ids) - 1), targets=ids[1:])


def by_transformers(model, ids):
    """With attention computed score by score, and logits as the model itself makes them: [ids - 1]."""
    model.config._attn_implementation = "eager"
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_layout_computes_what_transformers_computes(family):
    model, sequences = tiny_model(family), group()
    expected = torch.cat([by_transformers(tiny_model(family), ids) for ids in sequences])
    assert choose_layout(model, SHARED).share
    for layout in (PADDED, Layout(packed=True), Layout(packed=True, share=2)):
        found = score(model, [scored(ids) for ids in sequences], temperature=1.0, layout=layout).logp
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_local_engine_samples_with_the_log_probabilities_of_the_trainer(family):
    model = tiny_model(family)
    engine = LocalEngine(model, LocalEngineConfig(max_context=64, cache_tokens=256))
    prompt = group(1)[0].tolist()
    request = GenerateRequest(
        request_id="a", session_id="a", prompt_ids=prompt, params=SamplingParams(max_tokens=12, seed=3)
    )
    answer = await engine.generate(request)
    await engine.close()
    ids = torch.tensor([*prompt, *answer.token_ids])
    with torch.no_grad():
        expected = by_transformers(model, ids)[len(prompt) - 1 :]
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_trains_every_parameter_that_it_reaches(family, trajectories):
    model = tiny_model(family)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Trainer(model, AlgorithmConfig(), SHARED, seed=0, max_tokens=100)
    report = trainer.step(trajectories, temperature=1.0)
    assert 0 < report.metrics["train/grad_norm"] < float("inf")
    same = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert same == []


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3", "qwen3_moe"])
@torch.no_grad()
def test_a_model_from_files_computes_the_same(family, tmp_path):
    model, ids = tiny_model(family), group(1)[0]
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="float32", device="cpu")
    found = score(loaded, [scored(ids)], temperature=1.0).logp
    torch.testing.assert_close(found, by_transformers(model, ids), atol=2e-5, rtol=1e-5)
