"""A vLLM server as an `InferenceServer`."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.config.engines import ServerEngineConfig
from agentrl.engine import (
    Broadcast,
    Capabilities,
    GenerateRequest,
    Generation,
    InferenceServer,
    ServerLoad,
    ServerLost,
    SharedTensors,
    TensorLayout,
    UpdateGroup,
)
from agentrl.errors import EngineError, UsageError
from agentrl.serving.http import HttpSession, Refused, decode_version
from agentrl.serving.request import check_request
from agentrl.serving.vllm.probe import probe, wait_until_healthy
from agentrl.serving.vllm.updates import VLLMUpdates
from agentrl.serving.vllm.wire import (
    LogprobConvention,
    check_convention,
    decode_answer,
    decode_load,
    encode_abort,
    encode_request,
)

GENERATE = "/inference/v1/generate"
PAUSE = "/pause?mode=keep&clear_cache=false"
ABORT = "/inference/v1/abort_requests"
FIRST_ABORT_WAIT_S = 0.05
LONGEST_ABORT_WAIT_S = 1.0


@dataclass(slots=True)
class _Running:
    """A request at the server."""

    wire_id: str
    over: asyncio.Event = field(default_factory=asyncio.Event)


class VLLMServer(InferenceServer):
    """Talks to one vLLM server, token ids in and out.

    Requests that run during a pause stay at the server; an update of the weights throws their key-value cache away, so
    that they go on from one computed anew.

    Args:
        url: Base address.
        config: Key, deadlines and the longest context.
        vocab_size: Entries of the model's vocabulary; vLLM does not tell.
    """

    def __init__(self, url: str, config: ServerEngineConfig, *, vocab_size: int) -> None:
        self.url = url.rstrip("/")
        self._config = config
        self._vocab_size = vocab_size
        self._http = HttpSession(self.url, api_key_variable=config.api_key_variable)
        self._updates = VLLMUpdates(self._http, timeout_s=config.timeout_s)
        self._running: dict[str, _Running] = {}
        self._convention: LogprobConvention | None = None
        self._is_adapted = False
        self._client = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()

    async def connect(self, *, deadline_s: float) -> None:
        """Wait until the server answers; check its version, its settings and the log-probabilities that it gives."""
        await wait_until_healthy(self._http, deadline_s=deadline_s)
        found = await probe(self._http, self._config, deadline_s=deadline_s)
        limit = min(found.max_context, self._config.max_context or found.max_context)
        self.capabilities = Capabilities(max_context=limit, vocab_size=self._vocab_size, routes=found.routes)
        self._convention = found.convention
        self._is_adapted = found.has_adapter and self._config.adapter_rank is not None

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Seeds are not sent: they are not reproducible under load, and on the CPU one of them ends
        the server's worker when the prefill of its prompt is cut in two.
        """
        if self._convention is None:
            raise EngineError(f"{self.url} is not connected", hint="await connect first")
        check_request(request, self.capabilities, self._running)
        check_convention(request.params, self._convention)
        running = _Running(wire_id=f"{request.request_id}-{self._client}-{next(self._numbers)}")
        limit = self.capabilities.max_context
        body = encode_request(request, wire_id=running.wire_id, max_context=limit, adapted=self._is_adapted)
        self._running[request.request_id] = running
        began = time.perf_counter()
        try:
            answer = await self._http.post(GENERATE, body, deadline_s=self._config.timeout_s, late=EngineError)
        except Refused as refused:
            raise await self._meaning(refused) from refused
        finally:
            del self._running[request.request_id]
            running.over.set()
        seconds = time.perf_counter() - began  # vLLM does not tell queueing and prefill apart
        return replace(decode_answer(answer, request.params.stop_token_ids), decode_s=seconds)

    async def _meaning(self, refused: Refused) -> EngineError | UsageError:
        """What an error status of a request means: vLLM answers 500 before it ends after a failure of its engine."""
        if refused.status in (400, 422):
            return UsageError(f"vLLM at {self.url} cannot serve a request", got=f"{refused.status}, {refused.said!r}")
        if refused.status >= 500 and not await self.is_healthy(deadline_s=self._config.health_timeout_s):
            return ServerLost(f"{self.url} has failed", got=f"{refused.status}, {refused.said!r}")
        return refused

    async def abort(self, request_id: str) -> bool:
        """End a request early; returns once it is over.

        vLLM says nothing about ids that it does not know, so that a request on its way there would be missed: the
        abort is repeated until the request ends.
        """
        running = self._running.get(request_id)
        if running is None:
            return False
        wait_s = FIRST_ABORT_WAIT_S
        async with asyncio.timeout(self._config.timeout_s):
            while not running.over.is_set():
                body = encode_abort(running.wire_id)
                await self._http.post(ABORT, body, deadline_s=self._config.health_timeout_s)
                try:
                    await asyncio.wait_for(running.over.wait(), wait_s)
                except TimeoutError:
                    wait_s = min(2 * wait_s, LONGEST_ABORT_WAIT_S)
        return True

    async def pause(self) -> None:
        """Hold all requests, with what they have computed."""
        await self._control(PAUSE)

    async def resume(self) -> None:
        """Go on; after a sleep, with the memory of the cache."""
        await self._updates.wake_cache()
        await self._control("/resume")

    async def load_weights(self, folder: Path, version: int) -> None:
        """Read new weights while paused, throw away all caches, and only then name the version.

        After a failure (a folder that is not there) vLLM's weights are undefined, and its engine ends at the next
        request.

        Args:
            folder: Holds `lm_head.weight` as well, whether or not the model's head is its embedding.
            version: What tokens are stamped with from now on.
        """
        await self._check_paused()
        await self._updates.from_folder(folder, version)
        await self._check_version(version)

    async def load_adapter(self, folder: Path, version: int) -> None:
        """`load_weights`, of an adapter; from the first one on it answers all requests.

        Requests that are held go on with the new one.
        """
        await self._check_paused()
        await self._updates.from_adapter(folder, version, is_first=not self._is_adapted)
        self._is_adapted = True
        await self._check_version(version)

    async def workers(self) -> int:
        """Processes that hold weights."""
        return await self._updates.workers()

    async def join_group(self, group: UpdateGroup) -> None:
        """Let its workers join a process group; it leaves the one before."""
        await self._updates.join(group)

    async def receive_weights(
        self, layouts: Sequence[TensorLayout], group: UpdateGroup, broadcast: Broadcast, version: int
    ) -> None:
        """`load_weights`, from a broadcast in the group that was joined last."""
        await self._check_paused()
        await self._updates.from_broadcast(layouts, broadcast, version)
        await self._check_version(version)

    async def open_weights(self, shared: Sequence[SharedTensors], version: int) -> None:
        """`load_weights`, out of the trainer's memory."""
        if await self.workers() > 1:
            raise UsageError(f"{self.url} has its weights in several processes", hint="set another engine.transport")
        await self._check_paused()
        await self._updates.from_memory(shared, version)
        await self._check_version(version)

    async def _check_paused(self) -> None:
        paused = await self._http.get("/is_paused", deadline_s=self._config.health_timeout_s)
        if paused != {"is_paused": True}:
            raise EngineError(f"{self.url} is not paused", got=paused, hint="pause before you load weights")

    async def _check_version(self, version: int) -> None:
        if (served := await self.weight_version()) != version:
            raise EngineError(f"{self.url} did not take the version", got=served, expected=version)

    async def checksums(self) -> Mapping[str, str]:
        """Those of the tensors that vLLM does not keep in a packed form of its own, as it does on the CPU."""
        return await self._updates.checksums()

    async def sleep(self) -> None:
        """Give back the memory of weights and cache; on the CPU vLLM says yes and keeps it."""
        await self._updates.sleep()

    async def wake_up(self) -> None:
        """Take the memory of the weights again, and stay paused."""
        await self._updates.wake_up()

    async def _control(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        return await self._http.post(route, body, deadline_s=self._config.timeout_s)

    async def weight_version(self) -> int:
        """Version that vLLM stamps tokens with."""
        info = await self._http.get("/weight_info", deadline_s=self._config.health_timeout_s)
        if not isinstance(info, dict) or "weight_version" not in info:
            raise EngineError(f"{self.url} does not tell its weights' version", got=info)
        return decode_version(info["weight_version"])

    async def load(self) -> ServerLoad:
        """Read ``/metrics``."""
        return decode_load(await self._http.get_text("/metrics", deadline_s=self._config.health_timeout_s))

    async def is_healthy(self, *, deadline_s: float) -> bool:
        """Whether ``/health`` answers 200 in time."""
        try:
            await self._http.get_text("/health", deadline_s=deadline_s)
        except EngineError:
            return False
        return True

    async def close(self) -> None:
        """Close the connections; vLLM ends their requests."""
        await self._http.close()
