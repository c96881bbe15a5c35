"""SGLang on the CPU: behaviour that the conformance kit does not cover."""

import asyncio
import json

import pytest
from support.tokenizers import build_tokenizer

from agentrl.engine import StopReason
from agentrl.errors import EngineError, UsageError
from agentrl.serving.http import HttpSession
from agentrl.testing.engine_check import sessions

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

START_S = 540
END_TOKEN = build_tokenizer("qwen3").eos_token_id


@pytest.fixture
def engine():
    return "sglang"


async def test_sessions_continue_exactly_on_an_empty_cache(probe):
    remark = await sessions(probe)
    cached = json.loads(remark.partition(": ")[2])
    assert cached[:1] + cached[2:3] == [0, 0]
    assert cached[1] >= 45  # the first turn's prompt and all but the last token of its answer


async def test_what_it_can_do(server, model):
    assert server.capabilities.max_context == model.config.max_position_embeddings
    assert server.capabilities.vocab_size == model.config.vocab_size
    assert await server.is_healthy(deadline_s=10)


async def test_another_vocabulary_is_refused(client_of, model):
    client = client_of(vocab_size=model.config.vocab_size + 1)
    try:
        with pytest.raises(UsageError, match="another vocabulary"):
            await client.connect(deadline_s=START_S)
    finally:
        await client.close()


async def test_one_candidate_has_the_log_probabilities_of_its_temperature(probe):
    prompt = [3, 1, 4, 1, 5]
    answer = await probe.generate(prompt, max_tokens=6, temperature=0.5, top_k=1)
    best = await probe.generate(prompt, max_tokens=6, temperature=0.0)
    assert answer.token_ids == best.token_ids
    probe.check_logprobs(prompt, answer, 0.5)


async def test_an_answer_goes_past_end_tokens_that_are_not_its_own(probe):
    prompt, stops = [9, 8, 7], frozenset({0})
    answers = await asyncio.gather(
        *(probe.generate(prompt, max_tokens=150, temperature=3.0, stop_token_ids=stops) for _ in range(40))
    )
    for answer in answers:
        is_stopped = answer.stop_reason is StopReason.STOP
        assert is_stopped == (answer.token_ids[-1] in stops)
        assert is_stopped or len(answer.token_ids) == 150
    ends = [answer for answer in answers if END_TOKEN in answer.token_ids[:-1]]
    assert ends, "no answer sampled the tokenizer's end token: ask for more"
    probe.check_logprobs(prompt, ends[0], 3.0)


async def test_requests_that_meet_a_pause_can_be_aborted(probe):
    engine, request = probe.engine, probe.long_request()
    running = await probe.submit(request)
    await engine.pause()
    assert await engine.server.is_healthy(deadline_s=10)
    load = await engine.server.load()
    assert (load.running, load.waiting) == (0, 1)
    late = probe.request([1], max_tokens=3)
    waiting = asyncio.create_task(engine.generate(late))
    await asyncio.sleep(0)
    assert await engine.abort(late.request_id)
    assert (await waiting).token_ids == []
    assert await engine.abort(request.request_id)
    assert (await running).stop_reason is StopReason.ABORT
    await engine.resume()
    assert len((await probe.generate([1], max_tokens=3)).token_ids) == 3


async def test_an_update_that_meets_running_requests_forgets_the_old_cache(probe):
    """The server is paused in place: it exchanges the weights and refuses to throw away the cache in use."""
    server, version, request = probe.engine.server, probe.engine.version + 1, probe.long_request()
    running = await probe.submit(request)
    other = HttpSession(server.url, api_key_variable="AGENTRL_TEST_KEY")
    await other.post("/pause_generation", {"mode": "in_place"}, deadline_s=60)
    await other.close()
    await server.load_weights(probe.new_weights()["folder"], version)
    assert await server.weight_version() == version
    await server.resume()
    answer = await running
    first = answer.versions.index(version)
    assert set(answer.versions[first:]) == {version}
    probe.check_logprobs(request.prompt_ids, answer, 1.0, first)


async def test_weights_that_are_not_there_are_refused(server, tmp_path):
    before = await server.weight_version()
    await server.pause()
    with pytest.raises(EngineError, match="rejected the weights"):
        await server.load_weights(tmp_path / "nothing", before + 1)
    await server.resume()
    assert await server.weight_version() == before


async def test_the_load_counts_tokens_and_cache_hits(probe):
    server = probe.engine.server
    before = await server.load()
    prompt = [11, 12, 13, 14, 15, 16, 17, 18]
    await probe.generate(prompt, max_tokens=4)
    second = await probe.generate(prompt, max_tokens=4)
    after = await server.load()
    assert second.cached_tokens == 7
    assert after.prompt_tokens - before.prompt_tokens == 16
    assert after.cached_tokens - before.cached_tokens == 7
    assert after.sampled_tokens - before.sampled_tokens == 8
    assert (after.running, after.waiting) == (0, 0)
