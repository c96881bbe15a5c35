"""The conformance kit on every engine, including real servers, and properties of both real ones."""

import asyncio

import pytest
from support.models import tiny_model

from agentrl.config.engines import LocalEngineConfig, ScriptedEngineConfig, SGLangEngineConfig, VLLMEngineConfig
from agentrl.engine import ServerLost, StopReason
from agentrl.serving.local import LocalEngine
from agentrl.serving.scripted import ScriptedEngine
from agentrl.serving.sglang import SGLangServer
from agentrl.serving.vllm import VLLMServer
from agentrl.testing import ServerEngine, check_engine
from agentrl.testing.engine_check import RULES
from agentrl.testing.engine_subject import MEETINGS
from agentrl.testing.report import CheckStatus

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
SERVERS = ["sglang", "vllm"]
CONFIGS = {"sglang": SGLangEngineConfig, "vllm": VLLMEngineConfig}
CLIENTS = {"sglang": SGLangServer, "vllm": VLLMServer}
CHECK_S = 300


@pytest.fixture
def kills_a_server():
    """This test runs after the others."""


@pytest.fixture
def local():
    model = tiny_model(max_context=128)
    return {"factory": lambda: LocalEngine(model, LocalEngineConfig(max_num_seqs=16)), "model": model}


@pytest.fixture
def scripted():
    return {"factory": lambda: ScriptedEngine(ScriptedEngineConfig(), max_context=300)}


@pytest.fixture
def real(engine, probe, client_of, trained, session_servers):
    return {
        "factory": lambda: ServerEngine(client_of()),
        "model": trained,
        "new_weights": probe.new_weights,
        "tolerance": probe.tolerance,
        "sampling": ServerEngine.sampling,
        "kill": lambda: session_servers.kill(engine),
    }


@pytest.fixture
def subject(engine, request):
    """What the kit is given for an engine."""
    return request.getfixturevalue("real" if engine in SERVERS else engine)


@pytest.mark.parametrize(
    ("engine", "skipped"),
    [
        ("local", ["killed engine"]),
        ("scripted", ["logprobs", "first token", "killed engine"]),
        ("sglang", ["seeds"]),
        ("vllm", ["seeds"]),
    ],
)
@pytest.mark.capability("{engine}", *(rule.name for rule in RULES), without="skipped")
async def test_the_engine_conforms(engine, skipped, subject, reference_of, kills_a_server):
    model = subject.pop("model", None)
    reference = None if model is None else reference_of(model)
    report = await check_engine(**subject, reference=reference, deadline_s=CHECK_S)
    print(report)
    report.raise_on_failure()
    assert [row.check for row in report.rows if row.status is CheckStatus.SKIPPED] == skipped


async def progress(probe):
    """What runs, and what has been sampled, now."""
    await probe.count_sampled()
    return probe.engine.metrics()


async def paused_in_flight(probe):
    """Pause while some of three long requests run: on a busy machine all may end before the pause takes effect."""
    for _ in range(MEETINGS):
        requests = [probe.long_request() for _ in range(3)]
        tasks = [await probe.submit(request) for request in requests]
        await probe.engine.pause()
        if not all(task.done() for task in tasks):
            return requests, tasks
        await probe.engine.resume()
    pytest.fail(f"no request of {MEETINGS} batches was still running when the server was paused")


@pytest.mark.parametrize("trained", ["tied", "untied"], indirect=True)
@pytest.mark.parametrize("engine", SERVERS)
async def test_twenty_updates_with_requests_in_flight_are_exact(probe):
    engine = probe.engine
    for _ in range(20):
        old = engine.version
        requests, tasks = await paused_in_flight(probe)
        held = await progress(probe)
        new = await probe.update()
        await engine.resume()

        async def go_on(held=held) -> bool:
            return await progress(probe) != held

        await probe.until(go_on, "a request that goes on after the update")
        for request in requests:
            await engine.abort(request.request_id)
        answers = await asyncio.gather(*tasks)
        for request, answer in zip(requests, answers, strict=True):
            first = answer.versions.count(old)
            assert answer.versions == [old] * first + [new] * (len(answer.versions) - first)
            assert first > 0
            probe.check_logprobs(request.prompt_ids, answer, 1.0, first)
        assert any({old, new} == set(answer.versions) for answer in answers)


@pytest.mark.parametrize("engine", SERVERS)
async def test_an_update_empties_the_prefix_cache(probe):
    prompt = [(7 * i) % 400 for i in range(300)]
    await probe.generate(prompt, max_tokens=2)
    answer = await probe.generate([*prompt, 1], max_tokens=8)
    assert answer.cached_tokens >= 128
    await probe.update()
    answer = await probe.generate([*prompt, 1], max_tokens=8)
    assert answer.cached_tokens == 0
    probe.check_logprobs([*prompt, 1], answer, 1.0)


@pytest.mark.parametrize("engine", SERVERS)
async def test_an_abort_ends_one_request_only(probe):
    requests = [probe.long_request() for _ in range(2)]
    tasks = [await probe.submit(request) for request in requests]
    for request, task in zip(requests, tasks, strict=True):
        assert not task.done()
        assert await probe.engine.abort(request.request_id)
        assert (await task).stop_reason is StopReason.ABORT


@pytest.mark.parametrize("engine", SERVERS)
async def test_a_server_that_is_not_there_is_lost(engine):
    client = CLIENTS[engine]("http://127.0.0.1:9", CONFIGS[engine](), vocab_size=10)
    with pytest.raises(ServerLost):
        await client.connect(deadline_s=0.1)
    assert not await client.is_healthy(deadline_s=0.1)
    await client.close()
