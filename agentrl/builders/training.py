"""Everything that a training run consists of, built from a config."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from agentrl.builders.adapters import adapter_transport, sends_adapters
from agentrl.builders.checks import check_tells_experts, check_training
from agentrl.builders.episodes import (
    RunEnvironment,
    build_run_environments,
    build_task_sampler,
    close_run_environments,
    sampling_params,
)
from agentrl.builders.group_extras import ExtraRunners, build_extra_runners, own_members
from agentrl.builders.models import build_renderer, check_same_tokens, load_tokenizer, pad_id
from agentrl.builders.servers import make_transport
from agentrl.builders.trainers import (
    BUILD,
    TrainerParts,
    build_trainer,
    load_policy,
)
from agentrl.config.config import Config
from agentrl.config.derived import parts_of
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.engine import PolicyEngine
from agentrl.env_lookup import resolve_environment
from agentrl.errors import UsageError
from agentrl.image import ImageReader
from agentrl.models.vision import MODEL_TYPES
from agentrl.render.check import check_template
from agentrl.render.renderer import Renderer
from agentrl.rollout.group import Group
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import make_agent_loop
from agentrl.rollout.scheduler import GroupScheduler
from agentrl.rollout.task_order import TaskSampler
from agentrl.rollout.waits import RolloutCounters, RolloutObserver, Waits
from agentrl.serving.local import LocalEngine
from agentrl.serving.pool import ServerPool
from agentrl.serving.teacher import TeacherServers
from agentrl.training.distributed import Ranks
from agentrl.training.trainer import Trainer
from agentrl.training.weights import ModelWeights, TrainedWeights
from agentrl.weights import TOLERANCE, CheckpointSource, InProcessSync, Probe, RemoteSync, WeightSource, WeightSync


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """The parts of a training run, connected."""

    environments: tuple[RunEnvironment, ...]
    tokenizer: PreTrainedTokenizerFast
    renderer: Renderer
    engine: PolicyEngine
    scheduler: GroupScheduler
    trainer: Trainer
    source: ModelWeights
    sync: WeightSync
    teacher: TeacherServers | None = None
    """A teacher that is not loaded here."""

    @property
    def pad_id(self) -> int:
        """An id to fill batches with."""
        return pad_id(self.tokenizer)

    @property
    def waits(self) -> Waits:
        """Who waits for what, in all environments."""
        return self.environments[0].pool.waits

    @property
    def counters(self) -> RolloutCounters:
        """Counts of all environments together."""
        return self.environments[0].runner.counters

    async def close(self) -> None:
        """Stop episodes, environments, weight sync and the engine, in this order."""
        await self.scheduler.close()
        await close_run_environments(self.environments)
        await self.sync.close()
        await self.engine.close()
        if self.teacher is not None:
            await self.teacher.close()


def build_training(
    config: Config,
    *,
    model_path: str,
    reference_path: str | None = None,
    version: int = 0,
    observer: RolloutObserver,
    keep: Callable[[Group], bool] | None = None,
    pool: ServerPool | None = None,
    ranks: Ranks | None = None,
) -> TrainingParts:
    """Build the parts. Nothing runs yet.

    Args:
        config: The run.
        model_path: Weights to start from.
        reference_path: The model that KL is measured from, when it is not the one to start from (a resumed run).
        version: Version of the weights at `model_path`.
        observer: Is told of every turn.
        keep: Says whether a group is worth training on.
        pool: The engine, where the config asks for servers, or for engines on a cluster.
        ranks: Train together.

    Raises:
        ConfigError: options that do not fit, or an engine or sampling that cannot be trained with.
        TemplateError: the chat template rewrites history.
        UsageError: a model, an environment or a file that is not there.
    """
    settings = check_training(config)
    tasks = build_task_sampler(config, curriculum=config.curriculum)
    tokenizer = load_tokenizer(model_path)
    renderer = build_renderer(config, model_path, tokenizer)
    check_rendering(config, renderer)
    _check_tokens(config, model_path)
    ranks = ranks or Ranks()
    built = _build_trainer(config, model_path, reference_path, renderer.images, ranks)
    trainer, source, model = built.trainer, built.source, built.trainer.model
    probe = Probe.random(model.config.get_text_config().vocab_size, tolerance=TOLERANCE[config.model.dtype])
    engine: PolicyEngine
    sync: WeightSync
    if isinstance(settings, LocalEngineConfig) and pool is None:
        shared = config.rollout.max_staleness == 0 and not ranks.are_many
        if ranks.are_many:
            own = load_policy(config, model_path, base_path=reference_path)
        else:
            own = model if shared else copy.deepcopy(model)
        routed_experts = config.trainer.router_replay
        engine = LocalEngine(own, settings, version=version, reader=renderer.images, routed_experts=routed_experts)
        few = config.model.lora is not None  # the frozen weights are there already
        sync = InProcessSync(TrainedWeights(source) if few else source, engine, shared=shared, probe=probe)
    elif pool is not None:
        told = CheckpointSource(source, model) if isinstance(settings, ServerEngineConfig) else source
        engine, sync = pool, _remote_sync(settings, Path(config.run.directory), source, told, pool, probe)
    else:
        raise AssertionError("an engine of servers needs its pool")
    check_tells_experts(config, engine)
    policy = EngineEpisodePolicy(engine, renderer, sampling_params(config.sampling))
    environments = build_run_environments(config, policy, observer=observer)
    if config.trainer.deterministic and config.rollout.max_staleness == 0 and isinstance(engine, LocalEngine):
        engine.callers = environments[0].pool.waits
    return TrainingParts(
        environments=environments,
        tokenizer=tokenizer,
        renderer=renderer,
        engine=engine,
        scheduler=_build_scheduler(
            config,
            environments,
            tasks,
            build_extra_runners(config, environments, engine, renderer, model_path),
            version=version,
            keep=keep,
            least_members=trainer.least_members,
        ),
        trainer=trainer,
        source=source,
        sync=sync,
        teacher=_teacher_servers(config),
    )


def _check_tokens(config: Config, model_path: str) -> None:
    """Check that the models beside the policy read its tokens."""
    beside = {"the teacher": config.algorithm.teacher, "the process reward model": config.trainer.process_reward}
    for what, section in beside.items():
        if section is not None and section.path is not None:
            check_same_tokens(what, section.path, model_path)


def _teacher_servers(config: Config) -> TeacherServers | None:
    guide = config.algorithm.teacher
    return TeacherServers(guide) if guide is not None and guide.servers else None


def _remote_sync(
    settings: LocalEngineConfig | ServerEngineConfig,
    folder: Path,
    source: ModelWeights,
    told: WeightSource,
    pool: ServerPool,
    probe: Probe,
) -> RemoteSync:
    if sends_adapters(settings):
        return RemoteSync(TrainedWeights(source), pool.group, adapter_transport(settings, folder, source), probe)
    sleeps = isinstance(settings, ServerEngineConfig) and settings.sleep
    return RemoteSync(told, pool.group, make_transport(settings, folder), probe, sleeps=sleeps)


def check_rendering(config: Config, renderer: Renderer) -> None:
    """Check, before anything is sampled, that the chat template can be rendered turn by turn.

    Raises:
        TemplateError: it rewrites history (the two renderings are shown), or cannot call tools where the loop does.
        UsageError: the environment shows images to a model that reads text only.
    """
    for part in parts_of(config):
        environment = part.config.sole_environment
        spec = resolve_environment(environment.name)
        if renderer.images is None and spec.shows_images(environment.options):
            raise UsageError(
                f"environment {spec.name} shows images, and the model reads text only",
                got=config.model.path,
                expected=f"a vision-language model ({', '.join(MODEL_TYPES)})",
                hint="or let the environment show text",
            )
        loop = make_agent_loop(part.config.agent.loop, part.config.agent.options)
        if loop.offers_tools:
            renderer.require_tool_parser()
        if loop.follow_ups:
            check_template(renderer, roles=loop.follow_ups)


def _build_trainer(
    config: Config, model_path: str, reference_path: str | None, reader: ImageReader | None, ranks: Ranks
) -> TrainerParts:
    with ranks.broadcast_call(BUILD, config.model_dump(mode="json"), model_path, reference_path):
        return build_trainer(config, model_path=model_path, reference_path=reference_path, reader=reader, ranks=ranks)


def _build_scheduler(
    config: Config,
    environments: tuple[RunEnvironment, ...],
    tasks: TaskSampler,
    extra_runners: ExtraRunners,
    *,
    version: int,
    keep: Callable[[Group], bool] | None,
    least_members: int,
) -> GroupScheduler:
    return GroupScheduler(
        {environment.label: environment.runner for environment in environments},
        tasks,
        group_size=own_members(config.algorithm),
        batch=config.trainer.tasks_per_step,
        max_staleness=config.rollout.max_staleness,
        max_concurrent=config.rollout.max_concurrent,
        seed=config.run.seed,
        version=version,
        keep=keep,
        least_members=least_members,
        extra_runners=extra_runners,
    )
