import asyncio
import itertools
from contextlib import asynccontextmanager

import pytest
import torch
from support.local_server import LocalServer
from support.models import tiny_model
from support.tokenizers import build_tokenizer

from agentrl.engine import GenerateRequest, SamplingParams
from agentrl.serving.pool import PoolSettings, ServerPool
from agentrl.training.weights import ModelWeights
from agentrl.weights import FolderTransport, Probe, RemoteSync, write_served_model

VOCABULARY = 300
SETTINGS = PoolSettings(check_every_s=0.01, health_timeout_s=0.2, retry_s=0.01, max_retry_s=0.02, control_timeout_s=30)


class Trainer:
    """A model that changes on command, and remembers what it was at every version."""

    def __init__(self, tied=True):
        self.model = tiny_model(vocab_size=VOCABULARY, max_context=512, tied=tied)
        self.source = ModelWeights(self.model)
        self.past = {}
        self._generator = torch.Generator().manual_seed(0)

    def remember(self, version):
        self.past[version] = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    @torch.no_grad()
    def learn(self):
        for parameter in self.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=self._generator))

    def largest_difference(self, prompt, answer):
        """Of an answer's log-probabilities from those of the weights that each token claims."""
        worst = 0.0
        now = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for version in set(answer.versions):
            self.model.load_state_dict(self.past[version])
            expected = self.source.token_logprobs(prompt, answer.token_ids)
            found = zip(answer.versions, answer.logprobs, expected, strict=True)
            worst = max(worst, *(abs(got - right) for stamp, got, right in found if stamp == version))
        self.model.load_state_dict(now)
        return worst


class World:
    """A trainer, a pool of servers and the sync between them."""

    def __init__(self, tmp_path, *, count, tied, restartable, transport, sleeps):
        self.trainer = Trainer(tied)
        self.folder = tmp_path / "served"
        write_served_model(self.trainer.model, build_tokenizer("qwen3", vocab_size=280), self.folder)
        self.trainer.remember(0)
        self.servers = [LocalServer(self.folder, name=str(index)) for index in range(count)]
        self.restarted = []
        self.pool = ServerPool(self.servers, SETTINGS, restart=self.restart if restartable else None)
        self.transport = transport or FolderTransport(tmp_path / "transport")
        self.probe = Probe.random(VOCABULARY, tolerance=1e-4)
        self.sync = RemoteSync(
            self.trainer.source,
            self.pool.group,
            self.transport,
            self.probe,
            sleeps=sleeps,
            load_timeout_s=30,
            return_timeout_s=60,
        )

    async def restart(self, index):
        server = LocalServer(self.folder, name=f"{index}-again-{len(self.restarted)}")
        await server.connect(deadline_s=10)
        self.restarted.append(server)
        return server

    async def next_version(self):
        version = self.pool.version + 1
        self.trainer.learn()
        self.trainer.remember(version)
        return await self.sync.sync(version)

    def request(self, name, prompt=(1, 2, 3), max_tokens=100):
        params = SamplingParams(max_tokens=max_tokens, seed=len(name))
        return GenerateRequest(prompt_ids=list(prompt), params=params, session_id=name, request_id=name)

    @asynccontextmanager
    async def asked_meanwhile(self):
        """Three callers that ask again and again while the block runs; their prompts and answers."""
        ends, answers = asyncio.Event(), []

        async def caller(number):
            # out of step: whenever an answer ends, others are half written
            await self.pool.generate(self.request(f"c{number}", prompt=[number + 1, 0, 3], max_tokens=13 * number + 1))
            for turn in itertools.count():
                if ends.is_set():
                    return
                request = self.request(f"c{number}-{turn}", prompt=[number + 1, turn % 7, 3], max_tokens=40)
                answers.append((request.prompt_ids, await self.pool.generate(request)))

        async with asyncio.TaskGroup() as callers:
            for number in range(3):
                callers.create_task(caller(number))
            yield answers
            ends.set()

    async def close(self):
        await self.sync.close()
        await self.pool.close()


@pytest.fixture
async def world_of(tmp_path):
    worlds = []

    async def build(*, count=2, tied=True, restartable=True, transport=None, sleeps=False):
        world = World(tmp_path, count=count, tied=tied, restartable=restartable, transport=transport, sleeps=sleeps)
        worlds.append(world)
        await world.pool.start()
        return world

    yield build
    for world in worlds:
        await world.close()


@pytest.fixture
def until():
    """Let the event loop run until something is so."""

    async def wait(condition):
        for _ in range(100_000):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("it never came true")

    return wait
