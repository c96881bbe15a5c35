"""Two launched servers in a pool, killed and suspended during requests while weights change."""

import asyncio
import copy
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from agentrl.builders.servers import ServedModel, open_pool
from agentrl.config.engines import SGLangEngineConfig, VLLMEngineConfig
from agentrl.engine import GenerateRequest, SamplingParams, StopReason
from agentrl.serving.launch.guard import descendants, find_mapped_segments, list_segments
from agentrl.serving.pool import PoolSettings, ServerPool
from agentrl.weights import FolderTransport, Probe, RemoteSync

pytestmark = [pytest.mark.engines, pytest.mark.timeout(2400)]
of_the_world = pytest.mark.asyncio(loop_scope="module")
both_engines = pytest.mark.parametrize("world", ["sglang", "vllm"], indirect=True, scope="module")
vllm_only = pytest.mark.parametrize("world", ["vllm"], indirect=True, scope="module")
"""The same deaths on SGLang are those of a whole run, in test_training_deaths.py."""

CONFIGS = {"vllm": VLLMEngineConfig, "sglang": SGLangEngineConfig}
REQUESTS = 6
TOKENS = 400
TOLERANCE = 1e-4
WAIT_S = 900


async def until(condition, what):
    """Ask again and again, until something is so."""
    end = time.monotonic() + WAIT_S
    while True:
        if await condition():
            return
        assert time.monotonic() < end, f"waited in vain for {what}"
        await asyncio.sleep(0.02)


class World:
    """A pool, the trainer of its weights, and requests on their way."""

    def __init__(self, pool, trainer):
        self.pool, self.trainer = pool, trainer
        probe = Probe.random(400, tolerance=TOLERANCE)
        self.sync = RemoteSync(trainer, pool.group, FolderTransport.shared_memory(), probe)
        self.names = iter(range(1000))
        self.sampled_before = 0
        trainer.remember(pool.version)

    async def learn(self):
        """New weights on all servers."""
        version = self.pool.version + 1
        self.trainer.learn(version)
        await self.sync.sync(version)
        return version

    async def in_flight(self):
        """Start requests and wait until the servers have them all: what vLLM says of itself comes too late."""
        self.sampled_before = self.pool.metrics().sampled_tokens
        numbers = [next(self.names) for _ in range(REQUESTS)]
        requests = [
            GenerateRequest(
                prompt_ids=[number % 400, 2, 3],
                params=SamplingParams(max_tokens=TOKENS),
                session_id=f"s{number}",
                request_id=f"r{number}",
            )
            for number in numbers
        ]
        tasks = [asyncio.create_task(self.pool.generate(request)) for request in requests]

        async def are_under_way():
            assert not any(task.done() for task in tasks), "an answer came before anybody looked"
            servers = [member.in_flight for member in self.pool.group.members if member.state.is_active]
            return all(servers) and sum(servers) == REQUESTS

        await until(are_under_way, "requests under way")
        return requests, tasks

    async def check(self, requests, tasks):
        """One whole answer for each request, made by weights that are known, as the trainer says it; the answers."""
        answers = await asyncio.gather(*tasks)
        assert [len(answer.token_ids) for answer in answers] == [TOKENS] * REQUESTS
        assert {answer.stop_reason for answer in answers} == {StopReason.LENGTH}
        assert self.pool.metrics().sampled_tokens - self.sampled_before == TOKENS * REQUESTS
        for request, answer in zip(requests, answers, strict=True):
            assert answer.versions == sorted(answer.versions)
            assert self.trainer.largest_difference(request.prompt_ids, answer) < TOLERANCE
        return answers

    async def all_serve(self, count=2):
        """Wait until all servers are there; then each takes an update and samples with it."""

        async def are_back():
            return len(self.pool.servers) == count

        await until(are_back, "the return of all servers")
        requests, tasks = await self.in_flight()
        version = await self.learn()
        answers = await self.check(requests, tasks)
        assert [await server.weight_version() for server in self.pool.servers] == [version] * count
        assert {version for answer in answers for version in answer.versions} <= {version - 1, version}
        answers = await self.check(*await self.in_flight())
        assert {version for answer in answers for version in answer.versions} == {version}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(request, model, model_folder, learning, tmp_path_factory):
    """Two servers, launched as a run launches them."""
    section = CONFIGS[request.param](
        max_num_seqs=32, max_context=1000, replicas=2, start_timeout_s=WAIT_S, timeout_s=2 * WAIT_S
    )
    served = ServedModel(path=str(model_folder), dtype="float32", vocab_size=model.config.vocab_size)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(section, served, tmp_path_factory.mktemp("pool"), say=print))
        world = World(pool, learning(copy.deepcopy(model)))
        stack.push_async_callback(world.sync.close)
        await world.sync.verify()
        yield world


@of_the_world
@both_engines
@pytest.mark.capability("{world}", "restart")
async def test_a_killed_server_comes_back(world, leader_of):
    requests, tasks = await world.in_flight()
    os.kill(leader_of(world.pool.servers[0].url), signal.SIGKILL)
    await world.learn()
    answers = await world.check(requests, tasks)
    assert sum(answer.resubmissions for answer in answers) >= 1
    await world.all_serve()


@of_the_world
@vllm_only
async def test_when_all_servers_are_killed_requests_wait_for_them(world, leader_of):
    requests, tasks = await world.in_flight()
    for server in world.pool.servers:
        os.kill(leader_of(server.url), signal.SIGKILL)
    answers = await world.check(requests, tasks)
    assert all(answer.resubmissions >= 1 for answer in answers)
    await world.all_serve()


@of_the_world
@vllm_only
async def test_a_server_that_hangs_is_replaced(world, leader_of):
    requests, tasks = await world.in_flight()
    hanging = leader_of(world.pool.servers[1].url)
    os.killpg(hanging, signal.SIGSTOP)
    answers = await world.check(requests, tasks)
    assert sum(answer.resubmissions for answer in answers) >= 1
    await world.all_serve()
    assert hanging not in descendants(os.getpid())


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_an_attached_server_that_hung_goes_on_with_the_current_weights(client_of, trained, learning, leader_of):
    client = client_of()
    await client.connect(deadline_s=WAIT_S)
    version = await client.weight_version() + 1
    pool = ServerPool([client], PoolSettings(health_timeout_s=5), version=version)
    world = World(pool, learning(trained))
    leader = leader_of(client.url)
    try:
        await pool.start()
        await world.sync.verify()
        requests, tasks = await world.in_flight()
        os.killpg(leader, signal.SIGSTOP)

        async def is_lost():
            return not pool.servers

        await until(is_lost, "the loss of the server")
        learning_on = asyncio.create_task(world.learn())
        os.killpg(leader, signal.SIGCONT)
        answers = await world.check(requests, tasks)
        assert all(answer.resubmissions == 1 for answer in answers)
        assert await learning_on == version + 1
        await world.all_serve(1)
    finally:
        os.killpg(leader, signal.SIGCONT)
        await pool.close()
        await world.sync.close()


def test_nothing_is_left_of_vllm_when_the_process_that_launched_it_is_killed(
    model_folder, leader_of, all_gone, tmp_path
):
    words = ["serve", "--engine", "vllm", "--model", str(model_folder), "--folder", str(tmp_path)]
    program = Path(sys.executable).with_name("agentrl")
    with subprocess.Popen([program, *words, "engine.max_num_seqs=8"], stdout=subprocess.PIPE, text=True) as launcher:
        url = launcher.stdout.readline().strip()
        processes = descendants(launcher.pid)
        segments = find_mapped_segments(processes) & set(list_segments())
        launcher.kill()
    assert len(processes) >= 4
    assert all_gone(processes)
    assert segments.isdisjoint(list_segments())
    assert url.startswith("http://127.0.0.1:")
