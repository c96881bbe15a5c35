"""vLLM on the CPU: behaviour that the conformance kit does not cover."""

import asyncio

import pytest

from agentrl.config.engines import VLLMEngineConfig
from agentrl.engine import StopReason
from agentrl.errors import UsageError
from agentrl.serving.vllm import VLLMServer

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.fixture
def engine():
    return "vllm"


async def test_an_abort_that_overtakes_its_request_takes_effect(probe):
    requests = [probe.long_request() for _ in range(8)]
    tasks = [asyncio.ensure_future(probe.engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    assert all(await asyncio.gather(*(probe.engine.abort(request.request_id) for request in requests)))
    answers = await asyncio.gather(*tasks)
    assert {answer.stop_reason for answer in answers} == {StopReason.ABORT}
    assert all(len(answer.token_ids) < requests[0].params.max_tokens for answer in answers)


async def test_a_request_that_begins_in_a_pause_is_aborted_in_it(server, request_of):
    await server.pause()
    try:
        task = asyncio.ensure_future(server.generate(request_of([1, 2], "paused")))
        await asyncio.sleep(0)
        assert await server.abort("paused")
        answer = await task
    finally:
        await server.resume()
    assert (answer.token_ids, answer.stop_reason) == ([], StopReason.ABORT)


async def test_a_server_that_somebody_paused_says_so(server, client_of):
    await server.pause()
    late = client_of()
    try:
        with pytest.raises(UsageError, match="is paused"):
            await late.connect(deadline_s=60)
    finally:
        await server.resume()
        await late.close()


async def test_a_temperature_that_vllm_does_not_take_is_a_usage_error(server, request_of):
    with pytest.raises(UsageError, match="temperature must be in"):
        await server.generate(request_of([1, 2], "hot", temperature=3.0))


async def test_a_wrong_key_is_a_usage_error(url, monkeypatch):
    monkeypatch.setenv("WRONG_KEY", "wrong")
    for variable in ("WRONG_KEY", None):
        stranger = VLLMServer(url, VLLMEngineConfig(api_key_variable=variable), vocab_size=400)
        with pytest.raises(UsageError, match="refuses the key"):
            await stranger.connect(deadline_s=60)
        await stranger.close()
