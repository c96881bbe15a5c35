"""Several adapters of a run: models, trainers, weight sync, and an engine for evaluation."""

from __future__ import annotations

import asyncio
import copy
import filecmp
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from agentrl.builders.adapter_roles import check_role_adapters, roles_of_adapters, trained_roles
from agentrl.builders.adapters import adapter_transport
from agentrl.builders.models import embedding_rows, find_adapter, load_images
from agentrl.builders.servers import ServedModel, open_pool
from agentrl.config.config import Config
from agentrl.config.derived import adapter_config
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.engine import AdapterVersions, PolicyEngine
from agentrl.errors import UsageError
from agentrl.models.load import load_model
from agentrl.models.lora import adapter_folder, adapters_in, find_base, read_lora_config, with_adapter
from agentrl.render.renderer import Renderer
from agentrl.rollout.policies import RoleAdapters
from agentrl.rollout.turns import derive_seed
from agentrl.serving.local import LocalEngine
from agentrl.training.adapters import AdapterTrainers
from agentrl.training.trainer import Trainer
from agentrl.training.weights import AdaptersWeights, ModelWeights
from agentrl.weights import (
    TOLERANCE,
    AdaptersProbe,
    AdaptersTransport,
    Probe,
    RemoteSync,
    SyncReport,
    WeightSync,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModels:
    """Frozen base model, and one model per adapter that shares the base's tensors."""

    base: PreTrainedModel
    adapted: Mapping[str, PreTrainedModel]


def load_adapters(config: Config, base_path: str, saved: Path | None) -> AdapterModels:
    """Load the base, and load or create the adapters.

    Args:
        config: Config of the run.
        base_path: Base model of the adapters.
        saved: Model folder of a checkpoint with the adapters; by default they are loaded from ``adapters.NAME.path`` or
            created.

    Raises:
        UsageError: an adapter does not exist, has another base, or does not match ``model.lora``.
    """
    base = load_model(base_path, dtype=config.model.dtype, device=config.model.device).requires_grad_(False)
    adapted = {}
    for name, section in config.named_adapters.items():
        folder = None if saved is None else adapter_folder(saved, name)
        if folder is None and section.path is not None:
            folder = find_adapter(section.path, section.source or name)
            _check_base(name, folder, base_path)
        lora = config.model.lora
        assert lora is not None
        if folder is not None and not section.trained:
            lora = read_lora_config(folder)
        elif folder is not None and read_lora_config(folder).scale != lora.scale:
            raise UsageError(
                f"adapters.{name}.path has an adapter with another scale",
                got=f"alpha / rank of {read_lora_config(folder).scale:g}",
                expected=f"{lora.scale:g}, from model.lora",
            )
        seed = derive_seed(config.run.seed, "adapter", name)
        adapted[name] = with_adapter(base, lora, path=base_path, seed=seed, folder=folder)
    return AdapterModels(base=base, adapted=adapted)


def _check_base(name: str, folder: Path, base_path: str) -> None:
    own = find_base(folder)
    if own != base_path and not _same_weights(Path(own), Path(base_path)):
        raise UsageError(
            f"adapters.{name}.path is an adapter of another base model",
            got=own,
            expected=base_path,
            hint=f"start from its base model: model.path={own}",
        )


def _same_weights(first: Path, second: Path) -> bool:
    """Return True if the weight files of two folders are equal, byte by byte."""
    files = sorted(file.name for file in first.glob("*.safetensors"))
    if not files or files != sorted(file.name for file in second.glob("*.safetensors")):
        return False
    return filecmp.cmpfiles(first, second, files, shallow=False)[0] == files


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterParts:
    """Models and trainers of a run with several adapters, and their weights for weight sync."""

    models: AdapterModels
    trainer: AdapterTrainers
    source: AdaptersWeights


def build_adapter_trainers(config: Config, base_path: str, saved: Path | None) -> AdapterParts:
    """Load the adapters, and build the trainer of each trained one.

    Args:
        config: Config of the run.
        base_path: Base model of the adapters.
        saved: Model folder of a checkpoint with the adapters, if the run resumes from one.

    Raises:
        ConfigError: the algorithm's options are invalid.
        UsageError: an adapter does not exist or does not match.
    """
    models, images = load_adapters(config, base_path, saved), load_images(base_path)
    trainers, runs = {}, {}
    for name, roles in trained_roles(config).items():
        own = adapter_config(config, name)
        trainers[name] = Trainer(
            models.adapted[name],
            own.algorithm,
            own.trainer,
            seed=derive_seed(config.run.seed, "trainer", name),
            max_tokens=config.agent.max_tokens,
            image_processor=images,
            roles=roles,
            signal_models=_teacher(config),
        )
        runs[name] = own.model_dump(mode="json")
    frozen = [name for name in models.adapted if name not in trainers]
    source = AdaptersWeights({name: ModelWeights(model) for name, model in models.adapted.items()}, models.base)
    return AdapterParts(models=models, trainer=AdapterTrainers(trainers, runs=runs, frozen=frozen), source=source)


def _teacher(config: Config) -> dict[str, PreTrainedModel]:
    teacher = config.algorithm.teacher
    if teacher is None or teacher.servers:
        return {}
    model = load_model(teacher.path, dtype=config.model.dtype, device=config.model.device)
    return {"teacher": model.requires_grad_(False)}


def copy_adapters(models: AdapterModels) -> AdapterModels:
    """Copy the adapters' tensors, around the same base, so that the copies can be sampled from during training."""
    shared = {id(tensor): tensor for tensor in [*models.base.parameters(), *models.base.buffers()]}
    adapted = {name: copy.deepcopy(model, memo=dict(shared)) for name, model in models.adapted.items()}
    return AdapterModels(base=models.base, adapted=adapted)


def adapters_probe(probe: Probe, source: AdaptersWeights) -> AdaptersProbe:
    """Make the probe of every adapter from that of one model."""
    return AdaptersProbe(
        prompts=probe.prompts,
        tolerance=probe.tolerance,
        mean_tolerance=probe.mean_tolerance,
        sources={name: AdapterSource(own) for name, own in source.sources.items()},
    )


class AdapterSource:
    """Weight source of one adapter: its tensors, and log-probabilities computed with it."""

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights
        self.weights = weights.trained_tensors
        self.token_logprobs = weights.token_logprobs


def adapters_transport(
    section: ServerEngineConfig,
    shared_folder: Path,
    source: AdaptersWeights,
    versions: Callable[[], Mapping[str, int]],
) -> AdaptersTransport:
    """Make the transport that sends adapters to servers; `versions` returns the adapters' versions."""
    own = {name: adapter_transport(section, shared_folder, weights) for name, weights in source.sources.items()}
    return AdaptersTransport(own, versions)


class AdaptersSync(WeightSync):
    """Weight sync of several adapters, which publishes each adapter's version before the engine samples with it.

    Args:
        inner: Sync that sends the weights to the engine, with one version for all.
        engine: Engine that gets the weights.
        trainer: Trainers of the adapters.
        versions: Published versions, which episodes read.
        probe: Probe of `inner`.
    """

    def __init__(
        self,
        inner: WeightSync,
        engine: PolicyEngine,
        trainer: AdapterTrainers,
        versions: AdapterVersions,
        probe: AdaptersProbe,
    ) -> None:
        self._inner, self._engine, self._trainer, self._versions, self._probe = inner, engine, trainer, versions, probe

    async def sync(self, version: int) -> SyncReport:
        """Send the current adapters to the engine, and verify each of them."""
        self._versions.publish(version, self._trainer.versions)
        report = await self._inner.sync(version)
        return replace(report, adapters=dict(self._probe.differences))

    async def verify(self) -> float:
        """Compare the current weights of engine and trainers."""
        self._versions.publish(self._engine.version, self._trainer.versions)
        return await self._inner.verify()

    async def release_memory(self) -> None:
        """Let the engine release its memory for the trainer until the next sync."""
        await self._inner.release_memory()

    async def close(self) -> None:
        """Release all resources."""
        await self._inner.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEngine:
    """Engine with adapters for evaluation, and the adapters' roles."""

    engine: PolicyEngine
    roles: RoleAdapters


@asynccontextmanager
async def open_adapters(
    config: Config, path: str, folder: Path, renderer: Renderer, *, say: Callable[[str], None]
) -> AsyncIterator[AdapterEngine]:
    """Open an engine with the adapters of a checkpoint, for an evaluation; it is closed after the block.

    Args:
        config: Config with adapters, roles and engine.
        path: Model folder of a checkpoint.
        folder: Folder for the servers' logs.
        renderer: Renderer that decodes tokens and prepares images.
        say: Called with messages about servers.

    Raises:
        ConfigError: roles or servers do not match the adapters.
        UsageError: an adapter does not exist.
    """
    check_role_adapters(config)
    if missing := [name for name in config.named_adapters if name not in adapters_in(path)]:
        raise UsageError(
            f"no adapter {missing[0]} found in {path}",
            got=", ".join(adapters_in(path)) or "none",
            expected=", ".join(config.named_adapters),
            hint="choose a run or a checkpoint with these adapters",
        )
    base = find_base(adapter_folder(Path(path), next(iter(config.named_adapters))))
    models = await asyncio.to_thread(load_adapters, config, base, Path(path))
    versions = AdapterVersions()
    roles = RoleAdapters(by_role=roles_of_adapters(config), versions=versions)
    unchanged = dict.fromkeys(models.adapted, 0)
    async with AsyncExitStack() as stack:
        engine: PolicyEngine
        if isinstance(config.engine, ServerEngineConfig):
            served = ServedModel(path=base, dtype=config.model.dtype, vocab_size=embedding_rows(base))
            pool = await stack.enter_async_context(open_pool(config.engine, served, folder, say=say))
            source = AdaptersWeights({name: ModelWeights(model) for name, model in models.adapted.items()}, models.base)
            transport = adapters_transport(config.engine, folder, source, lambda: unchanged)
            probe = adapters_probe(Probe.random(served.vocab_size, **TOLERANCE[config.model.dtype]), source)
            sync = RemoteSync(source, pool.group, transport, probe)
            stack.push_async_callback(sync.close)
            await sync.verify()
            engine = pool
        else:
            assert isinstance(config.engine, LocalEngineConfig)
            images, decode = renderer.images, renderer.encoder.decode
            engine = LocalEngine(models.base, config.engine, reader=images, decode=decode, adapters=models.adapted)
            stack.push_async_callback(engine.close)
            await engine.start()
        versions.publish(engine.version, unchanged)
        yield AdapterEngine(engine=engine, roles=roles)
