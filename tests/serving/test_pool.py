"""The pool over servers of this process: what it promises as an engine, and what it does when servers are lost."""

import asyncio

import pytest
from support.local_server import LocalServer
from support.models import tiny_model
from support.tokenizers import build_tokenizer

from agentrl.config.engines import VLLMEngineConfig
from agentrl.engine import Generation, ServerLost, StopReason
from agentrl.errors import EngineError, ServersLost, TrainingError, UsageError
from agentrl.serving.pool import PoolSettings, PoolTotals, ServerPool
from agentrl.testing import check_engine
from agentrl.weights import write_served_model

LONG = 150
"""Tokens of a request that is met in flight."""
FAST = {
    "check_every_s": 0.01,
    "health_timeout_s": 0.2,
    "retry_s": 0.01,
    "max_retry_s": 0.02,
    "control_timeout_s": 30,
    "breaker_open_s": 0.05,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served")
    write_served_model(tiny_model(vocab_size=300, max_context=512), build_tokenizer("qwen3", vocab_size=280), path)
    return path


@pytest.fixture
async def pool_of(folder):
    """Pools over servers of this process, closed in the end."""
    pools = []

    def build(count=2, *, restart=None, version=0, say=print, **settings):
        servers = [LocalServer(folder, name=str(index)) for index in range(count)]
        pool = ServerPool(servers, PoolSettings(**(FAST | settings)), restart=restart, version=version, say=say)
        pools.append(pool)
        return pool, servers

    yield build
    for pool in pools:
        await pool.close()


async def until(condition):
    """Let the event loop run until something is so."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


def sampled(server):
    return server._engine.metrics().sampled_tokens


def state(pool, index):
    return pool.group.members[index].state.value


def long_requests(request_of, count):
    return [request_of([1 + i, 2, 3], f"r{i}", max_tokens=LONG, seed=i) for i in range(count)]


async def in_flight(pool, servers, requests):
    """Start requests and wait until every server samples."""
    tasks = [asyncio.create_task(pool.generate(request)) for request in requests]
    await until(lambda: all(sampled(server) > 20 for server in servers))
    return tasks


@pytest.mark.slow
async def test_it_conforms_as_an_engine(pool_of, monkeypatch):
    async def update(weights, version):
        for server in servers:
            server._stamps[server._engine.version + 1] = version
            await server._engine.update_weights(None, server._engine.version + 1)
        pool.group.publish(version)

    pool, servers = pool_of()
    monkeypatch.setattr(pool, "update_weights", update)

    async def sampling(pool):
        return sum(job.num_sampled > 0 for server in servers for job in server._engine._jobs.values())

    report = await check_engine(lambda: pool, sampling=sampling)
    report.raise_on_failure()


async def test_two_servers_share_the_load_and_sessions_stay(pool_of, request_of):
    pool, servers = pool_of()
    await asyncio.gather(*(pool.generate(request_of([5, i], f"s{i}", max_tokens=8)) for i in range(8)))
    homes = [pool._router._homes[f"s{i}"] for i in range(8)]
    assert sorted(homes) == [0] * 4 + [1] * 4
    before = [server._engine.metrics().prompt_tokens for server in servers]
    again = await pool.generate(request_of([5, 3, 7, 7], "next", session="s3", max_tokens=4))
    received = [server._engine.metrics().prompt_tokens for server in servers]
    assert received[homes[3]] == before[homes[3]] + 4
    assert received[1 - homes[3]] == before[1 - homes[3]]
    assert again.resubmissions == 0
    assert pool.metrics().prompt_tokens == 8 * 2 + 4
    await pool.end_session("s3")
    assert "s3" not in pool._router._homes


async def test_a_request_gets_an_idle_server_at_once(pool_of, request_of):
    pool, _ = pool_of(1)
    await pool.start()
    request = asyncio.create_task(pool.generate(request_of([5], "r", max_tokens=4)))
    for _ in range(3):
        await asyncio.sleep(0)
    assert pool._requests["r"].member is pool.group.members[0]
    await request


@pytest.mark.slow
async def test_the_requests_of_a_killed_server_go_to_the_other_one(pool_of, request_of):
    pool, servers = pool_of()
    requests = long_requests(request_of, 8)
    tasks = await in_flight(pool, servers, requests)
    servers[0].kill()
    answers = await asyncio.gather(*tasks)
    assert [len(answer.token_ids) for answer in answers] == [LONG] * 8
    assert sorted(answer.resubmissions for answer in answers) == [0] * 4 + [1] * 4
    assert pool.servers == [servers[1]]
    assert pool.metrics().details["resubmissions"] == 4
    alone, _ = pool_of(1)
    expected = await asyncio.gather(*map(alone.generate, requests))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


async def test_a_killed_server_that_was_launched_comes_back(pool_of, folder, request_of):
    started = []

    async def restart(index):
        server = LocalServer(folder, name=f"{index}-{len(started)}")
        await server.connect(deadline_s=10)
        started.append(server)
        return server

    pool, servers = pool_of(restart=restart)
    tasks = await in_flight(pool, servers, long_requests(request_of, 4))
    for server in servers:
        server.kill()
    answers = await asyncio.gather(*tasks)
    assert [len(answer.token_ids) for answer in answers] == [LONG] * 4
    assert all(answer.resubmissions >= 1 for answer in answers)
    await until(lambda: len(pool.servers) == 2)
    assert set(pool.servers) == set(started)
    assert pool.metrics().details["servers_lost"] == 2


async def test_a_server_that_hangs_is_lost_and_taken_in_again_when_it_wakes(pool_of, request_of):
    said = []
    pool, servers = pool_of(say=said.append)
    tasks = await in_flight(pool, servers, long_requests(request_of, 4))
    servers[1].hang()
    answers = await asyncio.gather(*tasks)
    assert sorted(answer.resubmissions for answer in answers) == [0, 0, 1, 1]
    assert pool.servers == [servers[0]]
    servers[1].wake()
    await until(lambda: state(pool, 1) == "serving")
    lost, back = said
    assert f"server {servers[1].url} is lost: its health route did not answer" in lost
    assert back == f"server {servers[1].url} serves again with weights of version 0"
    assert (await pool.generate(request_of([9], "later", max_tokens=3))).stop_reason is StopReason.LENGTH


async def test_long_waits_are_told(pool_of, monkeypatch):
    said = []
    monkeypatch.setattr("agentrl.serving.pool.group.WAIT_REPORT_S", 0.001)
    pool, servers = pool_of(1, say=said.append, connect_timeout_s=50)
    servers[0].hang()
    starting = asyncio.create_task(pool.start())
    await until(lambda: len(said) >= 2)
    assert said[0].startswith(f"waiting for {servers[0].url}: 0 s of at most 50 s")
    servers[0].wake()
    await starting
    servers[0].hang()
    await until(lambda: not pool.servers)
    said.clear()
    returning = asyncio.create_task(pool.group.wait_for_server(deadline_s=50))
    await until(lambda: said)
    assert said[0].startswith("no server is available; waiting for one to return: 0 s of at most 50 s")
    servers[0].wake()
    await returning


async def test_closing_ends_requests_of_a_server_that_hangs(pool_of, request_of, monkeypatch):
    pool, servers = pool_of(1, health_timeout_s=0.2)
    tasks = await in_flight(pool, servers, long_requests(request_of, 2))
    never = asyncio.Event()
    monkeypatch.setattr(servers[0], "close", never.wait)
    servers[0].hang()
    closing = asyncio.create_task(pool.close())
    ended, running = await asyncio.wait(tasks, timeout=60)
    assert not running
    for task in ended:
        with pytest.raises(EngineError, match="closed"):
            task.result()
    never.set()
    await closing
    monkeypatch.undo()


async def test_closing_a_pool_closes_its_servers(pool_of, monkeypatch):
    pool, servers = pool_of()
    await pool.start()
    closed = []
    for server in servers:
        close = server.close

        async def recorded(server=server, close=close):
            closed.append(server)
            await close()

        monkeypatch.setattr(server, "close", recorded)
    await pool.close()
    assert closed == servers


async def test_when_all_servers_hang_requests_wait_and_an_abort_still_ends_them(pool_of, request_of):
    pool, servers = pool_of()
    await pool.start()
    for server in servers:
        server.hang()
    await until(lambda: pool.servers == [])
    waits = asyncio.create_task(pool.generate(request_of([1], "waits", max_tokens=5)))
    ends = asyncio.create_task(pool.generate(request_of([1], "ends", max_tokens=5)))
    await until(lambda: pool.metrics().waiting == 2)
    assert await pool.abort("ends")
    answer = await ends
    assert (answer.token_ids, answer.stop_reason) == ([], StopReason.ABORT)
    assert not waits.done()
    servers[0].wake()
    assert len((await waits).token_ids) == 5


async def test_an_aborted_request_of_a_lost_server_is_not_submitted_again(pool_of, request_of):
    pool, servers = pool_of(1)
    (task,) = await in_flight(pool, servers, long_requests(request_of, 1))
    servers[0].hang()
    assert await pool.abort("r0")
    answer = await task
    assert (answer.token_ids, answer.stop_reason, answer.resubmissions) == ([], StopReason.ABORT, 0)


async def test_a_caller_that_no_longer_waits_for_a_server_leaves_nothing_behind(pool_of, request_of):
    pool, servers = pool_of(1)
    await pool.start()
    servers[0].kill()
    late = asyncio.create_task(pool.generate(request_of([1], "late", max_tokens=5)))
    await until(lambda: pool.metrics().waiting == 1)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert pool.metrics().waiting == 0


async def test_a_server_that_cannot_be_started_again_is_given_up_and_then_nothing_is_served(pool_of, request_of):
    attempts = []

    async def restart(index):
        attempts.append(index)
        raise EngineError("no GPU is left")

    pool, servers = pool_of(1, restart=restart, attempts=3)
    await pool.start()
    servers[0].kill()
    with pytest.raises(ServersLost, match=r"no server is left: got local://0.*agentrl train --resume RUN"):
        await pool.generate(request_of([1], "r", max_tokens=5))
    assert attempts == [0, 0, 0]
    with pytest.raises(ServersLost, match="no server is left"):
        await pool.generate(request_of([1], "s", max_tokens=5))


async def test_an_attached_server_that_does_not_return_is_removed_and_the_run_hears_of_it(
    pool_of, request_of, monkeypatch
):
    monkeypatch.setattr("agentrl.serving.pool.group.LOST_REPORT_S", 0.1)
    said = []
    pool, servers = pool_of(2, lost_timeout_s=0.4, say=said.append)
    await pool.start()
    servers[0].hang()
    await until(lambda: state(pool, 0) == "removed")
    assert len((await pool.generate(request_of([1], "goes on", max_tokens=4))).token_ids) == 4
    assert (
        "server local://0 is lost: its health route did not answer within 0.2 s (waiting up to 0.4 s for its return)"
        in said
    )
    assert any("has not answered for 0 s; retrying until 0.4 s: its health route did not" in line for line in said)
    assert any("server local://0 is removed after" in line for line in said)
    servers[1].kill()
    with pytest.raises(ServersLost, match=r"no server is left: got local://0: its health .*; local://1: its health"):
        await asyncio.wait_for(pool.generate(request_of([1], "last", max_tokens=4)), 60)


@pytest.mark.parametrize(("fault", "why"), [("kill", "cannot be reached"), ("hang", "did not answer within 0.2 s")])
async def test_the_loss_of_a_server_says_why(pool_of, fault, why):
    pool, servers = pool_of(1)
    await pool.start()
    getattr(servers[0], fault)()
    await until(lambda: not pool.servers)
    assert why in pool.group.members[0].why


async def test_a_broken_connection_alone_loses_no_server(pool_of, request_of, monkeypatch):
    pool, servers = pool_of(1)
    await pool.start()
    real, breaks = servers[0].generate, [True]

    async def generate(request):
        if breaks:
            breaks.pop()
            raise ServerLost("the connection was reset")
        return await real(request)

    monkeypatch.setattr(servers[0], "generate", generate)
    answer = await pool.generate(request_of([1, 2], "r", max_tokens=4))
    assert (len(answer.token_ids), answer.resubmissions) == (4, 1)
    assert pool.metrics().details["servers_lost"] == 0


async def test_a_request_that_breaks_every_server_fails_alone(pool_of, request_of, monkeypatch):
    pool, servers = pool_of(1, resubmissions=2)
    await pool.start()
    real = servers[0].generate

    async def generate(request):
        if request.prompt_ids[0] == 66:
            raise ServerLost("the connection was reset")
        return await real(request)

    monkeypatch.setattr(servers[0], "generate", generate)
    with pytest.raises(EngineError, match="request bad lost its server too often: got 3 times"):
        await pool.generate(request_of([66], "bad", max_tokens=4))
    assert len((await pool.generate(request_of([1], "good", max_tokens=4))).token_ids) == 4


async def test_failed_answers_open_the_breaker_and_a_trial_closes_it(pool_of, request_of, monkeypatch):
    said = []
    pool, servers = pool_of(1, breaker_failures=2, say=said.append)
    await pool.start()
    real, fails = servers[0].generate, [True] * 2

    async def generate(request):
        if fails:
            fails.pop()
            raise EngineError("500")
        return await real(request)

    monkeypatch.setattr(servers[0], "generate", generate)
    for name in ("a", "b"):
        with pytest.raises(EngineError, match="500"):
            await pool.generate(request_of([1], name, max_tokens=4))
    assert (pool.metrics().details["servers_serving"], state(pool, 0)) == (0, "serving")
    assert said == ["server local://0 gets no requests for 0.05 s because its answers fail: 500"]
    assert len((await pool.generate(request_of([1], "trial", max_tokens=4))).token_ids) == 4
    assert said[1:] == ["server local://0 gets requests again: it answered one"]
    assert pool.metrics().details["concurrency"] == 64


async def test_an_answer_with_a_version_that_was_never_published_is_not_passed_on(pool_of, request_of):
    pool, servers = pool_of()
    await pool.start()
    servers[0]._stamps[0] = 5
    answers = await asyncio.gather(*(pool.generate(request_of([i], f"r{i}", max_tokens=6)) for i in range(1, 7)))
    assert {version for answer in answers for version in answer.versions} == {0}
    assert sum(answer.resubmissions for answer in answers) == 3
    assert pool.servers == [servers[1]]


async def test_an_answer_of_weights_older_than_the_request_is_not_passed_on(pool_of, request_of):
    pool, servers = pool_of(version=3)
    servers[0]._stamps[0], servers[1]._stamps[0] = 2, 3
    await pool.start()
    answers = await asyncio.gather(*(pool.generate(request_of([i], f"r{i}", max_tokens=6)) for i in range(1, 7)))
    assert {version for answer in answers for version in answer.versions} == {3}
    assert sum(answer.resubmissions for answer in answers) == 3
    assert pool.servers == [servers[1]]
    assert "it sampled with weights of version [2], expected 3 to 3" in pool.group.members[0].why


async def test_an_answer_over_an_update_may_have_every_version_from_its_start_to_its_end(pool_of, request_of):
    pool, (server,) = pool_of(1, version=3)
    await pool.start()
    server._stamps[0] = 3

    async def generate(request):
        pool.group.publish(5)
        return Generation(
            token_ids=[1, 2, 3], logprobs=[-1.0] * 3, versions=list(versions), stop_reason=StopReason.LENGTH
        )

    server.generate = generate
    versions = [3, 4, 5]
    assert (await pool.generate(request_of([1], "whole", max_tokens=3))).versions == [3, 4, 5]


async def test_a_new_process_at_the_same_address_does_not_pass_for_the_old_one(pool_of, monkeypatch):
    pool, servers = pool_of(1, version=3)
    servers[0]._stamps[0] = 3
    await pool.start()
    servers[0]._stamps[0] = 0
    pool.group.monitor.suspect(pool.group.members[0])
    await until(lambda: state(pool, 0) == "lost" or state(pool, 0) == "removed")
    assert "version 0 instead of 3" in pool.group.members[0].why


async def test_a_cancelled_caller_frees_its_place(pool_of, request_of):
    pool, servers = pool_of(1, concurrency=1, max_concurrency=1)
    tasks = await in_flight(pool, servers, long_requests(request_of, 2))
    assert (pool.metrics().running, pool.metrics().waiting) == (1, 1)
    tasks[0].cancel()
    assert len((await tasks[1]).token_ids) == LONG
    assert servers[0]._engine.metrics().running == 0


async def test_the_loss_of_a_server_is_no_cancellation_of_those_who_wait_for_it(pool_of, request_of):
    pool, servers = pool_of()
    cancellations = []

    async def ask(request):
        answer = await pool.generate(request)
        cancellations.append(asyncio.current_task().cancelling())
        return answer

    await pool.start()
    tasks = [asyncio.create_task(ask(request)) for request in long_requests(request_of, 2)]
    await until(lambda: all(sampled(server) > 20 for server in servers))
    pool.group.monitor.lose(pool.group.members[0], "gone")
    answers = await asyncio.gather(*tasks)
    assert sorted(answer.resubmissions for answer in answers) == [0, 1]
    assert cancellations == [0, 0]


async def test_a_caller_that_gives_up_as_its_server_is_lost_has_given_up(pool_of, request_of):
    pool, servers = pool_of(1)
    cancelled, late = long_requests(request_of, 2)
    scopes = []

    async def ask_in_time(request):
        async with asyncio.timeout(None) as scope:
            scopes.append(scope)
            await pool.generate(request)

    tasks = [asyncio.create_task(pool.generate(cancelled)), asyncio.create_task(ask_in_time(late))]
    await until(lambda: sampled(servers[0]) > 20)
    scopes[0].reschedule(asyncio.get_running_loop().time())  # passes before the task hears of the loss
    pool.group.monitor.lose(pool.group.members[0], "gone")
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    with pytest.raises(TimeoutError):
        await tasks[1]
    assert (pool.metrics().running, pool.metrics().waiting) == (0, 0)


async def test_weights_need_a_weight_sync_and_a_failed_probe_stops_everything(pool_of, request_of):
    pool, servers = pool_of(1)
    await pool.start()
    with pytest.raises(EngineError, match="weights reach servers through weight sync"):
        await pool.update_weights({}, 1)

    async def wrong(server):
        raise TrainingError(f"{server.url} differs")

    pool.group.connect_sync(deliver=None, bring_up_to_date=wrong)
    servers[0].hang()
    waits = asyncio.create_task(pool.generate(request_of([1], "r", max_tokens=4)))
    await until(lambda: pool.servers == [])
    servers[0].wake()
    with pytest.raises(TrainingError, match="local://0 differs"):
        await waits


async def test_readings_of_a_pause_change_no_limit(pool_of, request_of):
    pool, servers = pool_of(1, concurrency=16)
    await pool.start()
    await pool.pause()
    requests = [asyncio.create_task(servers[0].generate(request_of([1], f"r{i}", max_tokens=2))) for i in range(9)]
    await until(lambda: servers[0]._engine.metrics().waiting == 9)
    seen = []
    servers[0].load = lambda load=servers[0].load: seen.append(1) or load()
    await until(lambda: len(seen) > 4)
    assert pool.metrics().details["concurrency"] == 16
    await pool.resume()
    await asyncio.gather(*requests)


def test_the_time_of_a_request_that_runs_counts(request_of):
    totals = PoolTotals()
    assert totals.busy_s == 0
    totals.begin(request_of([1], "r", max_tokens=5))
    assert 0 < totals.busy_s < 60
    totals.end()
    assert 0 < totals.busy_s == totals.busy_s < 60


def test_the_settings_of_a_run():
    settings = PoolSettings.from_config(VLLMEngineConfig(max_num_seqs=24, health_timeout_s=3))
    assert (settings.concurrency, settings.max_concurrency) == (24, 48)
    assert (settings.health_timeout_s, settings.connect_timeout_s) == (3, 600)


async def test_servers_of_different_models_are_refused(folder, tmp_path):
    write_served_model(tiny_model(vocab_size=310), build_tokenizer("qwen3", vocab_size=280), tmp_path)
    pool = ServerPool([LocalServer(folder, name="a"), LocalServer(tmp_path, name="b")])
    with pytest.raises(UsageError, match=r"the servers serve different models: got vocabularies of \[300, 310\]"):
        await pool.start()
    await pool.close()
    with pytest.raises(UsageError, match="a pool needs servers"):
        ServerPool([])
