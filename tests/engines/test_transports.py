"""Every transport that works on a CPU, on both servers: exact with requests in flight, and verified."""

import asyncio
import itertools
import sys
from functools import partialmethod
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.engine import GenerateRequest, SamplingParams
from agentrl.errors import TrainingError
from agentrl.observe.metrics import read_metrics
from agentrl.runs.rl import train
from agentrl.runs.start import start_run
from agentrl.serving.pool import PoolSettings, ServerPool
from agentrl.serving.sglang import SGLangServer
from agentrl.serving.vllm import VLLMServer
from agentrl.weights import (
    CollectiveTransport,
    FolderTransport,
    IpcTransport,
    Probe,
    RemoteSync,
    TensorTransport,
    Transport,
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

TOLERANCE = 1e-4
WORLDS = Path(__file__).parent.parent / "worlds"
SYNCS = 5
BUCKET_BYTES = 100_000
"""Several buckets for the tiny model, and tensors that are larger than one."""
TRANSPORTS = {
    "shared_memory": FolderTransport.shared_memory,
    "collective": lambda: CollectiveTransport(bucket_bytes=BUCKET_BYTES),
    "cuda_ipc": lambda: IpcTransport(bucket_bytes=BUCKET_BYTES),
    "tensor": lambda: TensorTransport(bucket_bytes=BUCKET_BYTES),
}
CASES = [
    *(("vllm", name) for name in TRANSPORTS if name != "tensor"),
    *(("sglang", name) for name in TRANSPORTS),
]
both_models = pytest.mark.parametrize("trained", ["tied", "untied"], indirect=True)
every_transport = pytest.mark.parametrize(("engine", "transport"), CASES)


class Skipping(Transport):
    """Leaves tensors out."""

    def __init__(self, transport):
        self._transport = transport
        self.skipped = set()

    async def prepare(self, weights, version):
        kept = {name: tensor for name, tensor in weights.items() if name not in self.skipped}
        return await self._transport.prepare(kept, version)

    async def close(self):
        await self._transport.close()


class World:
    """The session's server behind a pool, a trainer, and the sync between them."""

    def __init__(self, client, trainer, transport, *, version, vocab_size):
        self.trainer = trainer
        self.trainer.remember(version)
        self.pool = ServerPool([client], PoolSettings(), version=version)
        probe = Probe.random(vocab_size, tolerance=TOLERANCE)
        self.transport = Skipping(transport)
        self.sync = RemoteSync(self.trainer, self.pool.group, self.transport, probe)

    async def next_version(self):
        version = self.pool.version + 1
        self.trainer.learn(version)
        return await self.sync.sync(version)


@pytest.fixture
async def world(client_of, trained, learning, transport):
    client = client_of()
    await client.connect(deadline_s=60)
    version, vocab_size = await client.weight_version() + 1, trained.config.vocab_size
    world = World(client, learning(trained), TRANSPORTS[transport](), version=version, vocab_size=vocab_size)
    await world.pool.start()
    await world.sync.verify()
    yield world
    await world.pool.close()
    await world.sync.close()


def a_request(name, prompt, tokens):
    params = SamplingParams(max_tokens=tokens)
    return GenerateRequest(prompt_ids=prompt, params=params, session_id=name, request_id=name)


@both_models
@every_transport
@pytest.mark.capability(["{engine}", "attached {engine}"], "weights {transport}")
async def test_syncs_with_requests_in_flight_are_exact(world):
    stop, answered, answers = asyncio.Event(), asyncio.Event(), []

    async def caller(number):
        """Answers of other lengths than those of the others, which are in the middle of theirs when one has come."""
        for turn in itertools.count():
            if stop.is_set():
                return
            request = a_request(f"c{number}-{turn}", [number + 1, turn % 7, 3], 150 + 75 * number)
            answers.append((request.prompt_ids, await world.pool.generate(request)))
            answered.set()

    first = world.pool.version
    async with asyncio.TaskGroup() as callers:
        for number in range(3):
            callers.create_task(caller(number))
        for _ in range(SYNCS):
            answered.clear()
            await answered.wait()
            report = await world.next_version()
            assert report.probe_difference < TOLERANCE
        stop.set()
    assert max(world.trainer.largest_difference(prompt, answer) for prompt, answer in answers) < TOLERANCE
    assert any(len(set(answer.versions)) > 1 for _, answer in answers)
    assert {version for _, answer in answers for version in answer.versions} <= set(range(first, first + SYNCS + 1))


@pytest.mark.parametrize("skipped", ["model.layers.1.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"])
@every_transport
async def test_a_skipped_tensor_is_caught_and_named(world, engine, skipped):
    await world.next_version()
    world.transport.skipped = {skipped}
    version = world.pool.version + 1
    with pytest.raises(TrainingError, match=f"does not serve the trainer's weights of version {version}") as told:
        await world.next_version()
    if engine == "vllm" and "proj" in skipped:
        assert told.value.hint.startswith("all checksums agree; the server reports none for ")
    else:
        assert told.value.hint == f"tensors that differ by checksum: {skipped}"


RUN = (
    "environment={name: letters:Letters, isolation: inline}",
    "agent={loop: react_text, options: {format: plain, explain: false}, max_answer_tokens: 8, max_tokens: 256}",
    "model.scratch={layers: 1, hidden_size: 64, heads: 2, kv_heads: 1, vocab_size: 300, max_context: 256}",
    "model.scratch.initializer_range=0.2",
    "algorithm.group_size=4",
    "trainer={steps: 2, tasks_per_step: 4, learning_rate: 1e-2}",
    "run.name=run",
)


@pytest.mark.parametrize(("engine", "client"), [("vllm", VLLMServer), ("sglang", SGLangServer)])
@pytest.mark.capability("{engine}", "sleep", "training", "weights collective")
def test_a_run_whose_servers_sleep_and_hear_broadcasts(engine, client, tmp_path, monkeypatch):
    """On a CPU the servers keep their memory, and everything else happens."""
    monkeypatch.syspath_prepend(WORLDS)
    calls, real = [], {name: getattr(client, name) for name in ("sleep", "wake_up")}

    async def counted(server, name):
        calls.append(name)
        await real[name](server)

    for name in real:
        monkeypatch.setattr(client, name, partialmethod(counted, name))
    settings = f"engine={{type: {engine}, max_num_seqs: 16, transport: collective, sleep: true}}"
    run = start_run(load_config(None, [*RUN, settings, f"run.directory={tmp_path}"]), kind="test")
    result = train(run)
    sys.modules.pop("letters", None)
    lines = read_metrics(run.folder.metrics_file)
    assert [line["version"] for line in lines] == [1, 2]
    assert max(line["mismatch/prob_abs_mean"] for line in lines) < 1e-4
    assert [line["sync/released_bytes"] for line in lines] == [0, 0]
    assert calls == ["sleep", "wake_up"] * 2
    assert not result.interrupted
