"""An inference server inside this process, with real weights and faults on command: for tests of pools and weight sync.

server = LocalServer(folder, name="a")
pool = ServerPool([server, LocalServer(folder, name="b")])
...
server.kill()      # as SIGKILL: connections break, and nothing answers any more
server.hang()      # as SIGSTOP: connections stay open, and nothing answers
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.config.engines import LocalEngineConfig
from agentrl.engine import (
    Broadcast,
    GenerateRequest,
    Generation,
    InferenceServer,
    ServerLoad,
    ServerLost,
    SharedTensors,
    TensorLayout,
    TensorPart,
    UpdateGroup,
)
from agentrl.errors import EngineError
from agentrl.serving.local import LocalEngine
from support.local_worker import LocalWorker, decode_parts

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class ServerFaults:
    """What goes wrong when weights are loaded."""

    refuses: bool = False
    """It says that it failed."""
    keeps_version: bool = False
    """It says that it succeeded, and goes on with the old weights under the old version."""
    ignores: bool = False
    """It says that it succeeded, and goes on with the old weights under the new version."""
    skips: set[str] = field(default_factory=set)
    """Tensors that keep their old values."""
    hears: int | None = None
    """Runs of a broadcast after which it listens no more."""
    dies: bool = False
    """It is killed in the next broadcast."""


class LocalServer(InferenceServer):
    """Serves a model folder with `agentrl.serving.local.LocalEngine`.

    Args:
        folder: A Hugging Face folder.
        name: Becomes part of the address.
        config: Sizes.

    Attributes:
        faults: What goes wrong at the next loads; may be changed at any time.
        is_asleep: Its weights are gone.
        model: The weights that it serves.
    """

    def __init__(self, folder: Path, *, name: str, config: LocalEngineConfig | None = None) -> None:
        self.url = f"local://{name}"
        self.faults = ServerFaults()
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._engine = LocalEngine(self.model, config or LocalEngineConfig(max_num_seqs=16, cache_tokens=16_384))
        self.is_asleep = False
        self._worker = LocalWorker()
        self._stamps = {0: 0}
        self._is_paused = False
        self._is_dead = False
        self._answers = asyncio.Event()
        self._answers.set()

    def kill(self) -> None:
        """End it in the middle of whatever it does."""
        self._is_dead = True
        self._worker.leave()
        self._answers.set()
        self._closing = asyncio.ensure_future(self._engine.close())

    def hang(self) -> None:
        """Stop it in the middle of whatever it does; it keeps its connections."""
        self._answers.clear()
        self._engine._paused = True

    def wake(self) -> None:
        """Let it go on after `hang`."""
        self._answers.set()
        self._engine._paused = self._is_paused
        self._engine._work.set()

    async def _answer(self, work: Awaitable[T]) -> T:
        """What a client sees of some work of the server."""
        try:
            await self._reach()
        except BaseException:
            if asyncio.iscoroutine(work):
                work.close()
            raise
        try:
            answer = await work
        except EngineError as error:
            raise self._lost() if self._is_dead else error from None
        await self._reach()
        return answer

    async def _reach(self) -> None:
        await self._answers.wait()
        if self._is_dead:
            raise self._lost()

    def _lost(self) -> ServerLost:
        return ServerLost(f"server {self.url} cannot be reached", got="a closed connection")

    async def connect(self, *, deadline_s: float) -> None:
        """Start the engine."""
        await self._answer(self._engine.start())
        self.capabilities = self._engine.capabilities

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn."""
        answer = await self._answer(self._engine.generate(request))
        return replace(answer, versions=[self._stamps[version] for version in answer.versions])

    async def abort(self, request_id: str) -> bool:
        """End a request early."""
        return await self._answer(self._engine.abort(request_id))

    async def pause(self) -> None:
        """Hold all requests."""
        self._is_paused = True
        await self._answer(self._engine.pause())

    async def resume(self) -> None:
        """Go on."""
        self._is_paused = False
        await self._answer(self._engine.resume())

    async def load_weights(self, folder: Path, version: int) -> None:
        """Read a folder of safetensors, unless the faults say otherwise."""
        await self._answer(self._load(folder, version))

    async def _load(self, folder: Path, version: int) -> None:
        if self.faults.refuses:
            raise EngineError(f"{self.url} rejected the weights", got="a fault that was asked for")
        await self._take(await asyncio.to_thread(_read, folder), version)

    async def _take(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        if self.is_asleep:
            raise EngineError(f"{self.url} is asleep")
        if not self._is_paused:
            raise EngineError(f"{self.url} got weights while it samples", expected="a pause before the update")
        if self.faults.keeps_version:
            return
        own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        kept = set(own) if self.faults.ignores else self.faults.skips
        self._stamps[self._engine.version + 1] = version
        await self._engine.update_weights({**tensors, **{name: own[name] for name in kept}}, self._engine.version + 1)

    async def load_tensors(self, parts: Sequence[TensorPart], version: int) -> None:
        """Take tensors, unless the faults say otherwise."""
        await self._answer(self._take(await decode_parts(parts), version))

    async def open_weights(self, shared: Sequence[SharedTensors], version: int) -> None:
        """Take tensors out of the trainer's memory, unless the faults say otherwise."""
        await self.load_tensors([tensors.part for tensors in shared], version)

    async def workers(self) -> int:
        """One."""
        return 1

    async def join_group(self, group: UpdateGroup) -> None:
        """Meet the trainer."""
        await self._answer(self._worker.join(group))

    async def receive_weights(
        self, layouts: Sequence[TensorLayout], group: UpdateGroup, broadcast: Broadcast, version: int
    ) -> None:
        """Take a broadcast, unless the faults say otherwise."""
        if self.faults.dies:
            self.kill()
        await self._answer(self._hear(layouts, broadcast, version))

    async def _hear(self, layouts: Sequence[TensorLayout], broadcast: Broadcast, version: int) -> None:
        await self._take(await self._worker.receive(layouts, broadcast, hears=self.faults.hears), version)

    async def sleep(self) -> None:
        """Lose the weights."""
        await self._reach()
        self.is_asleep = True
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()

    async def wake_up(self) -> None:
        """Take weights again."""
        await self._reach()
        self.is_asleep = False

    async def checksums(self) -> Mapping[str, str]:
        """Of the model's tensors."""
        await self._reach()
        return {name: _checksum(tensor) for name, tensor in self.model.state_dict().items()}

    async def weight_version(self) -> int:
        """Version of the weights that it says it serves."""
        await self._reach()
        return self._stamps[self._engine.version]

    async def load(self) -> ServerLoad:
        """The engine's own count."""
        await self._reach()
        metrics = self._engine.metrics()
        return ServerLoad(
            running=metrics.running,
            waiting=metrics.waiting,
            cache_used=metrics.details["reserved_tokens"] / self._engine.config.cache_tokens,
            preemptions=int(metrics.details["preemptions"]),
            prompt_tokens=metrics.prompt_tokens,
            cached_tokens=metrics.cached_tokens,
            sampled_tokens=metrics.sampled_tokens,
        )

    async def is_healthy(self, *, deadline_s: float) -> bool:
        """Whether it answers."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._reach()
        except (TimeoutError, ServerLost):
            return False
        return True

    async def close(self) -> None:
        """End it: there is no process that could go on."""
        await self._engine.close()


def _checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()[:16]


def _read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
