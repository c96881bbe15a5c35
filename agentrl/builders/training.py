"""Connected parts of a training run: config ─► environments, trainer, engine, weight sync, scheduler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agentrl.builders.adapter_checks import sends_adapters
from agentrl.builders.adapters import adapter_transport, build_adapters
from agentrl.builders.branches import branch_starts, build_branch_runners
from agentrl.builders.checks import check_training
from agentrl.builders.episodes import (
    RunEnvironment,
    build_run_environments,
    build_task_sampler,
    close_run_environments,
    sampling_params,
)
from agentrl.builders.group_extras import (
    GroupExtras,
    build_group_extras,
    learning_signal,
    policy_group_size,
    worth_training,
)
from agentrl.builders.live import is_live
from agentrl.builders.models import build_renderer, check_policy
from agentrl.builders.processes import RunProcesses
from agentrl.builders.servers import make_transport
from agentrl.builders.tinker import build_tinker
from agentrl.builders.trainers import LearningParts, build_on_ranks, build_trainer, load_policy
from agentrl.config.config import Config
from agentrl.config.derived import evaluation_engine_config
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig, TinkerEngineConfig
from agentrl.config.estimate import engine_slots
from agentrl.config.step_settings import STAGE_MARK, Settings
from agentrl.engine import PolicyEngine, SamplingParams
from agentrl.errors.deadlines import close_in_time
from agentrl.render.renderer import Renderer
from agentrl.render.tokenizers import load_tokenizer
from agentrl.rollout.events import RolloutCounters, RolloutObserver
from agentrl.rollout.groups import Group
from agentrl.rollout.journal import JournalFolder
from agentrl.rollout.journal_replay import JournaledEngine
from agentrl.rollout.live import LiveScheduler
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.roles.role_policies import AdapterPolicy
from agentrl.rollout.scheduler import GroupScheduler
from agentrl.rollout.task_order import TaskSampler
from agentrl.rollout.waits import WaitTracker
from agentrl.serving.engine_checks import check_engine_reports
from agentrl.serving.local import LocalEngine
from agentrl.serving.pool import ServerPool
from agentrl.training.contract import PolicyTrainer, PolicyWeights
from agentrl.training.distributed import Ranks
from agentrl.training.weights import ModelWeights, TrainedWeights
from agentrl.weights import TOLERANCE, CheckpointSource, InProcessSync, Probe, RemoteSync, WeightSync

SYNC_CLOSE_S = 180.0
"""Seconds for closing the weight sync at the end of a run: sleeping servers are woken and get weights first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConnection:
    """Engine, and the sync that sends it the trainer's weights."""

    engine: PolicyEngine
    sync: WeightSync


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """Connected parts of a training run."""

    environments: tuple[RunEnvironment, ...]
    """Environments with the settings of the config."""
    stages: tuple[RunEnvironment, ...]
    """The same environments with the settings of later stages."""
    tokenizer: PreTrainedTokenizerFast
    renderer: Renderer
    engine: PolicyEngine
    policy: EngineEpisodePolicy
    scheduler: GroupScheduler
    trainer: PolicyTrainer
    source: PolicyWeights
    sync: WeightSync
    extras: GroupExtras
    evaluation: EngineConnection | None
    """Separate engine for evaluations that run concurrently with training; ``None`` without ``evaluation.engine``."""
    journals: JournalFolder | None
    """Journals of the episodes in flight; ``None`` in synchronous training."""
    has_signal: Callable[[Group], bool]
    """Predicate of groups with a learning signal."""
    idle_while_training: bool
    """True if nothing else runs in this process during a training step."""

    @property
    def waits(self) -> WaitTracker:
        """Wait times of episodes in all environments."""
        return self.environments[0].pool.waits

    @property
    def counters(self) -> RolloutCounters:
        """Counts over all environments."""
        return self.environments[0].runner.counters

    async def start(self) -> None:
        """Start the engines and check their weights, then start the scheduler."""
        await self.engine.start()
        await self.sync.verify()
        if self.evaluation is not None:
            await self.evaluation.engine.start()
            await self.evaluation.sync.verify()
        await self.scheduler.start()

    async def close(self) -> None:
        """Close episodes, environments, weight sync and engine, in this order; a failure does not stop the others.

        The time of each is limited; see `close_in_time`.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(close_in_time, self.extras.close, "closing the teacher")
            stack.push_async_callback(close_in_time, self.engine.close, "closing the engine")
            if self.evaluation is not None:
                connection = self.evaluation
                stack.push_async_callback(close_in_time, connection.engine.close, "closing the evaluation engine")
                stack.push_async_callback(close_in_time, connection.sync.close, "closing the evaluation sync")
            stack.push_async_callback(close_in_time, self.sync.close, "closing the weight sync", SYNC_CLOSE_S)
            stack.push_async_callback(close_run_environments, (*self.environments, *self.stages))
            await self.scheduler.close()


def build_training(
    config: Config,
    processes: RunProcesses,
    *,
    model_path: str,
    base_path: str,
    version: int,
    observer: RolloutObserver,
    waits: WaitTracker,
    folder: Path,
    journals: JournalFolder | None,
    settings: Settings,
    say: Callable[[str], None],
) -> TrainingParts:
    """Build the parts, without starting them.

    Args:
        config: Config of the run.
        processes: Ranks, servers and environment nodes.
        model_path: Initial weights.
        base_path: Model that the run started from; see `build_learning`.
        version: Version of the weights at `model_path`.
        observer: Observer of turns and episode ends.
        waits: Table of the run's waits.
        folder: Folder of the run, where a judge stores its answers.
        journals: Journals of the episodes in flight, in asynchronous training.
        settings: Current settings.
        say: Called with messages for the user before the run starts.

    Raises:
        ConfigError: options are invalid, or the engine or sampling is not suitable for training.
        TemplateError: the chat template rewrites history.
        UsageError: a model, an environment or a file does not exist.
    """
    check_training(config)
    tasks = build_task_sampler(config, curriculum=config.curriculum, stages=True)
    tokenizer = load_tokenizer(model_path)
    renderer = build_renderer(config, model_path, tokenizer)
    translator = check_policy(config, renderer, model_path, say=say)
    learning = build_learning(
        config,
        processes.pool,
        ranks=processes.ranks,
        model_path=model_path,
        base_path=base_path,
        version=version,
        renderer=renderer,
    )
    engine, trainer = learning.engine, learning.trainer
    policy = _build_policy(settings, learning, journals, renderer)
    built = build_run_environments(
        config,
        policy,
        observer=observer,
        folder=folder,
        waits=waits,
        nodes=processes.nodes,
        journals=journals,
        settings=settings,
    )
    environments = tuple(one for one in built if STAGE_MARK not in one.label)
    waits.engine_use.slots = engine_slots(config)
    is_lockstep = config.rollout.is_synchronous and isinstance(engine, LocalEngine)
    if config.trainer.deterministic and config.rollout.is_synchronous and isinstance(engine, LocalEngine):
        engine.lockstep = waits
    extras = build_group_extras(config, built, policy, model_path, translator)
    has_signal = learning_signal(settings)
    keep = worth_training(settings, has_signal)
    scheduler = _build_scheduler(
        config, built, tasks, extras, version=version, keep=keep, trainer=trainer, folder=folder
    )
    return TrainingParts(
        environments=environments,
        stages=built[len(environments) :],
        tokenizer=tokenizer,
        renderer=renderer,
        engine=engine,
        policy=policy,
        scheduler=scheduler,
        has_signal=has_signal,
        trainer=trainer,
        source=learning.source,
        sync=learning.sync,
        extras=extras,
        evaluation=_connect_evaluation(
            config, learning, processes.evaluation_pool, model_path, base_path, version, renderer
        ),
        journals=journals,
        idle_while_training=is_lockstep and config.trainer.processes == 1,
    )


def _build_policy(
    settings: Settings, learning: LearningParts, journals: JournalFolder | None, renderer: Renderer
) -> EngineEpisodePolicy:
    """Build the policy that plays the episodes; roles may have adapters of their own."""
    engine = learning.engine if journals is None else JournaledEngine(learning.engine, journals.active)

    def sampling() -> SamplingParams:
        return sampling_params(settings.config.sampling)

    if learning.roles is None:
        return EngineEpisodePolicy(engine, renderer, sampling)
    return AdapterPolicy(engine, renderer, sampling, adapters=learning.roles)


def _build_scheduler(
    config: Config,
    environments: tuple[RunEnvironment, ...],
    tasks: TaskSampler,
    extras: GroupExtras,
    *,
    version: int,
    keep: Callable[[Group], bool] | None,
    trainer: PolicyTrainer,
    folder: Path,
) -> GroupScheduler:
    branching = build_branch_runners(environments)
    make: Callable[..., GroupScheduler] = GroupScheduler
    if is_live(config):
        make = partial(LiveScheduler, sessions=environments[0].runner.loop, folder=folder)
    return make(
        {one.label: branching.get(one.label, one.runner) for one in environments},
        tasks,
        group_size=policy_group_size(config.algorithm),
        batch=config.trainer.tasks_per_step,
        max_staleness=config.rollout.max_staleness,
        batch_order=config.rollout.batch_order,
        max_concurrent=config.rollout.max_concurrent,
        seed=config.run.seed,
        version=version,
        keep=keep,
        min_members=trainer.min_members,
        extra_runners=extras.runners,
        adapter_versions=lambda: trainer.versions,
        wait_to_start=branch_starts(branching),
        keeps_finished=extras.translator is None,
    )


def build_learning(
    config: Config,
    pool: ServerPool | None,
    *,
    ranks: Ranks,
    model_path: str,
    base_path: str | None,
    version: int,
    renderer: Renderer,
) -> LearningParts:
    """Build the trainer of one model on all ranks, or of named adapters, and connect an engine to it.

    The engine is the pool, or a local engine, which shares the trainer's weights if possible.

    Args:
        config: Config of the run.
        pool: Engine, if the config uses servers or engines on a cluster.
        ranks: Ranks that train together.
        model_path: Initial weights.
        base_path: Model that the run started from, if the weights are from a checkpoint: the reference of the KL
            penalty, and the base of an adapter.
        version: Version of the weights at `model_path`.
        renderer: Renderer that decodes tokens and prepares images.

    Raises:
        ConfigError: the algorithm's options are invalid, or the engine does not report what the trainer needs.
        UsageError: a model does not exist.
    """
    if isinstance(config.engine, TinkerEngineConfig):
        return build_tinker(config, base_path or model_path, version)
    if config.named_adapters:
        return build_adapters(
            config, pool, model_path=model_path, base_path=base_path, version=version, renderer=renderer
        )
    built = build_on_ranks(ranks, build_trainer, config, model_path, base_path)
    trainer, source = built.trainer, built.source
    model: PreTrainedModel | None = None
    if pool is None:
        model = trainer.model
        if trainer.ranks.is_distributed:
            model = load_policy(config, model_path, base_path=base_path)
        elif not config.rollout.is_synchronous:
            model = copy.deepcopy(model)
    connected = _connect(config, source, pool or model, version, renderer, shared=model is trainer.model)
    check_engine_reports(config, connected.engine)
    return LearningParts(trainer=trainer, source=source, engine=connected.engine, sync=connected.sync)


def _connect(
    config: Config,
    source: ModelWeights,
    found: ServerPool | PreTrainedModel | None,
    version: int,
    renderer: Renderer,
    *,
    shared: bool,
) -> EngineConnection:
    """Connect the engine of ``config.engine``, a pool or a model of this process, to the trainer's weights.

    `found` is a pool, or the model of a local engine, which is the trainer's own if `shared`.
    """
    assert isinstance(config.engine, LocalEngineConfig | ServerEngineConfig)
    size = source.model.config.get_text_config().vocab_size
    probe = replace(Probe.random(size, **TOLERANCE[config.model.dtype]), answer_timeout_s=config.engine.timeout_s)
    if isinstance(found, ServerPool):
        return EngineConnection(engine=found, sync=_remote_sync(config, source, found, probe))
    assert isinstance(config.engine, LocalEngineConfig), "an engine with servers needs a pool"
    assert found is not None
    engine = LocalEngine(
        found,
        config.engine,
        version=version,
        reader=renderer.images,
        decode=renderer.encoder.decode,
        routed_experts=config.trainer.router_replay,
    )
    sent = source if config.model.lora is None else TrainedWeights(source)  # the engine has the frozen weights
    return EngineConnection(engine=engine, sync=InProcessSync(sent, engine, shared=shared, probe=probe))


def _connect_evaluation(
    config: Config,
    learning: LearningParts,
    pool: ServerPool | None,
    model_path: str,
    base_path: str | None,
    version: int,
    renderer: Renderer,
) -> EngineConnection | None:
    """Connect the engine of the evaluations to the trainer's weights, if the config has one."""
    if (other := evaluation_engine_config(config)) is None:
        return None
    assert isinstance(learning.source, ModelWeights), "checked by check_evaluation_engine"
    model = load_policy(other, model_path, base_path=base_path) if pool is None else None
    return _connect(other, learning.source, pool or model, version, renderer, shared=False)


def _remote_sync(config: Config, source: ModelWeights, pool: ServerPool, probe: Probe) -> RemoteSync:
    settings, folder = config.engine, Path(config.run.directory)
    assert isinstance(settings, LocalEngineConfig | ServerEngineConfig)
    if sends_adapters(settings):
        return RemoteSync(TrainedWeights(source), pool.group, adapter_transport(settings, folder, source), probe)
    transport = make_transport(settings, folder)
    if isinstance(settings, LocalEngineConfig):
        return RemoteSync(source, pool.group, transport, probe)
    return RemoteSync(CheckpointSource(source, source.model), pool.group, transport, probe, sleeps=settings.sleep)
