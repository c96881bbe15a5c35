"""New weights for one server, in each of the ways in which SGLang takes them."""

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
"""Deadline of what is tried after a failure."""
LEAVING_S = 10.0


class SGLangUpdates:
    """Part of `SGLangServer` that updates weights. Failures are those of `agentrl.serving.http.HttpSession`.

    Args:
        http: The connections to the server.
        timeout_s: Deadline of one request.
        has_sessions: Updates in parts stand between a begin and an end: SGLang asks for that from 0.5.21 on, and has
            no such routes before.
        workers: Processes that hold weights.
    """

    def __init__(self, http: HttpSession, *, timeout_s: float, has_sessions: bool = False, workers: int = 1) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._has_sessions = has_sessions
        self._workers = workers

    async def workers(self) -> int:
        """Processes that hold weights."""
        return self._workers

    async def from_folder(self, folder: Path, version: int) -> None:
        """Let it read a folder."""
        await self._post("/update_weights_from_disk", encode_update(folder, version))

    async def from_tensors(self, parts: Sequence[TensorPart], version: int) -> None:
        """Send tensors; the last part names the version and clears the caches."""
        async with self._session():
            for number, part in enumerate(parts):
                last = version if number == len(parts) - 1 else None
                body = encode_tensors(await part(), workers=self._workers, version=last)
                await self._post("/update_weights_from_tensor", body)

    async def from_broadcast(
        self, layouts: Sequence[TensorLayout], group: UpdateGroup, broadcast: Broadcast, version: int
    ) -> None:
        """Let it receive broadcasts; the last one names the version and clears the caches."""
        async with self._session():
            for number, layout in enumerate(layouts):
                last = version if number == len(layouts) - 1 else None
                body = encode_broadcast(layout, group=group.name, version=last)
                await asyncio.gather(self._post("/update_weights_from_distributed", body), broadcast(number))

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[None]:
        """Around an update in parts; a failure leaves no session behind."""
        if not self._has_sessions:
            yield
            return
        try:
            await self._post(BEGIN, {})
        except Refused:  # left by a trainer that died
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
        """Let its workers join a process group."""
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
        """Let its workers leave a process group: SGLang keeps all that it joined."""
        body = {"group_name": group.name}
        await self._http.post("/destroy_weights_update_group", body, deadline_s=LEAVING_S, late=EngineError)

    async def checksums(self) -> Mapping[str, str]:
        """Ask for checksums; none with several workers, which have parts, and other ones than SHA-256 on a GPU."""
        answer = await self._post("/weights_checker", {"action": "checksum"})
        return decode_checksums(answer) if self._workers == 1 else {}

    async def sleep(self) -> None:
        """Give back the memory of weights and cache; on the CPU SGLang keeps it."""
        await self._post("/release_memory_occupation", {})

    async def wake_up(self) -> None:
        """Take the memory again."""
        await self._post("/resume_memory_occupation", {})

    async def _post(self, route: str, body: Mapping[str, Any]) -> Any:
        return await self._http.post(route, body, deadline_s=self._timeout_s, late=EngineError)
