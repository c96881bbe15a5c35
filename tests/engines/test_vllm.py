"""vLLM itself, on the CPU: the conformance kit, and what the kit does not ask."""

import asyncio
import copy
import os
import signal

import pytest

from agentrl.config.schema import VLLMEngineConfig
from agentrl.errors import UsageError
from agentrl.policy import StopReason
from agentrl.server import ServerLost
from agentrl.serving.vllm import VLLMServer, launch_command
from agentrl.testing import check_engine
from agentrl.testing.engine_check import Verdict

TOLERANCE = 1e-4
"""Between log-probabilities of vLLM and of transformers, both float32."""
KEY = "VLLM_TEST_KEY"
pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def trained(model):
    """The trainer's copy of the model that is served; tests change it along with the server's."""
    return copy.deepcopy(model)


@pytest.fixture(scope="module")
def url(vllm_python, model_folder, started_server, tmp_path_factory):
    config = VLLMEngineConfig(max_running=64)
    log = tmp_path_factory.mktemp("logs") / "vllm.log"

    def command(port):
        return launch_command(
            config, python=str(vllm_python), model=model_folder, port=port, dtype="float32", api_key="secret"
        )

    with started_server(command, log) as address:
        yield address


@pytest.fixture
def client_of(url, trained, monkeypatch):
    """Make a client that has the server's key."""
    monkeypatch.setenv(KEY, "secret")
    config = VLLMEngineConfig(api_key_variable=KEY)
    return lambda: VLLMServer(url, config, vocab_size=trained.config.vocab_size)


@pytest.fixture
async def server(client_of):
    client = client_of()
    await client.connect(deadline_s=60)
    yield client
    await client.close()


async def _sampled_more(server, count):
    """Wait until the server has sampled some tokens more."""
    start = (await server.load()).sampled_tokens
    while (await server.load()).sampled_tokens < start + count:
        pass


def _worst(reference, request, answer, first=0):
    """Largest difference from the reference, from a token of the answer on."""
    ids = [*request.prompt_ids, *answer.token_ids]
    expected = reference(ids, request.params.temperature)[len(request.prompt_ids) - 1 :]
    return max(abs(a - b) for a, b in zip(answer.logprobs[first:], expected[first:], strict=True))


async def test_the_server_conforms(client_of, trained, engine_of, reference_of, shaken_folders, tmp_path):
    report = await check_engine(
        lambda: engine_of(client_of()),
        reference=reference_of(trained),
        new_weights=shaken_folders(trained, tmp_path),
        tolerance=TOLERANCE,
        settle_s=0.5,
    )
    print(report)
    report.raise_on_failure()
    assert [row.check for row in report.rows if row.verdict is Verdict.SKIPPED] == ["seeds"]


async def test_twenty_updates_with_requests_in_flight_are_exact(
    server, trained, reference_of, shaken_folders, request_of, tmp_path
):
    shake, reference = shaken_folders(trained, tmp_path, 0.005), reference_of(trained)
    first = await server.weight_version()
    for version in range(first + 1, first + 21):
        request = request_of([5, 6, 7], f"update-{version}", max_tokens=900)
        task = asyncio.ensure_future(server.generate(request))
        await _sampled_more(server, 20)
        await server.pause()
        await server.load_weights(shake()["folder"], version)
        await server.resume()
        await _sampled_more(server, 20)
        assert await server.abort(request.request_id)
        answer = await task
        old = answer.versions.count(version - 1)
        assert answer.versions == [version - 1] * old + [version] * (len(answer.versions) - old)
        assert 0 < old < len(answer.versions)
        assert _worst(reference, request, answer, old) < TOLERANCE


async def test_an_update_empties_the_prefix_cache(server, trained, reference_of, shaken_folders, request_of, tmp_path):
    prompt = [(7 * i) % 400 for i in range(300)]
    await server.generate(request_of(prompt, "cache-0", max_tokens=2))
    request = request_of([*prompt, 1], "cache-1", max_tokens=8)
    assert (await server.generate(request)).cached_tokens >= 128
    await server.pause()
    version = await server.weight_version() + 1
    await server.load_weights(shaken_folders(trained, tmp_path)()["folder"], version)
    await server.resume()
    answer = await server.generate(request)
    assert answer.cached_tokens == 0
    assert _worst(reference_of(trained), request, answer) < TOLERANCE


async def test_an_abort_that_overtakes_its_request_takes_effect(server, request_of):
    tasks = [
        asyncio.ensure_future(server.generate(request_of([1, 2], f"abort-{i}", max_tokens=1000))) for i in range(8)
    ]
    await asyncio.sleep(0)
    assert all(await asyncio.gather(*(server.abort(f"abort-{i}") for i in range(8))))
    answers = await asyncio.gather(*tasks)
    assert {answer.stop_reason for answer in answers} == {StopReason.ABORT}
    assert all(len(answer.token_ids) < 1000 for answer in answers)


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


async def test_a_server_that_is_killed_loses_its_requests(server, processes, request_of):
    tasks = [
        asyncio.ensure_future(server.generate(request_of([1, 2], f"killed-{i}", max_tokens=1000))) for i in range(4)
    ]
    await _sampled_more(server, 20)
    os.killpg(processes[-1].pid, signal.SIGKILL)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in ended] == [ServerLost] * 4
    assert not await server.is_healthy(deadline_s=10)
    with pytest.raises(ServerLost):
        await server.load()
