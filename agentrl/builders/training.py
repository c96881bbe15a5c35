"""Parts of a training run, built from a config: trainer, engine, weight sync, environments, scheduler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agentrl.builders.adapter_roles import roles_of_adapters, trained_roles
from agentrl.builders.adapters import adapter_transport, sends_adapters
from agentrl.builders.checks import check_engine_reports, check_training
from agentrl.builders.episodes import (
    RunEnvironment,
    build_run_environments,
    build_task_sampler,
    close_run_environments,
    sampling_params,
)
from agentrl.builders.group_extras import GroupExtras, build_group_extras, extras_of, policy_group_size
from agentrl.builders.models import build_renderer, check_rendering, check_tokens
from agentrl.builders.role_adapters import (
    AdaptersSync,
    adapters_probe,
    adapters_transport,
    build_adapter_trainers,
    copy_adapters,
)
from agentrl.builders.scratch import ignore
from agentrl.builders.servers import make_transport
from agentrl.builders.trainers import TrainerParts, build_on_ranks, build_trainer, load_policy
from agentrl.config.config import Config
from agentrl.config.derived import adapter_config
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.engine import AdapterVersions, PolicyEngine
from agentrl.render.renderer import Renderer
from agentrl.render.tokenizers import load_tokenizer, pad_id
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.roles.role_policies import AdapterPolicy, RoleAdapters
from agentrl.rollout.scheduler import Group, GroupScheduler
from agentrl.rollout.task_order import TaskSampler
from agentrl.rollout.waits import RolloutCounters, RolloutObserver, WaitTracker
from agentrl.serving.local import LocalEngine
from agentrl.serving.pool import ServerPool
from agentrl.training.adapters import AdapterTrainers
from agentrl.training.distributed import Ranks
from agentrl.training.dynamic_sampling import DynamicSampling, GroupLearner
from agentrl.training.trainer import Trainer
from agentrl.training.weights import AdaptersWeights, ModelWeights, TrainedWeights
from agentrl.weights import TOLERANCE, CheckpointSource, InProcessSync, Probe, RemoteSync, WeightSync


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """Connected parts of a training run."""

    environments: tuple[RunEnvironment, ...]
    tokenizer: PreTrainedTokenizerFast
    renderer: Renderer
    engine: PolicyEngine
    policy: EngineEpisodePolicy
    scheduler: GroupScheduler
    trainer: Trainer | AdapterTrainers
    source: ModelWeights | AdaptersWeights
    sync: WeightSync
    extras: GroupExtras
    teaches: Callable[[Group], bool]
    """Predicate of groups with a learning signal."""
    idle_while_training: bool
    """True if nothing else runs in this process during a training step."""

    @property
    def pad_id(self) -> int:
        """Id used for padding."""
        return pad_id(self.tokenizer)

    @property
    def waits(self) -> WaitTracker:
        """Wait times of episodes in all environments."""
        return self.environments[0].pool.waits

    @property
    def counters(self) -> RolloutCounters:
        """Counts over all environments."""
        return self.environments[0].runner.counters

    async def close(self) -> None:
        """Stop episodes, environments, weight sync and the engine, in this order."""
        await self.scheduler.close()
        await close_run_environments(self.environments)
        await self.sync.close()
        await self.engine.close()
        await self.extras.close()


def build_training(
    config: Config,
    *,
    model_path: str,
    reference_path: str | None = None,
    version: int = 0,
    observer: RolloutObserver,
    pool: ServerPool | None = None,
    ranks: Ranks | None = None,
    folder: Path | None = None,
    say: Callable[[str], None] = ignore,
) -> TrainingParts:
    """Build the parts, without starting them.

    Args:
        config: Config of the run.
        model_path: Initial weights.
        reference_path: Reference model of the KL penalty, if it differs from the initial weights (in a resumed run).
        version: Version of the weights at `model_path`.
        observer: Observer of turns and episode ends.
        pool: Engine, if the config uses servers or engines on a cluster.
        ranks: Ranks that train together.
        folder: Folder of the run, where a judge stores its answers.
        say: Called with messages for the user before the run starts.

    Raises:
        ConfigError: options are invalid, or the engine or sampling is not suitable for training.
        TemplateError: the chat template rewrites history.
        UsageError: a model, an environment or a file does not exist.
    """
    check_training(config)
    tasks = build_task_sampler(config, curriculum=config.curriculum)
    tokenizer = load_tokenizer(model_path)
    renderer = build_renderer(config, model_path, tokenizer)
    check_rendering(config, renderer, say=say)
    check_tokens(config, model_path)
    learning = _build_learning(
        config,
        ranks or Ranks(),
        pool,
        model_path=model_path,
        base_path=reference_path,
        version=version,
        renderer=renderer,
    )
    engine, trainer = learning.engine.engine, learning.trainer
    sampling = sampling_params(config.sampling)
    if learning.roles is None:
        policy = EngineEpisodePolicy(engine, renderer, sampling)
    else:
        policy = AdapterPolicy(engine, renderer, sampling, adapters=learning.roles)
    environments = build_run_environments(config, policy, observer=observer, folder=folder)
    in_step = config.rollout.is_synchronous and isinstance(engine, LocalEngine)
    if config.trainer.deterministic and in_step and isinstance(engine, LocalEngine):
        engine.callers = environments[0].pool.waits
    extras = build_group_extras(config, environments, policy, model_path)
    teaches = _judge_groups(config)
    return TrainingParts(
        environments=environments,
        tokenizer=tokenizer,
        renderer=renderer,
        engine=engine,
        policy=policy,
        scheduler=_build_scheduler(
            config,
            environments,
            tasks,
            extras,
            version=version,
            keep=teaches if config.algorithm.dynamic_sampling else None,
            trainer=trainer,
        ),
        teaches=teaches,
        trainer=trainer,
        source=learning.source,
        sync=learning.engine.sync,
        extras=extras,
        idle_while_training=in_step and config.trainer.processes == 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningParts:
    """Trainer, weight source and engine."""

    trainer: Trainer | AdapterTrainers
    source: ModelWeights | AdaptersWeights
    engine: EngineParts
    roles: RoleAdapters | None = None
    """Adapters of roles, if the run has several adapters."""


def _build_learning(
    config: Config,
    ranks: Ranks,
    pool: ServerPool | None,
    *,
    model_path: str,
    base_path: str | None,
    version: int,
    renderer: Renderer,
) -> LearningParts:
    if config.named_adapters:
        return _build_adapters(config, pool, model_path, base_path, version=version, renderer=renderer)
    built = build_on_ranks(ranks, build_trainer, config, model_path, base_path)
    engine = build_engine(
        config, built, pool, model_path=model_path, base_path=base_path, version=version, renderer=renderer
    )
    return LearningParts(trainer=built.trainer, source=built.source, engine=engine)


def _build_adapters(
    config: Config,
    pool: ServerPool | None,
    model_path: str,
    base_path: str | None,
    *,
    version: int,
    renderer: Renderer,
) -> LearningParts:
    base = base_path or model_path
    built = build_adapter_trainers(config, base, None if model_path == base else Path(model_path))
    probe = adapters_probe(_probe(config, built.models.base), built.source)
    engine: PolicyEngine
    inner: WeightSync
    if pool is not None:
        assert isinstance(config.engine, ServerEngineConfig)
        transport = adapters_transport(
            config.engine, Path(config.run.directory), built.source, lambda: built.trainer.versions
        )
        engine, inner = pool, RemoteSync(built.source, pool.group, transport, probe)
    else:
        assert isinstance(config.engine, LocalEngineConfig)
        shared = config.rollout.is_synchronous
        models = built.models if shared else copy_adapters(built.models)
        engine = LocalEngine(
            models.base,
            config.engine,
            version=version,
            reader=renderer.images,
            decode=renderer.encoder.decode,
            routed_experts=config.trainer.router_replay,
            adapters=models.adapted,
        )
        inner = InProcessSync(built.source, engine, shared=shared, probe=probe)
    check_engine_reports(config, engine)
    versions = AdapterVersions()
    return LearningParts(
        trainer=built.trainer,
        source=built.source,
        engine=EngineParts(engine=engine, sync=AdaptersSync(inner, engine, built.trainer, versions, probe)),
        roles=RoleAdapters(by_role=roles_of_adapters(config), versions=versions),
    )


def _judge_groups(config: Config) -> Callable[[Group], bool]:
    """Return the predicate of groups with a learning signal for the policy or one of several adapters."""
    adapters = trained_roles(config)
    learners = [
        GroupLearner(algorithm=adapter_config(config, name).algorithm, roles=adapters[name]) for name in adapters
    ]
    sampling = DynamicSampling(learners or [GroupLearner(algorithm=config.algorithm)])
    return lambda group: sampling.teaches(group.trainable, extras_of([group]))


def _build_scheduler(
    config: Config,
    environments: tuple[RunEnvironment, ...],
    tasks: TaskSampler,
    extras: GroupExtras,
    *,
    version: int,
    keep: Callable[[Group], bool] | None,
    trainer: Trainer | AdapterTrainers,
) -> GroupScheduler:
    return GroupScheduler(
        {environment.label: environment.runner for environment in environments},
        tasks,
        group_size=policy_group_size(config.algorithm),
        batch=config.trainer.tasks_per_step,
        max_staleness=config.rollout.max_staleness,
        max_concurrent=config.rollout.max_concurrent,
        seed=config.run.seed,
        version=version,
        keep=keep,
        least_members=trainer.least_members,
        extra_runners=extras.runners,
        adapter_versions=lambda: trainer.versions,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Engine and its weight sync."""

    engine: PolicyEngine
    sync: WeightSync


def build_engine(
    config: Config,
    built: TrainerParts,
    pool: ServerPool | None,
    *,
    model_path: str,
    base_path: str | None,
    version: int,
    renderer: Renderer,
) -> EngineParts:
    """Connect an engine to a trainer: the pool, or a local engine, which shares the trainer's weights if possible.

    Args:
        config: Config of the run.
        built: Trainer and weights.
        pool: Engine, if the config uses servers or engines on a cluster.
        model_path: Initial weights.
        base_path: Base model of a checkpoint's adapter.
        version: Version of the weights at `model_path`.
        renderer: Renderer that decodes tokens and prepares images.

    Raises:
        ConfigError: the engine does not report what the trainer needs.
    """
    probe = _probe(config, built.trainer.model)
    if pool is not None:
        parts = EngineParts(engine=pool, sync=_remote_sync(config, built.source, pool, probe))
    else:

        def load() -> PreTrainedModel:
            return load_policy(config, model_path, base_path=base_path)

        parts = _local_engine(config, built, load, probe, version=version, renderer=renderer)
    check_engine_reports(config, parts.engine)
    return parts


def _probe(config: Config, model: PreTrainedModel) -> Probe:
    return Probe.random(model.config.get_text_config().vocab_size, **TOLERANCE[config.model.dtype])


def _local_engine(
    config: Config,
    built: TrainerParts,
    load: Callable[[], PreTrainedModel],
    probe: Probe,
    *,
    version: int,
    renderer: Renderer,
) -> EngineParts:
    assert isinstance(config.engine, LocalEngineConfig), "an engine with servers needs a pool"
    trainer, source = built.trainer, built.source
    shared = config.rollout.is_synchronous and not trainer.ranks.is_distributed
    model = trainer.model
    if not shared:
        model = load() if trainer.ranks.is_distributed else copy.deepcopy(trainer.model)
    engine = LocalEngine(
        model,
        config.engine,
        version=version,
        reader=renderer.images,
        decode=renderer.encoder.decode,
        routed_experts=config.trainer.router_replay,
    )
    few = config.model.lora is not None  # the engine has the frozen weights already
    sync = InProcessSync(TrainedWeights(source) if few else source, engine, shared=shared, probe=probe)
    return EngineParts(engine=engine, sync=sync)


def _remote_sync(config: Config, source: ModelWeights, pool: ServerPool, probe: Probe) -> RemoteSync:
    settings, folder = config.engine, Path(config.run.directory)
    assert isinstance(settings, LocalEngineConfig | ServerEngineConfig)
    if sends_adapters(settings):
        return RemoteSync(TrainedWeights(source), pool.group, adapter_transport(settings, folder, source), probe)
    transport = make_transport(settings, folder)
    if isinstance(settings, LocalEngineConfig):
        return RemoteSync(source, pool.group, transport, probe)
    return RemoteSync(CheckpointSource(source, source.model), pool.group, transport, probe, sleeps=settings.sleep)
