"""Weight sync: weights are prepared while servers continue, loaded while they are paused, and verified on each server.

    prepare ──► pause ──► load on all servers at once ──► version ──► resume ──► probe all servers ──► record
    (episodes continue)   └ a server that fails is removed                       └ one that differs stops training

A returning server loads the same weights, and is compared with the recorded answers of the probe, because the trainer
may be changing its weights at that time.

This module also syncs an engine in this process, lets servers sleep during training, and syncs several adapters of one
engine: only changed adapters are sent, and each is probed separately.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from agentrl.engine import AdapterVersions, InferenceServer, PolicyEngine
from agentrl.errors import AgentRLError, EngineError, TrainingError
from agentrl.errors.deadlines import async_boundary
from agentrl.weights.contract import PreparedWeights, ServerGroup, SyncReport, Transport, WeightSource, WeightSync
from agentrl.weights.folder import AdapterTransport, WrittenWeights
from agentrl.weights.verify import Comparison, Probe, ProbedEngine, RecordedAnswer, name_tensors

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
        released_bytes: Bytes released on this process's GPU by the last sleep; 0 without a GPU.
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
        """Wake one server if it sleeps, or may sleep because it did not answer a request in time."""
        if server in self._asleep:
            await server.wake_up()
            self._asleep.discard(server)


def free_bytes() -> int:
    """Return the free bytes of this process's GPU; 0 before it uses one, to avoid a context on a server's GPU."""
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
        """Compare all servers with the trainer; the first call syncs before, which tests the transport."""
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
        """Put the servers to sleep, if the config says so."""
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
        """Compare a server with the recorded answers, or with the trainer during a sync, when there are none."""
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
        """Close the transport. Sleeping servers wake with their last weights, as attached ones keep running."""
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


class WrittenAdapters(PreparedWeights):
    """Adapters in one folder each; some may be older than the version. `in_use` returns the newest folders."""

    def __init__(
        self,
        written: Mapping[str, WrittenWeights],
        *,
        version: int,
        size: int,
        seconds: float,
        in_use: Callable[[], Mapping[str, WrittenWeights]],
    ) -> None:
        super().__init__(version=version, size=size, seconds=seconds)
        self._written, self._in_use = written, in_use

    async def give_to(self, server: InferenceServer) -> None:
        """Tell the server to read the folders that it has not read yet."""
        await server.load_adapters({name: one.folder for name, one in self._written.items()}, self.version)

    def tensors(self) -> Mapping[str, Tensor]:
        """Read the tensors from the folders."""
        return {f"{name}/{key}": tensor for name, one in self._written.items() for key, tensor in one.tensors().items()}

    async def discard(self) -> None:
        """Remove the folders of adapters for which a newer one exists."""
        newest = self._in_use()
        for name, one in self._written.items():
            if newest.get(name) is not one:
                await one.discard()


class AdaptersTransport(Transport):
    """Transport of several adapters, with tensors named ``ADAPTER/PARAMETER``; only changed adapters are written.

    Args:
        transports: Transports by adapter.
        versions: Function that returns the version of each adapter; an adapter is written when its version changes.
    """

    def __init__(self, transports: Mapping[str, AdapterTransport], versions: Callable[[], Mapping[str, int]]) -> None:
        self._transports, self._versions = transports, versions
        self._written: dict[str, WrittenWeights] = {}
        self._written_versions: dict[str, int] = {}

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> WrittenAdapters:
        """Write the adapters whose version has changed."""
        versions, size, seconds = self._versions(), 0, 0.0
        for name, transport in self._transports.items():
            if self._written_versions.get(name) == versions[name]:
                continue
            own = {key.removeprefix(f"{name}/"): weights[key] for key in weights if key.startswith(f"{name}/")}
            written = await transport.prepare(own, version)
            self._written = {**self._written, name: written}
            self._written_versions[name] = versions[name]
            size, seconds = size + written.size, seconds + written.seconds
        return WrittenAdapters(self._written, version=version, size=size, seconds=seconds, in_use=lambda: self._written)

    async def close(self) -> None:
        """Remove all folders. Idempotent."""
        for transport in self._transports.values():
            await transport.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersProbe(Probe):
    """Probe that compares each adapter with its own trainer."""

    sources: Mapping[str, WeightSource]
    """Weight sources by adapter name."""
    differences: dict[str, float] = field(default_factory=dict)
    """Maximum difference of each adapter in the latest comparison."""

    @classmethod
    def from_probe(cls, probe: Probe, sources: Mapping[str, WeightSource]) -> AdaptersProbe:
        """Make the probe of every adapter from that of one model."""
        return cls(
            prompts=probe.prompts,
            tolerance=probe.tolerance,
            mean_tolerance=probe.mean_tolerance,
            answer_timeout_s=probe.answer_timeout_s,
            sources=sources,
        )

    def of(self, adapter: str) -> Probe:
        """Return the probe of one adapter."""
        return Probe(
            prompts=self.prompts,
            answer_tokens=self.answer_tokens,
            tolerance=self.tolerance,
            mean_tolerance=self.mean_tolerance,
            answer_timeout_s=self.answer_timeout_s,
            adapter=adapter,
        )

    async def compare(
        self, engine: ProbedEngine, trainer: WeightSource, *, version: int, name: str = "the engine"
    ) -> Comparison:
        """Compare every adapter; the answers are in the order of `sources`."""
        answers: list[RecordedAnswer] = []
        for adapter, source in self.sources.items():
            own = f"adapter {adapter} of {name}"
            found = await self.of(adapter).compare(engine, source, version=version, name=own)
            self.differences[adapter] = found.difference
            answers += found.answers
        return Comparison(difference=max(self.differences.values()), answers=answers)

    async def compare_recorded(
        self, engine: ProbedEngine, recorded: Sequence[RecordedAnswer], *, version: int, name: str = "the engine"
    ) -> float:
        """Compare every adapter with its recorded answers."""
        found, count = [], len(self.prompts)
        for number, adapter in enumerate(self.sources):
            own, label = recorded[number * count : (number + 1) * count], f"adapter {adapter} of {name}"
            found.append(await self.of(adapter).compare_recorded(engine, own, version=version, name=label))
        return max(found)


class AdaptersSync(WeightSync):
    """Weight sync of several adapters, which publishes each adapter's version before the engine samples with it."""

    def __init__(
        self,
        inner: WeightSync,
        engine: PolicyEngine,
        published: AdapterVersions,
        probe: AdaptersProbe,
        versions: Callable[[], Mapping[str, int]],
    ) -> None:
        self._inner, self._engine, self._probe = inner, engine, probe
        self._published, self._versions = published, versions

    async def sync(self, version: int) -> SyncReport:
        """Send the current adapters to the engine, and verify each of them."""
        self._published.publish(version, self._versions())
        report = await self._inner.sync(version)
        return replace(report, adapters=dict(self._probe.differences))

    async def verify(self) -> float:
        """Compare the current weights of engine and trainers."""
        self._published.publish(self._engine.version, self._versions())
        return await self._inner.verify()

    async def release_memory(self) -> None:
        """Let the engine release its memory for the trainer until the next sync."""
        await self._inner.release_memory()

    async def close(self) -> None:
        """Release all resources."""
        await self._inner.close()
