"""New weights for one paused server, in each of the ways in which vLLM takes them."""

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
"""What `agentrl_vllm_adapter` adds to the server's workers."""

FAILED_S = 10.0
"""Deadline of what is tried after a failure."""


class VLLMUpdates:
    """Part of `VLLMServer` that updates weights. Failures are those of `agentrl.serving.http.HttpSession`."""

    def __init__(self, http: HttpSession, *, timeout_s: float) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._cache_sleeps = False
        self._loaded: list[str] = []
        """Adapters that the server knows, in the order in which it came to know them."""

    async def from_folder(self, folder: Path, version: int) -> None:
        """Let it read a folder."""
        await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        await self._publish(version)

    async def from_adapters(self, folders: Mapping[str, Path], version: int) -> None:
        """Let it read the files of adapters, by their names at the server; others that it has stay as they are.

        Only the first files of a name are loaded by vLLM's own route: requests remember the files of the adapter that
        they name, and would bring it back, so that later ones replace its tensors.
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
        """Let it receive what is broadcast in the group that it joined last."""
        async with self._update(version):
            for number, layout in enumerate(layouts):
                body = {"update_info": encode_run(layout)}
                await asyncio.gather(self._post("/update_weights", body), broadcast(number))

    async def from_memory(self, shared: Sequence[SharedTensors], version: int) -> None:
        """Let it read memory of this process."""
        async with self._update(version):
            for tensors in shared:
                info = encode_run(tensors.layout, handle=tensors.handle())
                await self._post("/update_weights", {"update_info": info})

    @asynccontextmanager
    async def _update(self, version: int) -> AsyncIterator[None]:
        """Around an update in parts; a failure leaves none behind."""
        try:
            await self._post("/start_weight_update")
        except Refused:  # left by a trainer that died
            await self._post("/finish_weight_update", {})
            await self._post("/start_weight_update")
        try:
            yield
        except BaseException:
            with suppress(EngineError):  # or the next update could not begin
                await self._http.post("/finish_weight_update", {}, deadline_s=FAILED_S)
            raise
        await self._post("/finish_weight_update", {})
        await self._publish(version)

    async def _publish(self, version: int) -> None:
        """Throw away all caches, and only then name the version."""
        reset = await self._post("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
        if reset != {"success": True}:
            raise EngineError(f"{self._http.url} keeps a cache of the old weights", got=reset)
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def workers(self) -> int:
        """Processes that hold weights."""
        answer = await self._http.get("/get_world_size", deadline_s=self._timeout_s)
        with decoding(f"{self._http.url} does not report how many workers it has", answer):
            return int(answer["world_size"])

    async def join_group(self, group: UpdateGroup) -> None:
        """Let its workers join a process group, and leave the one before."""
        await self._post("/init_weight_transfer_engine", {"init_info": asdict(group)})

    async def checksums(self) -> Mapping[str, str]:
        """Ask for checksums of the tensors that vLLM does not keep in a packed form, as it does on the CPU."""
        return decode_checksums(await self._post("/weight_checker", {"action": "checksum"}))

    async def sleep(self) -> None:
        """Give back the memory of weights and cache while requests are held; on the CPU vLLM keeps it."""
        self._cache_sleeps = True
        await self._post("/sleep?level=2&mode=keep")

    async def wake_up(self) -> None:
        """Take the memory of the weights again, and stay paused: vLLM goes on when it has that of the cache, too."""
        await self._post("/wake_up?tags=weights")

    async def wake_cache(self) -> None:
        """Take the memory of the cache again, if it was given back; the weights must have been loaded."""
        if self._cache_sleeps:
            await self._post("/wake_up?tags=kv_cache")
            self._cache_sleeps = False

    async def _post(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        return await self._http.post(route, body, deadline_s=self._timeout_s)
