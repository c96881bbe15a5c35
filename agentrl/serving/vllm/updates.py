"""Weight updates of one paused vLLM server, by each supported transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.engine import Broadcast, SharedTensors, TensorLayout, UpdateGroup
from agentrl.errors import EngineError
from agentrl.serving.http import HttpSession, Refused, decoding
from agentrl.serving.vllm.wire import decode_checksums, encode_run

EXCHANGE = "exchange_adapter"
"""Method that `agentrl_vllm_adapter` adds to the server's workers."""

FAILED_S = 10.0
"""Timeout of the cleanup request after a failure."""


class VLLMUpdates:
    """Part of `VLLMServer` that updates weights. Errors are those of `agentrl.serving.http.HttpSession`."""

    def __init__(self, http: HttpSession, *, timeout_s: float) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._cache_sleeps = False
        self._loaded: list[str] = []
        """Adapters of the server, in the order in which they were loaded."""

    async def from_folder(self, folder: Path, version: int) -> None:
        """Load weights from a folder."""
        await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        await self._publish(version)

    async def from_adapters(self, folders: Mapping[str, Path], version: int) -> None:
        """Load adapters from folders, by their names at the server; other adapters do not change.

        vLLM's own route is used only for the first load of a name. A request remembers its adapter's files and would
        load them again, so later updates replace the tensors of the loaded adapter.
        """
        for name, folder in folders.items():
            if name not in self._loaded:
                body = {"lora_name": name, "lora_path": str(folder)}
                await self._http.order("/v1/load_lora_adapter", body, deadline_s=self._timeout_s)
                self._loaded.append(name)
            kwargs = {"folder": str(folder), "number": self._loaded.index(name) + 1}
            await self._post("/collective_rpc", {"method": EXCHANGE, "kwargs": kwargs})
        await self._publish(version)

    async def from_broadcast(self, layouts: Sequence[TensorLayout], broadcast: Broadcast, version: int) -> None:
        """Load weights that are broadcast in the group that the server joined last."""
        async with self._update(version):
            for number, layout in enumerate(layouts):
                body = {"update_info": encode_run(layout)}
                await asyncio.gather(self._post("/update_weights", body), broadcast(number))

    async def from_memory(self, shared: Sequence[SharedTensors], version: int) -> None:
        """Load weights from this process's memory."""
        async with self._update(version):
            for tensors in shared:
                info = encode_run(tensors.layout, handle=tensors.handle())
                await self._post("/update_weights", {"update_info": info})

    @asynccontextmanager
    async def _update(self, version: int) -> AsyncIterator[None]:
        """Open an update around the block and publish its version; it is closed after a failure, too."""
        try:
            await self._post("/start_weight_update")
        except Refused:  # a trainer that died left an update open
            await self._post("/finish_weight_update", {})
            await self._post("/start_weight_update")
        try:
            yield
        except BaseException:
            with suppress(EngineError):  # otherwise the next update cannot begin
                await self._http.post("/finish_weight_update", {}, deadline_s=FAILED_S)
            raise
        await self._post("/finish_weight_update", {})
        await self._publish(version)

    async def _publish(self, version: int) -> None:
        """Clear all caches, then set the version."""
        reset = await self._post("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
        if reset != {"success": True}:
            raise EngineError(f"{self._http.url} did not clear the cache of the old weights", got=reset)
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def workers(self) -> int:
        """Return the number of processes that hold weights."""
        answer = await self._http.get("/get_world_size", deadline_s=self._timeout_s)
        with decoding(f"{self._http.url} does not report its number of workers", answer):
            return int(answer["world_size"])

    async def join_group(self, group: UpdateGroup) -> None:
        """Let the server's workers join a process group and leave the previous one."""
        await self._post("/init_weight_transfer_engine", {"init_info": asdict(group)})

    async def checksums(self) -> Mapping[str, str]:
        """Return the checksums of the weights, except tensors that vLLM keeps in a packed form, as on the CPU."""
        return decode_checksums(await self._post("/weight_checker", {"action": "checksum"}))

    async def sleep(self) -> None:
        """Release the memory of weights and cache while requests are held; on a CPU, vLLM keeps it."""
        self._cache_sleeps = True
        await self._post("/sleep?level=2&mode=keep")

    async def wake_up(self) -> None:
        """Allocate the memory of the weights again; the server stays paused until `wake_cache`."""
        await self._post("/wake_up?tags=weights")

    async def wake_cache(self) -> None:
        """Allocate the memory of the cache again if it was released; the weights must be loaded."""
        if self._cache_sleeps:
            await self._post("/wake_up?tags=kv_cache")
            self._cache_sleeps = False

    async def _post(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        return await self._http.post(route, body, deadline_s=self._timeout_s)
