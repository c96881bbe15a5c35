"""Connected parts of a training run: config ─► environments, trainer, engine, weight sync, scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from agentrl.builders.adapters import build_adapters
from agentrl.builders.checks import check_training
from agentrl.builders.episodes import (
    RunEnvironment,
    build_run_environments,
    build_task_sampler,
    close_run_environments,
    sampling_params,
)
from agentrl.builders.group_extras import GroupExtras, build_group_extras, learning_signal, policy_group_size
from agentrl.builders.learning import build_learning
from agentrl.builders.models import build_renderer, check_policy
from agentrl.config.config import Config
from agentrl.engine import PolicyEngine
from agentrl.errors.foreign import CLOSE_S
from agentrl.render.renderer import Renderer
from agentrl.render.tokenizers import load_tokenizer, pad_id
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.roles.role_policies import AdapterPolicy
from agentrl.rollout.scheduler import Group, GroupScheduler
from agentrl.rollout.task_order import TaskSampler
from agentrl.rollout.waits import RolloutCounters, RolloutObserver, WaitTracker
from agentrl.serving.local import LocalEngine
from agentrl.serving.pool import ServerPool
from agentrl.training.contract import PolicyTrainer, PolicyWeights
from agentrl.training.distributed import Ranks
from agentrl.weights import WeightSync


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """Connected parts of a training run."""

    environments: tuple[RunEnvironment, ...]
    tokenizer: PreTrainedTokenizerFast
    renderer: Renderer
    engine: PolicyEngine
    policy: EngineEpisodePolicy
    scheduler: GroupScheduler
    trainer: PolicyTrainer
    source: PolicyWeights
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

    async def close(self, *, within_s: float = CLOSE_S) -> None:
        """Stop episodes, environments (each part of them in `within_s`), weight sync and the engine, in this order."""
        await self.scheduler.close()
        await close_run_environments(self.environments, within_s=within_s)
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
    say: Callable[[str], None] = lambda _: None,
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
    check_policy(config, renderer, model_path, say=say)
    build = build_adapters if config.named_adapters else build_learning
    learning = build(
        config,
        ranks or Ranks(),
        pool,
        model_path=model_path,
        base_path=reference_path,
        version=version,
        renderer=renderer,
    )
    engine, trainer = learning.engine, learning.trainer
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
    teaches = learning_signal(config)
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
        sync=learning.sync,
        extras=extras,
        idle_while_training=in_step and config.trainer.processes == 1,
    )


def _build_scheduler(
    config: Config,
    environments: tuple[RunEnvironment, ...],
    tasks: TaskSampler,
    extras: GroupExtras,
    *,
    version: int,
    keep: Callable[[Group], bool] | None,
    trainer: PolicyTrainer,
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
