"""Adapters of a run or an evaluation: models, trainers, weights, and the engine that samples with them."""

from __future__ import annotations

import copy
import filecmp
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from agentrl.builders.adapter_checks import check_role_adapters, roles_of_adapters, trained_roles
from agentrl.builders.models import load_images
from agentrl.builders.servers import ServedModel, open_pool
from agentrl.builders.trainers import LearningParts
from agentrl.config.config import Config
from agentrl.config.derived import adapter_config
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.engine import AdapterVersions, PolicyEngine
from agentrl.errors import UsageError
from agentrl.errors.foreign import run_in_own_thread
from agentrl.models.load import embedding_rows, load_model
from agentrl.models.lora import (
    adapter_folder,
    adapters_in,
    find_base,
    is_adapter_folder,
    read_lora_config,
    save_adapter,
    with_adapter,
)
from agentrl.render.images import ImageProcessor
from agentrl.render.renderer import Renderer
from agentrl.rollout.roles.role_policies import RoleAdapters
from agentrl.rollout.turns import derive_seed
from agentrl.serving.engine_checks import check_engine_reports
from agentrl.serving.local import LocalEngine
from agentrl.serving.pool import ServerPool
from agentrl.training.adapters import AdapterTrainers
from agentrl.training.signals.reference import reads_reference
from agentrl.training.trainer import Trainer
from agentrl.training.weights import AdaptersWeights, ModelWeights
from agentrl.weights import (
    TOLERANCE,
    AdapterTransport,
    InProcessSync,
    MultiAdapterProbe,
    MultiAdapterSync,
    MultiAdapterTransport,
    Probe,
    RemoteSync,
    WeightSync,
    memory_folder,
)


def adapter_transport(
    section: ServerEngineConfig | LocalEngineConfig, shared_folder: Path, source: ModelWeights
) -> AdapterTransport:
    """Make the transport for a model's adapters; `shared_folder` is for adapters that are sent through the disk."""
    goes_by_disk = isinstance(section, ServerEngineConfig) and section.transport == "disk"
    return AdapterTransport(shared_folder if goes_by_disk else memory_folder(), partial(save_adapter, source.model))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModels:
    """Frozen base model, and one model per adapter that shares the base's tensors."""

    base: PreTrainedModel
    adapted: Mapping[str, PreTrainedModel]


def load_adapters(config: Config, base_path: str, saved: Path | None) -> AdapterModels:
    """Load the base, and load or create the adapters.

    Args:
        config: Config of the run, with resolved paths.
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
            folder = Path(section.path)  # `resolve_model` has found the adapter in it
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
    """Return True if the weight files of two folders are identical."""
    files = sorted(file.name for file in first.glob("*.safetensors"))
    if not files or files != sorted(file.name for file in second.glob("*.safetensors")):
        return False
    return filecmp.cmpfiles(first, second, files, shallow=False)[0] == files


def build_adapters(
    config: Config, pool: ServerPool | None, *, model_path: str, base_path: str | None, version: int, renderer: Renderer
) -> LearningParts:
    """Build the trainers of several adapters in this process, their weights, and the engine that samples with them.

    `model_path` is the base model, or a checkpoint's folder with the adapters of the base `base_path`.

    Raises:
        ConfigError: the algorithm's options are invalid, or the engine does not report what the trainer needs.
        UsageError: an adapter does not exist or does not match.
    """
    base = base_path or model_path
    models = load_adapters(config, base, None if model_path == base else Path(model_path))
    references = _load_references(config, models.base, base)
    trainer = _build_trainers(config, models, references, load_images(base))
    source, versions = _source_of(models), AdapterVersions()
    probe = _probe(config, models, source)
    engine: PolicyEngine
    inner: WeightSync
    if pool is not None:
        assert isinstance(config.engine, ServerEngineConfig)
        folder = Path(config.run.directory)
        engine, inner = pool, _remote_sync(config.engine, folder, pool, source, probe, lambda: trainer.versions)
    else:
        shared = config.rollout.is_synchronous
        sampled = models if shared else _copy_adapters(models)
        engine = _local_engine(config, sampled, renderer, version=version, routed_experts=config.trainer.router_replay)
        inner = InProcessSync(source, engine, shared=shared, probe=probe)
    check_engine_reports(config, engine)
    return LearningParts(
        trainer=trainer,
        source=source,
        engine=engine,
        sync=MultiAdapterSync(inner, engine, versions, probe, lambda: trainer.versions),
        roles=RoleAdapters(by_role=roles_of_adapters(config), versions=versions),
    )


def _load_references(config: Config, base: PreTrainedModel, base_path: str) -> dict[str, PreTrainedModel]:
    """Load the reference policies of adapters that start from a trained one: the adapter at ``adapters.NAME.path``.

    The base alone is not the initial policy of such an adapter. For a new adapter it is, so the trainer uses the base.

    Raises:
        UsageError: an adapter no longer exists.
    """
    found, lora = {}, config.model.lora
    assert lora is not None
    for name in trained_roles(config):
        path = config.named_adapters[name].path
        if path is None or not reads_reference(adapter_config(config, name).algorithm):
            continue
        if not is_adapter_folder(path):
            raise UsageError(
                f"adapters.{name}.path no longer exists, and its adapter is the reference policy",
                got=path,
                expected="the adapter from which the run started",
            )
        found[name] = with_adapter(base, lora, path=base_path, seed=config.run.seed, folder=path).requires_grad_(False)
    return found


def _build_trainers(
    config: Config, models: AdapterModels, references: Mapping[str, PreTrainedModel], images: ImageProcessor | None
) -> AdapterTrainers:
    """Build the trainer of each trained adapter."""
    trainers, runs, shared = {}, {}, _load_teacher(config)
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
            signal_models=shared if name not in references else {**shared, "reference": references[name]},
        )
        runs[name] = own.model_dump(mode="json")
    return AdapterTrainers(trainers, runs=runs, frozen=[name for name in models.adapted if name not in trainers])


def _load_teacher(config: Config) -> dict[str, PreTrainedModel]:
    teacher = config.algorithm.teacher
    if teacher is None or not teacher.is_loaded:
        return {}
    model = load_model(teacher.path, dtype=config.model.dtype, device=config.model.device)
    return {"teacher": model.requires_grad_(False)}


def _copy_adapters(models: AdapterModels) -> AdapterModels:
    """Copy the adapters on the same base, so that the engine can sample from the copies during training."""
    shared = {id(tensor): tensor for tensor in [*models.base.parameters(), *models.base.buffers()]}
    adapted = {name: copy.deepcopy(model, memo=dict(shared)) for name, model in models.adapted.items()}
    return AdapterModels(base=models.base, adapted=adapted)


def _source_of(models: AdapterModels) -> AdaptersWeights:
    return AdaptersWeights({name: ModelWeights(model) for name, model in models.adapted.items()}, models.base)


def _probe(config: Config, models: AdapterModels, source: AdaptersWeights) -> MultiAdapterProbe:
    size = models.base.config.get_text_config().vocab_size
    return MultiAdapterProbe.from_probe(Probe.random(size, **TOLERANCE[config.model.dtype]), source.by_adapter)


def _remote_sync(
    section: ServerEngineConfig,
    shared_folder: Path,
    pool: ServerPool,
    source: AdaptersWeights,
    probe: MultiAdapterProbe,
    versions: Callable[[], Mapping[str, int]],
) -> RemoteSync:
    """Make the sync that sends adapters to servers; `versions` returns the adapters' versions."""
    transports = {name: adapter_transport(section, shared_folder, own) for name, own in source.sources.items()}
    return RemoteSync(source, pool.group, MultiAdapterTransport(transports, versions), probe)


def _local_engine(
    config: Config, models: AdapterModels, renderer: Renderer, *, version: int = 0, routed_experts: bool = False
) -> LocalEngine:
    assert isinstance(config.engine, LocalEngineConfig)
    return LocalEngine(
        models.base,
        config.engine,
        version=version,
        reader=renderer.images,
        decode=renderer.encoder.decode,
        routed_experts=routed_experts,
        adapters=models.adapted,
    )


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
    models = await run_in_own_thread(load_adapters, config, base, Path(path))
    versions = AdapterVersions()
    roles = RoleAdapters(by_role=roles_of_adapters(config), versions=versions)
    unchanged = dict.fromkeys(models.adapted, 0)
    async with AsyncExitStack() as stack:
        engine: PolicyEngine
        if isinstance(config.engine, ServerEngineConfig):
            served = ServedModel(path=base, dtype=config.model.dtype, vocab_size=embedding_rows(base))
            pool = await stack.enter_async_context(open_pool(config.engine, served, folder, say=say))
            source = _source_of(models)
            probe = _probe(config, models, source)
            sync = _remote_sync(config.engine, folder, pool, source, probe, lambda: unchanged)
            stack.push_async_callback(sync.close)
            await sync.verify()
            engine = pool
        else:
            engine = local = _local_engine(config, models, renderer)
            stack.push_async_callback(local.close)
            await local.start()
        versions.publish(engine.version, unchanged)
        yield AdapterEngine(engine=engine, roles=roles)
