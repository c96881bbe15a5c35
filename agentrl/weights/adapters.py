"""Sync of one or several adapters to servers that have the base model; only changed adapters are sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from agentrl.engine import AdapterVersions, InferenceServer, PolicyEngine
from agentrl.weights.contract import PreparedWeights, SyncReport, Transport, WeightSource, WeightSync
from agentrl.weights.folder import FolderTransport, WrittenWeights
from agentrl.weights.verify import Comparison, Probe, ProbedEngine, RecordedAnswer

AdapterWriter: TypeAlias = Callable[[Mapping[str, Tensor], Path], None]
"""Function that writes the tensors of an adapter to a folder, in peft's format."""


class WrittenAdapter(WrittenWeights):
    """An adapter in a folder."""

    async def give_to(self, server: InferenceServer) -> None:
        """Let the server load the folder."""
        await server.load_adapter(self.folder, self.version)


class AdapterTransport(FolderTransport):
    """Transport of a single adapter to servers that have the base model."""

    _prepared_class = WrittenAdapter

    def __init__(self, root: Path, write: AdapterWriter) -> None:
        super().__init__(root)
        self._write_adapter = write

    def _fill(self, weights: Mapping[str, Tensor], folder: Path) -> int:
        self._write_adapter(weights, folder)
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


class WrittenAdapterSet(PreparedWeights):
    """Adapters in one folder each, some of them from earlier versions. `in_use` returns the newest folders."""

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
        """Let the server load the folders that it has not loaded yet."""
        await server.load_adapters({name: one.folder for name, one in self._written.items()}, self.version)

    def tensors(self) -> Mapping[str, Tensor]:
        """Read the tensors from the folders."""
        return {f"{name}/{key}": tensor for name, one in self._written.items() for key, tensor in one.tensors().items()}

    async def discard(self) -> None:
        """Remove the folders of outdated adapters."""
        newest = self._in_use()
        for name, one in self._written.items():
            if newest.get(name) is not one:
                await one.discard()


class MultiAdapterTransport(Transport):
    """Transport of several adapters, with tensors named ``ADAPTER/PARAMETER``; only changed adapters are written.

    Args:
        transports: Transports by adapter.
        versions: Function that returns the version of each adapter; an adapter is written when its version changes.
    """

    def __init__(self, transports: Mapping[str, AdapterTransport], versions: Callable[[], Mapping[str, int]]) -> None:
        self._transports, self._versions = transports, versions
        self._written: dict[str, WrittenWeights] = {}
        self._written_versions: dict[str, int] = {}

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> WrittenAdapterSet:
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
        return WrittenAdapterSet(
            self._written, version=version, size=size, seconds=seconds, in_use=lambda: self._written
        )

    async def close(self) -> None:
        """Remove all folders. Idempotent."""
        for transport in self._transports.values():
            await transport.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiAdapterProbe(Probe):
    """Probe that compares each adapter with its own trainer."""

    sources: Mapping[str, WeightSource]
    """Weight sources by adapter name."""
    differences: dict[str, float] = field(default_factory=dict)
    """Maximum difference of each adapter in the latest comparison."""

    @classmethod
    def from_probe(cls, probe: Probe, sources: Mapping[str, WeightSource]) -> MultiAdapterProbe:
        """Create the probes of all adapters from a model's probe."""
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


class MultiAdapterSync(WeightSync):
    """Weight sync of several adapters, which publishes each adapter's version before the engine uses it."""

    def __init__(
        self,
        inner: WeightSync,
        engine: PolicyEngine,
        published: AdapterVersions,
        probe: MultiAdapterProbe,
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
