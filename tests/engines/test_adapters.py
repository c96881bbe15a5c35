"""Adapters sent to a real vLLM without the base: exact with requests in flight, verified, and resumed."""

from __future__ import annotations

import asyncio
import copy
import itertools
import sys
from functools import partial
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.config.engines import VLLMEngineConfig
from agentrl.config.trainer import LoraConfig
from agentrl.engine import AdapterVersions, GenerateRequest, SamplingParams
from agentrl.errors import TrainingError, UsageError
from agentrl.models.lora import add_adapters, save_adapter, with_adapter
from agentrl.observe.metrics import read_metrics
from agentrl.runs.rl import train
from agentrl.runs.start import resume_run, start_run
from agentrl.serving.pool import PoolSettings, ServerPool
from agentrl.serving.vllm import VLLMServer
from agentrl.serving.vllm import launch_command as vllm_command
from agentrl.training.weights import AdaptersWeights, TrainedWeights
from agentrl.weights import AdapterTransport, MultiAdapterProbe, MultiAdapterTransport, Probe, RemoteSync, memory_folder

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

TOLERANCE = 1e-4
WORLDS = Path(__file__).parent.parent / "worlds"
SYNCS = 3
CONFIG = VLLMEngineConfig(max_num_seqs=16, max_context=1024, adapter_rank=4, max_adapters=3)


@pytest.fixture(scope="module")
def adapter_url(started_server, model_folder, vllm_python, tmp_path_factory):
    """Of a server that takes adapters."""

    def command(port):
        return vllm_command(CONFIG, python=vllm_python, model=model_folder, port=port, dtype="float32")

    with started_server(command, tmp_path_factory.mktemp("logs") / "adapters.log") as url:
        yield url


class World:
    """The server behind a pool, a trainer of adapters, and the sync between them."""

    def __init__(self, client, trainer, *, version):
        self.trainer = trainer
        self.trainer.remember(version)
        self.pool = ServerPool([client], PoolSettings(), version=version)
        transport = AdapterTransport(memory_folder(), partial(save_adapter, trainer.model))
        probe = Probe.random(trainer.model.config.vocab_size, tolerance=TOLERANCE)
        self.sync = RemoteSync(TrainedWeights(trainer), self.pool.group, transport, probe)

    async def next_version(self):
        version = self.pool.version + 1
        self.trainer.learn(version)
        return await self.sync.sync(version)

    async def answer(self, name, prompt, tokens):
        params = SamplingParams(max_tokens=tokens)
        request = GenerateRequest(prompt_ids=prompt, params=params, session_id=name, request_id=name)
        return await self.pool.generate(request)


@pytest.fixture
async def world(adapter_url, model, learning):
    adapted = copy.deepcopy(model)
    add_adapters(adapted, LoraConfig(rank=4), base="base", seed=0)
    client = VLLMServer(adapter_url, CONFIG, vocab_size=adapted.config.vocab_size)
    await client.connect(deadline_s=60)
    world = World(client, learning(adapted), version=await client.weight_version() + 1)
    await world.pool.start()
    await world.sync.verify()
    yield world
    await world.pool.close()
    await world.sync.close()


@pytest.mark.capability(["vllm", "attached vllm"], "LoRA")
async def test_syncs_with_requests_in_flight_are_exact(world):
    stop, answered, answers = asyncio.Event(), asyncio.Event(), []

    async def caller(number):
        for turn in itertools.count():
            if stop.is_set():
                return
            prompt = [number + 1, turn % 7, 3]
            answers.append((prompt, await world.answer(f"c{number}-{turn}", prompt, 100 + 50 * number)))
            answered.set()

    async with asyncio.TaskGroup() as callers:
        for number in range(3):
            callers.create_task(caller(number))
        for _ in range(SYNCS):
            answered.clear()
            await answered.wait()
            report = await world.next_version()
            assert report.probe_difference < TOLERANCE
            assert report.bytes < 60_000  # of a model of 400,000
        stop.set()
    assert max(world.trainer.largest_difference(prompt, answer) for prompt, answer in answers) < TOLERANCE
    assert any(len(set(answer.versions)) > 1 for _, answer in answers)


async def test_what_was_cached_with_an_old_adapter_is_not_used_again(world):
    prompt = [7 * i % 100 for i in range(400)]
    cached = []
    for name in ("cold", "warm", "new"):
        if name == "new":
            await world.next_version()
        answer = await world.answer(name, prompt, 8)
        cached.append(answer.cached_tokens > 0)
        assert world.trainer.largest_difference(prompt, answer) < TOLERANCE
    assert cached == [False, True, False]


async def test_an_adapter_that_is_not_the_trainers_is_caught(world):
    stale = {name: tensor.clone() for name, tensor in world.trainer.trained_tensors().items()}
    version = world.pool.version + 1
    world.trainer.learn(version)
    await world.sync.deliver(stale, version)
    with pytest.raises(TrainingError, match=f"does not serve the trainer's weights of version {version}"):
        await world.sync.verify()


async def test_a_server_for_smaller_adapters_is_refused(adapter_url):
    config = CONFIG.model_copy(update={"adapter_rank": 16})
    late = VLLMServer(adapter_url, config, vocab_size=400)
    with pytest.raises(UsageError, match="takes no adapters of rank 16: got --max-lora-rank 8"):
        await late.connect(deadline_s=60)
    await late.close()


RUN = (
    "environment={name: letters:Letters, isolation: inline}",
    "agent={loop: react_text, options: {format: plain, explain: false}, max_answer_tokens: 8, max_tokens: 256}",
    "model.lora={rank: 4}",
    "engine={type: vllm, max_num_seqs: 16, adapter_rank: 4}",
    "algorithm.group_size=4",
    "trainer={steps: 1, tasks_per_step: 4, learning_rate: 1e-1}",
    "run.name=run",
)


SCRATCH = (
    "model.scratch={layers: 1, hidden_size: 64, heads: 2, kv_heads: 1, vocab_size: 300, max_context: 256}",
    "model.scratch.initializer_range=0.2",
)


def test_a_run_is_resumed_on_its_base(tmp_path, monkeypatch):
    """Servers of a resumed run start with the base; with the checkpoint merged they would have its adapter twice."""
    monkeypatch.syspath_prepend(WORLDS)
    train(start_run(load_config(None, [*RUN, *SCRATCH, f"run.directory={tmp_path}"]), kind="test"))
    run = resume_run(str(tmp_path / "run"), ["trainer.steps=2"])
    result = train(run)
    sys.modules.pop("letters", None)
    lines = read_metrics(run.folder.metrics_file)
    assert (result.step, [line["version"] for line in lines]) == (2, [1, 2])
    assert max(line["mismatch/prob_abs_mean"] for line in lines) < 1e-4
    assert max(line["sync/probe_difference"] for line in lines) < 1e-3
    assert min(line["train/grad_norm"] for line in lines) > 0


NAMES = ("planner", "worker")


class Adapters:
    """The server behind a pool, trainers of two adapters of one base, and the sync between them."""

    def __init__(self, client, base, learning, *, version):
        lora = LoraConfig(rank=4)
        self.trainers = {n: learning(with_adapter(base, lora, path="base", seed=k)) for k, n in enumerate(NAMES)}
        for trainer in self.trainers.values():
            trainer.remember(0)
        self.versions = dict.fromkeys(NAMES, 0)
        self.published = AdapterVersions()
        self.pool = ServerPool([client], PoolSettings(), version=version)
        source = AdaptersWeights(self.trainers, base)
        transports = {
            name: AdapterTransport(memory_folder(), partial(save_adapter, trainer.model))
            for name, trainer in self.trainers.items()
        }
        self.transport = MultiAdapterTransport(transports, lambda: self.versions)
        probe = MultiAdapterProbe.from_probe(
            Probe.random(base.config.vocab_size, tolerance=TOLERANCE), source.by_adapter
        )
        self.sync = RemoteSync(source, self.pool.group, self.transport, probe)
        self.published.publish(version, self.versions)

    async def learn(self, name):
        self.versions = {**self.versions, name: self.versions[name] + 1}
        self.trainers[name].learn(self.versions[name])
        update = self.pool.version + 1
        self.published.publish(update, self.versions)
        return await self.sync.sync(update)

    async def answer(self, name, prompt, tokens, adapter, on_tokens=None):
        request = GenerateRequest(
            prompt_ids=prompt,
            params=SamplingParams(max_tokens=tokens),
            session_id=name,
            request_id=name,
            adapter=adapter,
            on_tokens=on_tokens,
        )
        answer = await self.pool.generate(request)
        return answer if adapter is None else self.published.with_versions(answer, adapter)


@pytest.fixture
async def adapters(adapter_url, model, learning):
    base = copy.deepcopy(model).requires_grad_(False)
    client = VLLMServer(adapter_url, CONFIG, vocab_size=base.config.vocab_size)
    await client.connect(deadline_s=60)
    found = Adapters(client, base, learning, version=await client.weight_version() + 1)
    await found.pool.start()
    await found.sync.verify()
    yield found
    await found.pool.close()
    await found.sync.close()


@pytest.mark.capability("vllm", "several adapters")
async def test_two_adapters_and_the_base_are_exact_while_one_after_the_other_learns(adapters, model, reference_of):
    stop, answers = asyncio.Event(), []
    sampling = {adapter: asyncio.Event() for adapter in (*NAMES, None)}

    async def caller(number, adapter):
        for turn in itertools.count():
            if stop.is_set():
                return
            prompt = [1, turn % 7, 3]  # the same for all: what one has cached is of no use to another
            name, told = f"several-{number}-{turn}", lambda ids: sampling[adapter].set()
            answers.append((adapter, prompt, await adapters.answer(name, prompt, 120, adapter, told)))

    async with asyncio.TaskGroup() as callers:
        for number, adapter in enumerate((*NAMES, None)):
            callers.create_task(caller(number, adapter))
        for name in ("planner", "worker", "planner"):
            sampling[name].clear()
            await sampling[name].wait()
            report = await adapters.learn(name)
            assert report.probe_difference < TOLERANCE
            assert report.bytes < 60_000  # of one of the two
        stop.set()
    assert adapters.versions == {"planner": 2, "worker": 1}
    for name, trainer in adapters.trainers.items():
        own = [(prompt, answer) for adapter, prompt, answer in answers if adapter == name]
        assert max(trainer.largest_difference(prompt, answer) for prompt, answer in own) < TOLERANCE
    assert any(len(set(answer.versions)) > 1 for adapter, _, answer in answers if adapter == "planner")
    for adapter, prompt, answer in answers:
        if adapter is None:
            expected = reference_of(model)([*prompt, *answer.token_ids], 1.0)[len(prompt) - 1 :]
            assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_an_adapter_that_is_not_its_trainers_is_named(adapters):
    adapters.versions = {"planner": 0, "worker": 1}  # as if it had been sent
    adapters.trainers["worker"].learn(1)
    adapters.transport._written_versions["worker"] = 1
    with pytest.raises(TrainingError, match=r"adapter worker of server .* does not serve the trainer's weights"):
        await adapters.sync.sync(adapters.pool.version + 1)


@pytest.mark.capability("attached vllm", "several adapters", "training")
def test_two_adapters_train_on_a_server_that_runs(tmp_path, monkeypatch, adapter_url, model_folder):
    monkeypatch.syspath_prepend(WORLDS)
    config = load_config(
        None,
        [
            *RUN,
            "agent.loop=two_agents:Telling",
            "agent.options={}",
            f"model={{path: {model_folder}, lora: {{rank: 4}}}}",
            "agent.roles={teller: {adapter: teller}, writer: {adapter: writer}}",
            "adapters={teller: {}, writer: {learning_rate: 0.05}}",
            f"engine={{type: vllm, servers: [{adapter_url}], adapter_rank: 4, max_adapters: 2}}",
            "trainer.steps=3",
            f"run.directory={tmp_path}",
        ],
    )
    run = start_run(config, kind="test")
    train(run)
    sys.modules.pop("letters", None)
    lines = read_metrics(run.folder.metrics_file)
    assert [line["version"] for line in lines] == [1, 2, 3]
    for line in lines:
        for name in ("teller", "writer"):
            assert line[f"adapter/{name}/mismatch/prob_abs_mean"] < 1e-4
            assert line[f"adapter/{name}/probe_difference"] < 1e-3
            assert line[f"adapter/{name}/grad_norm"] > 0
