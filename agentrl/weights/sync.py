"""Weight sync: weights are prepared while servers run, loaded while they are paused, and verified on each server.

    prepare ──► pause ──► load on all servers at once ──► version ──► resume ──► probe all servers ──► record
    (episodes continue)   └ a server that fails is removed                       └ one that differs stops training

A returning server loads the same weights, and is compared with the recorded answers of the probe, because the trainer
may be changing its weights at that time.

This module also syncs an engine in this process, and lets servers sleep during training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch

from agentrl.engine import InferenceServer, PolicyEngine
from agentrl.errors import AgentRLError, EngineError, TrainingError
from agentrl.errors.deadlines import async_boundary
from agentrl.weights.contract import PreparedWeights, ServerGroup, SyncReport, Transport, WeightSource, WeightSync
from agentrl.weights.verify import Probe, RecordedAnswer, name_tensors

SERVER_CHANGE_S = 120.0
cuda: Any = torch.cuda
"""Untyped alias: not all of the module has types."""
_log = logging.getLogger(__name__)


class InProcessSync(WeightSync):
    """Weight sync with an engine of this process.

    Args:
        trainer: Source of the weights.
        engine: Engine that serves them.
        shared: True if the engine uses the trainer's own tensors, so that nothing is copied; only valid if nothing is
            sampled during optimizer steps.
        probe: Probe for `verify`.
    """

    def __init__(self, trainer: WeightSource, engine: PolicyEngine, *, shared: bool, probe: Probe) -> None:
        self._trainer = trainer
        self._engine = engine
        self._shared = shared
        self._probe = probe

    async def sync(self, version: int) -> SyncReport:
        """Serve the trainer's weights as `version`."""
        began = time.perf_counter()
        await self._engine.pause()
        await self._engine.update_weights(None if self._shared else self._trainer.weights(), version)
        await self._engine.resume()
        transported = time.perf_counter()
        difference = await self.verify()
        return SyncReport(
            version=version,
            transport_s=transported - began,
            verify_s=time.perf_counter() - transported,
            probe_difference=difference,
        )

    async def verify(self) -> float:
        """Compare engine and trainer without a sync."""
        return (await self._probe.compare(self._engine, self._trainer, version=self._engine.version)).difference


class ServerSleep:
    """Sleep of a group's servers. The caller must hold the group's lock `changing`.

    Attributes:
        is_asleep: True while the servers sleep.
        released_bytes: Bytes that the last sleep released on this process's GPU; 0 without a GPU.
    """

    def __init__(self, group: ServerGroup) -> None:
        self._group = group
        self._asleep: WeakSet[InferenceServer] = WeakSet()
        self.is_asleep = False
        self.released_bytes = 0

    async def sleep(self) -> None:
        """Pause all servers and put them to sleep; a server that fails is removed."""
        await self._group.pause()
        before = free_bytes()
        self.is_asleep = True
        await self._group.change(self._put_to_sleep, what="falling asleep", deadline_s=SERVER_CHANGE_S)
        self.released_bytes = max(0, free_bytes() - before)

    async def _put_to_sleep(self, server: InferenceServer) -> None:
        self._asleep.add(server)
        await server.sleep()

    async def wake_up(self) -> None:
        """Wake the sleeping servers, which stay paused; a server that fails is removed."""
        if not self.is_asleep:
            return
        cuda.empty_cache()  # release memory that torch caches
        await self._group.change(self.wake, what="waking up", deadline_s=SERVER_CHANGE_S)
        self.is_asleep = False

    async def wake(self, server: InferenceServer) -> None:
        """Wake a server that sleeps, or that may sleep because it did not answer a request in time."""
        if server in self._asleep:
            await server.wake_up()
            self._asleep.discard(server)


def free_bytes() -> int:
    """Return the free bytes of this process's GPU; 0 if it uses none yet, to avoid a CUDA context on a server's GPU."""
    return int(cuda.mem_get_info()[0]) if cuda.is_initialized() else 0


class RemoteSync(WeightSync):
    """Weight sync with a group of servers.

    Args:
        trainer: Source of the weights.
        group: Servers; the group calls this object to update a returning server.
        transport: Transport of the weights; closed with this object.
        probe: Probe for `verify`.
        sleeps: True if `release_memory` puts the servers to sleep until the next sync.
        load_timeout_s: Seconds before a server's load fails.
        return_timeout_s: Seconds that a sync waits for a server to return if all are lost; the group usually removes
            them earlier.
    """

    def __init__(
        self,
        trainer: WeightSource,
        group: ServerGroup,
        transport: Transport,
        probe: Probe,
        *,
        sleeps: bool = False,
        load_timeout_s: float = 600.0,
        return_timeout_s: float = 3600.0,
    ) -> None:
        self._trainer = trainer
        self._group = group
        self._transport = transport
        self._probe = probe
        self._load_timeout_s = load_timeout_s
        self._return_timeout_s = return_timeout_s
        self._server_sleep = ServerSleep(group)
        self._uses_sleep = sleeps
        self._current: PreparedWeights | None = None
        self._recorded: Sequence[RecordedAnswer] | None = None
        group.connect_sync(deliver=self.deliver, bring_up_to_date=self.bring_up_to_date)

    async def sync(self, version: int) -> SyncReport:
        """Serve the trainer's weights as `version` on all servers, and verify each server."""
        began = time.perf_counter()
        prepared, load_s = await self.deliver(self._trainer.weights(), version)
        transported = time.perf_counter()
        differences = await self._verify_servers()
        return SyncReport(
            version=version,
            transport_s=transported - began,
            verify_s=time.perf_counter() - transported,
            probe_difference=max(differences.values()),
            servers=len(differences),
            bytes=prepared.size,
            prepare_s=prepared.seconds,
            load_s=load_s,
            released_bytes=self._server_sleep.released_bytes if self._uses_sleep else None,
        )

    async def verify(self) -> float:
        """Compare all servers with the trainer; the first call syncs first, to test the transport."""
        if self._current is None:
            return (await self.sync(self._group.version)).probe_difference
        return max((await self._verify_servers()).values())

    async def deliver(self, weights: Mapping[str, Any] | None, version: int) -> tuple[PreparedWeights, float]:
        """Send weights to all servers without verifying them; ``None`` stands for the trainer's weights.

        Servers that were paused stay paused.

        Returns:
            The prepared weights, and the seconds for which the servers were paused.
        """
        given = self._trainer.weights() if weights is None else weights
        prepared = await self._transport.prepare(given, version)
        async with self._group.changing:
            began = time.perf_counter()
            old, self._current, self._recorded = self._current, prepared, None
            await self._give(prepared)
            load_s = time.perf_counter() - began
            if old is not None:
                await old.discard()
        return prepared, load_s

    async def _give(self, prepared: PreparedWeights) -> None:
        """Wake and pause all servers, and send them weights; the caller must hold `changing`."""
        stay_paused = self._group.is_paused and not self._server_sleep.is_asleep
        try:
            await self._server_sleep.wake_up()
            if not stay_paused:
                await self._group.pause()
            await self._group.change(
                lambda server: _load(server, prepared),
                what=f"the update to version {prepared.version}",
                deadline_s=self._load_timeout_s,
            )
            self._group.publish(prepared.version)
        finally:
            if not stay_paused:
                await self._group.resume()

    async def release_memory(self) -> None:
        """Put the servers to sleep if the config enables it."""
        if self._uses_sleep:
            async with self._group.changing:
                await self._server_sleep.sleep()

    async def bring_up_to_date(self, server: InferenceServer) -> None:
        """Send the current weights to a returning server, and verify it; the caller must hold `changing`."""
        current = self._current
        if current is None:
            return
        async with async_boundary(EngineError, f"the update of {server.url}", deadline_s=self._load_timeout_s):
            await self._server_sleep.wake(server)
            await server.pause()
            await _load(server, current)
            await server.resume()
        await self._compare(server, current)

    async def _verify_servers(self) -> dict[str, float]:
        """Probe the servers; return the maximum difference of each, for at least one server."""
        differences: dict[str, float] = {}
        wrong: dict[InferenceServer, TrainingError] = {}

        async def compare(server: InferenceServer) -> None:
            try:
                differences[server.url] = await self._compare_live(server, self._group.version)
            except TrainingError as error:
                wrong[server] = error

        while not differences and not wrong:
            await self._group.wait_for_server(deadline_s=self._return_timeout_s)
            await self._group.each(compare, what="the probe", deadline_s=SERVER_CHANGE_S)
        for server, error in wrong.items():
            raise await name_tensors(error, server, self._trainer.weights) from error
        return differences

    async def _compare(self, server: InferenceServer, current: PreparedWeights) -> None:
        """Compare a server with the recorded answers or, during a sync, when there are none, with the trainer."""
        recorded = self._recorded
        weights = self._trainer.weights if recorded is None else current.tensors
        try:
            async with async_boundary(EngineError, f"the probe of {server.url}", deadline_s=SERVER_CHANGE_S):
                if recorded is None:
                    await self._compare_live(server, current.version)
                else:
                    name = f"server {server.url}"
                    await self._probe.compare_recorded(server, recorded, version=current.version, name=name)
        except TrainingError as error:
            raise await name_tensors(error, server, weights) from error

    async def _compare_live(self, server: InferenceServer, version: int) -> float:
        found = await self._probe.compare(server, self._trainer, version=version, name=f"server {server.url}")
        self._recorded = found.answers
        return found.difference

    async def close(self) -> None:
        """Close the transport, and wake sleeping servers with their last weights: attached servers keep running."""
        try:
            if self._server_sleep.is_asleep and self._current is not None:
                what = "waking the servers"
                async with async_boundary(EngineError, what, deadline_s=SERVER_CHANGE_S), self._group.changing:
                    await self._give(self._current)
        except AgentRLError as error:
            _log.warning("some servers stay asleep: %s", error)
        finally:
            await self._transport.close()


async def _load(server: InferenceServer, prepared: PreparedWeights) -> None:
    await prepared.give_to(server)
    version = await server.weight_version()
    if version != prepared.version:
        raise EngineError(
            f"{server.url} serves the wrong version after an update", got=version, expected=prepared.version
        )
