"""SGLang itself, on the CPU: the conformance kit, and what the kit does not ask."""

import asyncio
import copy
import json

import pytest

from agentrl.config.schema import SGLangEngineConfig
from agentrl.errors import EngineError, UsageError
from agentrl.policy import StopReason
from agentrl.server import ServerLost
from agentrl.serving.http import HttpSession
from agentrl.serving.sglang import SGLangServer, launch_command
from agentrl.testing import check_engine
from agentrl.testing.engine_check import Verdict
from agentrl.testing.engine_checks import sessions
from agentrl.testing.engine_probe import EngineProbe
from agentrl.testing.tokenizers import build_tokenizer

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

TOLERANCE = 1e-4
START_S = 540
SETTLE_S = 2.0
"""Seconds in which a busy machine begins a request."""
END_TOKEN = build_tokenizer("qwen3").eos_token_id


@pytest.fixture(scope="module")
def trained(model):
    """The trainer's copy of the model that is served; tests change it along with the server's."""
    return copy.deepcopy(model)


@pytest.fixture(scope="module")
def url(sglang_python, model, model_folder, started_server, tmp_path_factory):
    config = SGLangEngineConfig(max_running=64, max_context=model.config.max_position_embeddings)
    log = tmp_path_factory.mktemp("logs") / "sglang.log"

    def command(port):
        return launch_command(config, python=str(sglang_python), model=model_folder, port=port, dtype="float32")

    with started_server(command, log) as address:
        yield address


@pytest.fixture
async def server(url, model):
    client = SGLangServer(url, SGLangEngineConfig(), vocab_size=model.config.vocab_size)
    await client.connect(deadline_s=START_S)
    yield client
    await client.close()


@pytest.fixture
def long_request(request_of):
    """A request that runs until it is stopped."""
    return lambda name="long": request_of([5, 6, 7], name, max_tokens=1000)


async def idle(server):
    """Wait for the end of requests whose client has gone: SGLang notices within seconds."""
    load = await server.load()
    while load.running > 0:
        load = await server.load()


async def started(server, request):
    """Start a request on an idle server, and wait until it samples for it."""
    await idle(server)
    task = asyncio.create_task(server.generate(request))
    while (await server.load()).running == 0:
        assert not task.done()
    return task


async def test_the_server_conforms(url, trained, engine_of, reference_of, shaken_folders, tmp_path):
    report = await check_engine(
        lambda: engine_of(SGLangServer(url, SGLangEngineConfig())),
        reference=reference_of(trained),
        new_weights=shaken_folders(trained, tmp_path),
        tolerance=TOLERANCE,
        settle_s=SETTLE_S,
    )
    print(report)
    report.raise_on_failure()
    assert [row.check for row in report.rows if row.verdict is Verdict.SKIPPED] == ["seeds"]


async def test_sessions_continue_exactly_on_an_empty_cache(
    url, trained, engine_of, reference_of, shaken_folders, tmp_path
):
    probe = EngineProbe(
        engine=engine_of(SGLangServer(url, SGLangEngineConfig())),
        reference=reference_of(trained),
        new_weights=shaken_folders(trained, tmp_path),
        tolerance=TOLERANCE,
        settle_s=SETTLE_S,
    )
    try:
        await probe.engine.start()
        await idle(probe.engine.server)  # a request that is held during the update would leave its prompt
        await probe.update()
        remark = await sessions(probe)
    finally:
        await probe.engine.close()
    cached = json.loads(remark.partition(": ")[2])
    assert cached[:1] + cached[2:3] == [0, 0]
    assert cached[1] >= 45  # the first turn's prompt and all but the last token of its answer


async def test_what_it_can_do(server, model):
    assert server.capabilities.max_context == model.config.max_position_embeddings
    assert server.capabilities.vocab_size == model.config.vocab_size
    assert await server.is_healthy(deadline_s=10)


async def test_another_vocabulary_is_refused(url, model):
    client = SGLangServer(url, SGLangEngineConfig(), vocab_size=model.config.vocab_size + 1)
    try:
        with pytest.raises(UsageError, match="another vocabulary"):
            await client.connect(deadline_s=START_S)
    finally:
        await client.close()


async def test_one_candidate_has_the_log_probabilities_of_its_temperature(server, request_of, reference_of, trained):
    prompt = [3, 1, 4, 1, 5]
    answer = await server.generate(request_of(prompt, max_tokens=6, temperature=0.5, top_k=1))
    best = await server.generate(request_of(prompt, max_tokens=6, temperature=0.0))
    assert answer.token_ids == best.token_ids
    expected = reference_of(trained)([*prompt, *answer.token_ids], 0.5)[len(prompt) - 1 :]
    assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_an_answer_goes_past_end_tokens_that_are_not_its_own(server, request_of, reference_of, trained):
    prompt, stops = [9, 8, 7], frozenset({0})
    answers = await asyncio.gather(
        *(
            server.generate(request_of(prompt, f"r{i}", max_tokens=150, temperature=3.0, stop_token_ids=stops))
            for i in range(40)
        )
    )
    for answer in answers:
        is_stopped = answer.stop_reason is StopReason.STOP
        assert is_stopped == (answer.token_ids[-1] in stops)
        assert is_stopped or len(answer.token_ids) == 150
    ends = [answer for answer in answers if END_TOKEN in answer.token_ids[:-1]]
    assert ends, "no answer sampled the tokenizer's end token: ask for more"
    expected = reference_of(trained)([*prompt, *ends[0].token_ids], 3.0)[len(prompt) - 1 :]
    assert ends[0].logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_an_abort_ends_one_request_only(server, long_request):
    await idle(server)
    tasks = [asyncio.create_task(server.generate(long_request(name))) for name in ("a", "ab")]
    while (await server.load()).running < 2:
        assert not any(task.done() for task in tasks)
    assert await server.abort("a")
    assert (await tasks[0]).stop_reason is StopReason.ABORT
    assert not tasks[1].done()
    assert await server.abort("ab")
    assert (await tasks[1]).stop_reason is StopReason.ABORT


async def test_requests_that_meet_a_pause_can_be_aborted(server, long_request, request_of):
    running = await started(server, long_request())
    await server.pause()
    assert await server.is_healthy(deadline_s=10)
    load = await server.load()
    assert (load.running, load.waiting) == (0, 1)
    late = asyncio.create_task(server.generate(request_of([1], "late", max_tokens=3)))
    await asyncio.sleep(0)
    assert await server.abort("late")
    assert (await late).token_ids == []
    assert await server.abort("long")
    assert (await running).stop_reason is StopReason.ABORT
    await server.resume()
    assert len((await server.generate(request_of([1], max_tokens=3))).token_ids) == 3


async def test_an_update_that_meets_running_requests_forgets_the_old_cache(
    server, url, long_request, reference_of, shaken_folders, trained, tmp_path
):
    """The server is paused in place: it exchanges the weights and refuses to throw away the cache in use."""
    version = await server.weight_version() + 1
    folder = shaken_folders(trained, tmp_path)()["folder"]
    running = await started(server, long_request())
    other = HttpSession(url)
    await other.post("/pause_generation", {"mode": "in_place"}, deadline_s=60)
    await other.close()
    await server.load_weights(folder, version)
    assert await server.weight_version() == version
    await server.resume()
    answer = await running
    first = answer.versions.index(version)
    assert set(answer.versions[first:]) == {version}
    expected = reference_of(trained)([5, 6, 7, *answer.token_ids], 1.0)[2 + first :]
    assert answer.logprobs[first:] == pytest.approx(expected, abs=TOLERANCE)


async def test_weights_that_are_not_there_are_refused(server, request_of, tmp_path):
    before = await server.weight_version()
    await server.pause()
    with pytest.raises(EngineError, match="did not take the weights"):
        await server.load_weights(tmp_path / "nothing", before + 1)
    await server.resume()
    assert await server.weight_version() == before


async def test_twenty_updates_with_requests_in_flight(
    server, request_of, reference_of, shaken_folders, trained, tmp_path
):
    shake, first = shaken_folders(trained, tmp_path), await server.weight_version() + 1
    for version in range(first, first + 20):
        held = await started(server, request_of([4, 2, version % 100], "held", max_tokens=400))
        await server.pause()
        await server.load_weights(shake()["folder"], version)
        await server.resume()
        answer = await held
        new = answer.versions.index(version)
        assert answer.versions[new:] == [version] * (400 - new)
        expected = reference_of(trained)([4, 2, version % 100, *answer.token_ids], 1.0)[2 + new :]
        assert answer.logprobs[new:] == pytest.approx(expected, abs=TOLERANCE)


async def test_the_load_counts_tokens_and_cache_hits(server, request_of):
    before = await server.load()
    prompt = [11, 12, 13, 14, 15, 16, 17, 18]
    await server.generate(request_of(prompt, "first", max_tokens=4))
    second = await server.generate(request_of(prompt, "second", max_tokens=4))
    after = await server.load()
    assert second.cached_tokens == 7
    assert after.prompt_tokens - before.prompt_tokens == 16
    assert after.cached_tokens - before.cached_tokens == 7
    assert after.sampled_tokens - before.sampled_tokens == 8
    assert (after.running, after.waiting, after.preemptions) == (0, 0, 0)


async def test_a_server_that_is_not_there_is_lost():
    client = SGLangServer("http://127.0.0.1:9", SGLangEngineConfig())
    with pytest.raises(ServerLost):
        await client.connect(deadline_s=0.1)
    assert not await client.is_healthy(deadline_s=0.1)
    await client.close()
