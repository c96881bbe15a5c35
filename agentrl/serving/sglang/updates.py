"""Weight updates of one SGLang server, by each supported transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from agentrl.engine import Broadcast, TensorLayout, TensorPart, UpdateGroup
from agentrl.errors import EngineError
from agentrl.serving.http import HttpSession, Refused
from agentrl.serving.sglang.wire import decode_checksums, encode_broadcast, encode_tensors, encode_update

BEGIN = "/begin_weight_update"
END = "/end_weight_update"
FAILED_S = 10.0
"""Timeout of the cleanup request after a failure."""
LEAVING_S = 10.0


class SGLangUpdates:
    """Part of `SGLangServer` that updates weights. Errors are those of `agentrl.serving.http.HttpSession`.

    Args:
        http: Connections to the server.
        timeout_s: Timeout of one request.
        has_sessions: Send a begin and an end around an update in parts: SGLang requires it since 0.5.21, and has no
            such routes before.
        workers: Number of processes that hold weights.
    """

    def __init__(self, http: HttpSession, *, timeout_s: float, has_sessions: bool = False, workers: int = 1) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._has_sessions = has_sessions
        self._workers = workers

    async def workers(self) -> int:
        """Return the number of processes that hold weights."""
        return self._workers

    async def from_folder(self, folder: Path, version: int) -> None:
        """Load weights from a folder."""
        await self._post("/update_weights_from_disk", encode_update(folder, version))

    async def from_tensors(self, parts: Sequence[TensorPart], version: int) -> None:
        """Send tensors; the last part sets the version and clears the caches."""
        async with self._session():
            for number, part in enumerate(parts):
                last = version if number == len(parts) - 1 else None
                body = encode_tensors(await part(), workers=self._workers, version=last)
                await self._post("/update_weights_from_tensor", body)

    async def from_broadcast(
        self, layouts: Sequence[TensorLayout], group: UpdateGroup, broadcast: Broadcast, version: int
    ) -> None:
        """Load broadcast weights; the last broadcast sets the version and clears the caches."""
        async with self._session():
            for number, layout in enumerate(layouts):
                last = version if number == len(layouts) - 1 else None
                body = encode_broadcast(layout, group=group.name, version=last)
                await asyncio.gather(self._post("/update_weights_from_distributed", body), broadcast(number))

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[None]:
        """Open an update session around the block; it is closed after a failure, too."""
        if not self._has_sessions:
            yield
            return
        try:
            await self._post(BEGIN, {})
        except Refused:  # a trainer that died left a session open
            await self._post(END, {})
            await self._post(BEGIN, {})
        try:
            yield
        except BaseException:
            with suppress(EngineError):
                await self._http.post(END, {}, deadline_s=FAILED_S)
            raise
        await self._post(END, {})

    async def join_group(self, group: UpdateGroup) -> None:
        """Let the server's workers join a process group."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._post("/init_weights_update_group", body)

    async def leave_group(self, group: UpdateGroup) -> None:
        """Let the server's workers leave a process group, as SGLang does not leave groups by itself."""
        body = {"group_name": group.name}
        await self._http.post("/destroy_weights_update_group", body, deadline_s=LEAVING_S, late=EngineError)

    async def checksums(self) -> Mapping[str, str]:
        """Return the checksums of the weights, by name.

        Empty with several workers, as each has a part of every tensor. On a GPU the checksums are not SHA-256.
        """
        answer = await self._post("/weights_checker", {"action": "checksum"})
        return decode_checksums(answer) if self._workers == 1 else {}

    async def sleep(self) -> None:
        """Release the memory of weights and cache; on a CPU, SGLang keeps it."""
        await self._post("/release_memory_occupation", {})

    async def wake_up(self) -> None:
        """Allocate the memory again."""
        await self._post("/resume_memory_occupation", {})

    async def _post(self, route: str, body: Mapping[str, Any]) -> Any:
        return await self._http.post(route, body, deadline_s=self._timeout_s, late=EngineError)
