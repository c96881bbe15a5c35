import asyncio
import itertools

import pytest
import torch
from support.models import FAMILIES, tiny_model

from agentrl.config.engines import LocalEngineConfig
from agentrl.engine import StopReason
from agentrl.errors import EngineError, UsageError
from agentrl.serving.local import LocalEngine


def _answers(played):
    return [[(answer.token_ids, answer.logprobs) for _, answer in session] for session in played]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
async def test_greedy_decoding_equals_generate_and_logprobs_a_full_forward(
    family, tied, request_of, reference_of, play_sessions
):
    model = tiny_model(family, tied=tied)
    engine = LocalEngine(model, LocalEngineConfig(max_num_seqs=2, prefill_tokens=20))
    stops = frozenset({0, 1, 2})
    played = await play_sessions(engine, request_of, sessions=3, turns=2, temperature=0.0, stop_token_ids=stops)
    await engine.close()
    for prompt, answer in (turn for session in played for turn in session):
        reference = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=max(3, len(answer.token_ids)),
            do_sample=False,
            eos_token_id=[0, 1, 2],
            pad_token_id=0,
        )
        assert answer.token_ids == reference[0, len(prompt) :].tolist()[: len(answer.token_ids)]
        expected = reference_of(model)([*prompt, *answer.token_ids], 1.0)[len(prompt) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_num_seqs": 2},
        {"prefill_tokens": 5},
        {"cache_tokens": 256, "max_context": 256},
        {"max_num_seqs": 3, "prefill_tokens": 11, "cache_tokens": 512, "max_context": 256},
    ],
)
async def test_seeded_tokens_do_not_depend_on_sizes(sizes, request_of, play_sessions):
    model = tiny_model()
    first = LocalEngine(model, LocalEngineConfig(max_context=256))
    second = LocalEngine(model, LocalEngineConfig(**{"max_context": 256, **sizes}))
    expected, played = [await play_sessions(engine, request_of, top_p=0.9) for engine in (first, second)]
    for a, b in zip(expected, played, strict=True):
        assert [answer.token_ids for _, answer in a] == [answer.token_ids for _, answer in b]
    await first.close()
    await second.close()


async def test_turns_of_a_session_find_their_cache_even_with_fewer_slots_than_sessions(request_of, play_sessions):
    engine = LocalEngine(tiny_model(), LocalEngineConfig(max_num_seqs=2))
    played = await play_sessions(engine, request_of)
    for session in played:
        for (earlier, answer), (prompt, later) in itertools.pairwise(session):
            assert later.cached_tokens == len(earlier) + len(answer.token_ids) - 1
            assert prompt[: len(earlier)] == earlier
    assert engine.metrics().details["evictions"] == 0
    assert engine.metrics().details["reserved_tokens"] == 0
    await engine.close()


async def test_a_small_cache_evicts_idle_sessions_and_preempts_the_youngest(request_of, reference_of):
    model = tiny_model(max_context=768)
    engine = LocalEngine(model, LocalEngineConfig(max_num_seqs=8, cache_tokens=1024))
    prompts = [[(3 + i + j) % 64 for j in range(220)] for i in range(4)]
    requests = [request_of(p, f"r{i}", max_tokens=120, seed=i) for i, p in enumerate(prompts)]
    answers = await asyncio.gather(*map(engine.generate, requests))
    idle = await engine.generate(request_of(prompts[0][:100], "after", max_tokens=5))
    details = engine.metrics().details
    assert details["preemptions"] > 0
    assert details["evictions"] > 0
    assert details["reserved_tokens"] <= 1024
    assert len(idle.token_ids) == 5
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference_of(model)([*prompt, *answer.token_ids], 1.0)[len(prompt) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=1e-5)
    await engine.close()


async def test_the_same_events_compute_the_same_bits(request_of, play_sessions):
    model = tiny_model()
    config = LocalEngineConfig(max_num_seqs=4, cache_tokens=2048)
    fresh = LocalEngine(model, config, version=7)
    used = LocalEngine(model, config)
    await play_sessions(used, request_of, sessions=9)
    await used.update_weights(None, 7)
    assert _answers(await play_sessions(fresh, request_of)) == _answers(await play_sessions(used, request_of))
    await fresh.close()
    await used.close()


async def test_the_trainers_module_is_shared_and_left_alone(request_of, play_sessions):
    model = tiny_model()
    model.train()
    engine = LocalEngine(model, LocalEngineConfig())
    (prompt, before), *_ = (await play_sessions(engine, request_of, sessions=1, turns=1, temperature=0.0))[0]
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert not any(tensor.is_inference() for tensor in [*model.parameters(), *model.buffers()])
    loss = model(torch.tensor([prompt])).logits.logsumexp(-1).mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=5.0).step()
    await engine.pause()
    await engine.update_weights(None, 1)
    await engine.resume()
    (_, after), *_ = (await play_sessions(engine, request_of, sessions=1, turns=1, temperature=0.0))[0]
    assert before.logprobs != after.logprobs
    assert set(after.versions) == {1}
    await engine.close()


async def test_an_error_in_the_model_fails_the_requests_and_later_ones_are_served(request_of, monkeypatch):
    engine = LocalEngine(tiny_model(), LocalEngineConfig(max_num_seqs=2))
    logits, calls = engine._runners[None].logits, []

    def failing(step):
        calls.append(step)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return logits(step)

    monkeypatch.setattr(engine._runners[None], "logits", failing)
    requests = [request_of([1, 2, i], f"r{i}", max_tokens=9) for i in range(5)]
    results = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
    assert [type(result) for result in results] == [EngineError] * 5
    assert "RuntimeError: out of memory" in str(results[0])
    assert len((await engine.generate(request_of([1, 2], max_tokens=4))).token_ids) == 4
    await engine.close()


async def test_weights_that_are_not_finite_are_an_engine_error(request_of):
    model = tiny_model()
    engine = LocalEngine(model, LocalEngineConfig())
    norm = model.model.layers[0].input_layernorm.weight.data
    kept = norm.clone()
    norm.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        await engine.generate(request_of([1, 2] * 20, "broken", max_tokens=3))
    norm.copy_(kept)
    await engine.update_weights(None, 1)
    assert len((await engine.generate(request_of([1, 2], max_tokens=3))).token_ids) == 3
    await engine.close()


def _without(weights, name):
    return {key: value for key, value in weights.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights | {"model.extra": torch.zeros(1)}, "no such weights: got model.extra"),
        (lambda weights: _without(weights, "model.norm.weight"), "no model.norm.weight"),
        (lambda weights: weights | {"model.norm.weight": torch.zeros(3)}, "wrong shape: got \\(3,\\)"),
    ],
)
async def test_weights_that_do_not_fit_stop_the_engine(change, message, request_of):
    model = tiny_model()
    engine = LocalEngine(model, LocalEngineConfig())
    weights = {name: parameter.detach() + 1 for name, parameter in model.named_parameters()}
    before = model.model.norm.weight.detach().clone()
    running = asyncio.ensure_future(engine.generate(request_of([1], "running", max_tokens=200)))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match=message):
        await engine.update_weights(change(weights), 1)
    assert torch.equal(model.model.norm.weight, before)
    with pytest.raises(EngineError, match=message):
        await running
    with pytest.raises(EngineError, match="has stopped"):
        await engine.generate(request_of([1], max_tokens=3))
    await engine.close()


async def test_versions_must_grow():
    engine = LocalEngine(tiny_model(), LocalEngineConfig(), version=3)
    with pytest.raises(EngineError, match="got 3, expected more than 3"):
        await engine.update_weights(None, 3)


async def test_a_request_that_is_given_up_during_a_pause_leaves_nothing(request_of):
    engine = LocalEngine(tiny_model(), LocalEngineConfig())
    await engine.pause()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.generate(request_of([1], max_tokens=3)), 0.01)
    assert engine.metrics().waiting == 0
    await engine.close()


def test_a_cache_that_cannot_hold_one_sequence_is_a_usage_error():
    with pytest.raises(UsageError, match=r"cache_tokens cannot hold one sequence: got 256.*512"):
        LocalEngine(tiny_model(max_context=512), LocalEngineConfig(cache_tokens=256))


def test_a_model_whose_attention_does_not_fit_is_a_usage_error():
    model = tiny_model()
    model._supports_attention_backend = False
    with pytest.raises(UsageError, match="cannot be replaced"):
        LocalEngine(model, LocalEngineConfig())


async def test_metrics_count_tokens_and_time(request_of, play_sessions):
    engine = LocalEngine(tiny_model(), LocalEngineConfig())
    played = await play_sessions(engine, request_of, sessions=3, turns=2)
    metrics = engine.metrics()
    turns = [turn for session in played for turn in session]
    assert metrics.prompt_tokens == sum(len(prompt) for prompt, _ in turns)
    assert metrics.cached_tokens == sum(answer.cached_tokens for _, answer in turns)
    assert metrics.sampled_tokens == sum(len(answer.token_ids) for _, answer in turns)
    assert metrics.busy_s > 0
    for _, answer in turns:
        assert min(answer.queue_s, answer.prefill_s, answer.decode_s) >= 0
    await engine.close()


async def test_requests_that_follow_one_another_closely_meet_in_one_step(request_of):
    engine = LocalEngine(tiny_model(), LocalEngineConfig(max_num_seqs=4))

    async def ask(number):
        for _ in range(number * 6):
            await asyncio.sleep(0)
        return await engine.generate(request_of([5, 6], str(number), max_tokens=1))

    await asyncio.gather(*map(ask, range(4)))
    assert engine.metrics().details["steps"] == 1
    await engine.close()


class Worker:
    """Callers that are at work until they are told to stop."""

    def __init__(self):
        self.changes = 0
        self._done = asyncio.Event()

    async def wait_for_episodes(self):
        await self._done.wait()

    def end(self):
        self.changes += 1
        self._done.set()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_in_lockstep_neither_the_time_nor_the_order_of_requests_matters(request_of, order):
    model, prompts = tiny_model(), [[5], [7, 8, 9], [4] * 40]

    async def serve(order, delay):
        engine, worker = LocalEngine(model, LocalEngineConfig(max_num_seqs=2)), Worker()
        engine.lockstep = worker
        answers = {}
        for number in order:
            request = request_of(prompts[number], str(number), max_tokens=6, seed=number)
            answers[number] = asyncio.create_task(engine.generate(request))
            for _ in range(delay):
                await asyncio.sleep(0)
        assert engine.metrics().details["steps"] == 0
        worker.end()
        found = [await answers[number] for number in range(3)]
        await engine.close()
        return [(answer.token_ids, answer.logprobs) for answer in found]

    assert await serve(order, delay=30) == await serve((0, 1, 2), delay=0)


@pytest.mark.parametrize("stop", ["45", "12345678"])
@pytest.mark.capability("local", "stop strings")
async def test_a_stop_text_ends_an_answer_with_the_token_that_completes_it(stop, request_of):
    """The text of a token is its last digit here, so that the stop text goes over several tokens."""

    def decode(ids):
        return "".join(str(i % 10) for i in ids)

    engine = LocalEngine(tiny_model(), LocalEngineConfig(), decode=decode)
    blind = LocalEngine(tiny_model(), LocalEngineConfig())
    prompt = [4, 5, 4, 5]  # a stop text in the prompt is none
    ended = 0
    played = [
        await asyncio.gather(
            *(one.generate(request_of(prompt, name=f"r{seed}", seed=seed, stop=(stop,))) for seed in range(20, 40))
        )
        for one in (engine, blind)
    ]
    for answer, whole in zip(*played, strict=True):
        text = decode(whole.token_ids)
        end = text.find(stop) + len(stop) if stop in text else len(text)
        assert answer.token_ids == whole.token_ids[:end]
        assert answer.stop_reason is (StopReason.STOP if stop in text else StopReason.LENGTH)
        ended += stop in text
    assert bool(ended) is (stop == "45")
    await engine.close()
    await blind.close()


async def test_a_prompt_computed_in_part_with_broken_weights_leaves_nothing(request_of, reference_of):
    model = tiny_model()
    engine = LocalEngine(model, LocalEngineConfig(prefill_tokens=8))
    norm = model.model.layers[0].input_layernorm.weight.data
    kept = norm.clone()
    norm.fill_(float("nan"))
    broken = asyncio.create_task(engine.generate(request_of([1, 2] * 100, "broken", max_tokens=3)))
    for _ in range(300):  # about 20 steps
        await asyncio.sleep(0)
    await engine.abort("broken")
    await asyncio.wait([broken])
    norm.copy_(kept)
    await engine.update_weights(None, 1)
    prompts = [[3, 4] * 50, [5, 6] * 100]
    answers = await asyncio.gather(
        *(engine.generate(request_of(p, str(n), max_tokens=30)) for n, p in enumerate(prompts))
    )
    await engine.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference_of(model)([*prompt, *answer.token_ids], 1.0)[len(prompt) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=1e-5)
