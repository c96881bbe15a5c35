"""Several adapters on the local engine: each request gets its own adapter's numbers, in any batch."""

import asyncio
import copy
from dataclasses import replace

import pytest
import torch
from support.models import tiny_model

from agentrl.config.engines import LocalEngineConfig
from agentrl.config.trainer import LoraConfig
from agentrl.errors import EngineError, UsageError
from agentrl.models.lora import adapted_layers, with_adapter
from agentrl.serving.local import LocalEngine

LORA = LoraConfig(rank=3, alpha=6)
NAMES = (None, "planner", "worker")


def with_values(base, seed):
    """An adapter that changes answers, and the same model with W + 2 B A written into its weights."""
    model = with_adapter(base, LORA, path="base", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    plain = copy.deepcopy(base)
    for name, layer in adapted_layers(model).items():
        up, down = layer.lora_B["default"].weight, layer.lora_A["default"].weight
        up.data.normal_(std=0.2, generator=generator)
        plain.get_submodule(name).weight.data += 2 * (up.data @ down.data)
    return model, plain


@pytest.fixture(params=["qwen3", "llama", "gemma3"])
def world(request):
    base = tiny_model(request.param).requires_grad_(False)
    found = {name: with_values(base, seed) for seed, name in enumerate(NAMES[1:])}
    plain = {None: base, **{name: merged for name, (_, merged) in found.items()}}
    return base, {name: model for name, (model, _) in found.items()}, plain


async def answers_of(engine, request_of, *, prefix="", **params):
    """Two turns of sessions of every adapter, all at once; their prompts begin alike."""

    async def session(number, adapter):
        ids, found = [*range(3, 60), *([number] * (number % 3))], []
        for turn in range(2):
            settings = {"max_tokens": 6, "seed": number, **params}
            request = request_of(ids, f"{prefix}{number}.{turn}", f"{prefix}{number}", **settings)
            answer = await engine.generate(replace(request, adapter=adapter))
            found.append((adapter, ids, answer))
            ids = [*ids, *answer.token_ids, 5, 6]
        return found

    played = await asyncio.gather(*(session(n, NAMES[n % 3]) for n in range(9)))
    return [turn for found in played for turn in found]


@pytest.mark.capability("local", "LoRA", "several adapters")
async def test_rows_of_several_adapters_equal_plain_computations(world, request_of, reference_of):
    base, adapters, plain = world
    engine = LocalEngine(base, LocalEngineConfig(max_num_seqs=7, prefill_tokens=40, max_context=256), adapters=adapters)
    told = {}
    for adapter, ids, answer in await answers_of(engine, request_of):
        expected = reference_of(plain[adapter])([*ids, *answer.token_ids], 1.0)[len(ids) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=2e-5)
        told.setdefault(adapter, []).append(answer.logprobs[0])
    assert len({round(logps[0], 3) for logps in told.values()}) == 3  # the same prompt, and three policies
    await engine.close()


async def test_drafts_of_several_adapters_are_checked_by_their_own(world, request_of, reference_of):
    base, adapters, plain = world
    engine = LocalEngine(base, LocalEngineConfig(max_context=256), adapters=adapters)
    for adapter, ids, answer in await answers_of(engine, request_of, temperature=0.2, max_tokens=40):
        expected = reference_of(plain[adapter])([*ids, *answer.token_ids], 0.2)[len(ids) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)
    assert engine.metrics().details["accepted_draft_tokens"] > 20
    await engine.close()


async def test_what_is_asked_beside_does_not_change_an_answer(request_of):
    base = tiny_model().requires_grad_(False)
    adapters = {name: with_values(base, seed)[0] for seed, name in enumerate(NAMES[1:])}
    whole = LocalEngine(base, LocalEngineConfig(max_context=256), adapters=adapters)
    played = await answers_of(whole, request_of)
    alone = LocalEngine(base, LocalEngineConfig(max_context=256, max_num_seqs=1), adapters=adapters)
    assert [(a, ids, answer.token_ids) for a, ids, answer in played] == [
        (a, ids, answer.token_ids) for a, ids, answer in await answers_of(alone, request_of)
    ]
    await whole.close()
    await alone.close()


async def test_one_session_asked_of_two_adapters_shares_no_cache(request_of, reference_of):
    base = tiny_model().requires_grad_(False)
    model, plain = with_values(base, 0)
    engine = LocalEngine(base, LocalEngineConfig(max_context=256), adapters={"planner": model})
    ids = list(range(3, 60))
    for number, (adapter, reference) in enumerate([(None, base), ("planner", plain), (None, base)]):
        asked = request_of(ids, f"r{number}", "one session", max_tokens=3, seed=1)
        answer = await engine.generate(replace(asked, adapter=adapter))
        expected = reference_of(reference)([*ids, *answer.token_ids], 1.0)[len(ids) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=2e-5)
    await engine.close()


async def test_weights_reach_the_adapter_that_they_name(request_of, reference_of):
    base = tiny_model().requires_grad_(False)
    (planner, _), (worker, plain) = with_values(base, 0), with_values(base, 1)
    served = {name: with_adapter(base, LORA, path="base", seed=9) for name in ("planner", "worker")}
    engine = LocalEngine(base, LocalEngineConfig(max_context=256), adapters=served)
    weights = {
        f"{name}/{key}": p.detach()
        for name, model in (("planner", planner), ("worker", worker))
        for key, p in model.named_parameters()
        if p.requires_grad
    }
    await engine.update_weights(weights, 1)
    answer = await engine.generate(replace(request_of([3, 4, 5], max_tokens=4, seed=0), adapter="worker"))
    assert answer.logprobs == pytest.approx(reference_of(plain)([3, 4, 5, *answer.token_ids], 1.0)[2:], abs=2e-5)
    with pytest.raises(EngineError, match="the engine does not have this adapter: got judge"):
        await engine.update_weights({"judge/x": torch.zeros(1)}, 2)
    await engine.close()


async def test_an_adapter_that_is_not_there_is_refused(request_of):
    engine = LocalEngine(tiny_model(), LocalEngineConfig(max_context=256))
    with pytest.raises(UsageError, match="names an adapter that the engine does not have: got judge, expected none"):
        await engine.generate(replace(request_of([3], max_tokens=1), adapter="judge"))
    await engine.close()
