"""Environments of a run, each with its episode runner: agent loop, tools, scorer, budgets."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from agentrl.agent_loop import AgentLoop
from agentrl.builders.rewards import build_scorer
from agentrl.builders.roles import build_roles, check_roles
from agentrl.builders.tools import build_tools, check_tools, sandbox_maker
from agentrl.config.config import Config
from agentrl.config.derived import agent_loop_class, make_agent_loop, per_environment_configs, turns_are_steps
from agentrl.config.engines import EngineConfig, ServerEngineConfig
from agentrl.config.environment import AgentConfig, CurriculumConfig
from agentrl.config.rollout import SamplingConfig
from agentrl.config.step_settings import STAGE_MARK, Settings, environment_stages, stage_starts
from agentrl.engine import FirstToken, SamplingParams
from agentrl.env import EnvironmentSpec
from agentrl.env.lookup import resolve_environment
from agentrl.errors import ConfigError
from agentrl.errors.deadlines import close_limit
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import EnvPool, EnvWorker
from agentrl.rollout.events import RolloutCounters, RolloutObserver
from agentrl.rollout.few_shot import FewShotExamples
from agentrl.rollout.journal import JournalFolder
from agentrl.rollout.journal_replay import JournaledRunner
from agentrl.rollout.judges import JudgeClient, build_judge
from agentrl.rollout.policies import EpisodePolicy
from agentrl.rollout.reward_functions import WeightedSum
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.task_order import TaskSampler
from agentrl.rollout.task_source import task_source
from agentrl.rollout.tools import ToolLimits
from agentrl.rollout.waits import WaitTracker
from agentrl.sandbox import Sandbox
from agentrl.tool import Toolset

TRAIN = "train"


class EnvironmentPlaces(Protocol):
    """Other machines for the environments and sandboxes of a run."""

    def workers(self, count: int) -> EnvWorker:
        """Return the workers of an environment pool, `count` processes on each machine."""

    @property
    def make_sandbox(self) -> Callable[[], Sandbox] | None:
        """Function that opens a sandbox on a machine; ``None`` if sandboxes do not run there."""


def build_env_pool(
    config: Config,
    *,
    spec: EnvironmentSpec | None = None,
    waits: WaitTracker | None = None,
    nodes: EnvironmentPlaces | None = None,
) -> EnvPool:
    """Build the environment pool of a run from the ``environment`` section."""
    environment = config.sole_environment
    worker = None if nodes is None else nodes.workers(environment.workers)
    return EnvPool.from_config(spec or resolve_environment(environment.name), environment, waits=waits, worker=worker)


def build_runner(
    config: Config,
    pool: EnvPool,
    policy: EpisodePolicy,
    *,
    observer: RolloutObserver | None = None,
    counters: RolloutCounters | None = None,
    tool_limits: ToolLimits | None = None,
    retries: int | None = None,
    judge: JudgeClient | None = None,
    journals: JournalFolder | None = None,
    make_sandbox: Callable[[], Sandbox] | None = None,
    agent: Callable[[], AgentConfig] | None = None,
) -> EpisodeRunner:
    """Build an episode runner from the ``agent`` section; its loop, tools, roles and judge are closed with the pool.

    With `journals`, the runner continues the episodes that were in flight when the run was killed.

    `make_sandbox` opens the sandboxes of tools elsewhere than ``agent.sandbox`` says.

    `agent` returns the budgets of an episode that starts now; by default they are those of the config.

    Raises:
        ConfigError: see `build_loop`.
        UnknownNameError: no such loop, tool or reward function.
    """
    scorer = build_scorer(config.agent, config.model, pool, policy, judge=judge)
    tools = build_tools(config.agent)
    for one in tools:
        if isinstance(one, Toolset):
            pool.cleanup.push_async_callback(one.close)
    loop = build_loop(config.agent, pool.spec.answer_format)
    roles = build_roles(config.agent, loop, pool.roles)
    limits = _limits_of(
        config,
        pool.spec,
        turns_are_steps=turns_are_steps(loop, config.agent),
        limits_scorer=config.agent.judge is None and not isinstance(scorer, WeightedSum),
    )
    for toolset in (one for setup in roles for one in setup.tools or () if isinstance(one, Toolset)):
        pool.cleanup.push_async_callback(toolset.close)
    make: Callable[..., EpisodeRunner] = EpisodeRunner
    if journals is not None:
        make = partial(JournaledRunner, journals=journals)
    return make(
        pool=pool,
        loop=loop,
        roles=roles,
        policy=policy,
        limits=limits(config.agent),
        limits_in_force=None if agent is None else lambda: limits(agent()),
        tools=tools,
        tool_limits=tool_limits,
        make_sandbox=make_sandbox or sandbox_maker(config.agent),
        policy_wrapper=_few_shot(config, pool.spec),
        scorer=scorer,
        system_prompt=config.agent.system_prompt,
        retries=config.rollout.retries if retries is None else retries,
        observer=observer,
        counters=counters,
    )


def _limits_of(
    config: Config, spec: EnvironmentSpec, *, turns_are_steps: bool, limits_scorer: bool
) -> Callable[[AgentConfig], EpisodeLimits]:
    """Return the function from the agent's settings to the limits of an episode.

    Args:
        config: Config of one environment.
        spec: The environment.
        turns_are_steps: False if an environment's step limit does not limit the turns.
        limits_scorer: False if the requests or functions of the scorer have deadlines of their own.
    """

    def limits(agent: AgentConfig) -> EpisodeLimits:
        own = EpisodeLimits.from_config(
            agent, spec, config.sole_environment.options, answer_timeout_s=_answer_timeout_s(config.engine)
        )
        own = own if turns_are_steps else replace(own, max_turns=agent.max_turns)
        return own if limits_scorer else replace(own, score_timeout_s=None)

    return limits


def _few_shot(config: Config, spec: EnvironmentSpec) -> FewShotExamples | None:
    """Return the few-shot examples of the prompt, from tasks of the training split if the environment has one."""
    if not config.agent.few_shot_turns:
        return None
    environment = config.sole_environment
    if environment.tasks is None and TRAIN in spec.splits:
        environment = environment.model_copy(update={"split": TRAIN})
    return FewShotExamples(config.agent.few_shot_turns, task_source(spec, environment))


def _answer_timeout_s(engine: EngineConfig) -> float:
    """Return the seconds that an episode waits for an answer, including a restart of servers."""
    if not isinstance(engine, ServerEngineConfig):
        return engine.timeout_s
    return engine.timeout_s + (engine.start_timeout_s if engine.servers == "launch" else engine.lost_timeout_s)


def build_loop(config: AgentConfig, answer_format: str = "") -> AgentLoop:
    """Build the agent loop from the ``agent`` section.

    Args:
        config: Section of the config.
        answer_format: Default of the loop's option ``format``, if it has one.

    Raises:
        ConfigError: the loop does not accept an option, or would ignore a setting.
        UnknownNameError: the loop does not exist.
    """
    options = dict(config.options)
    if answer_format and "format" in inspect.signature(agent_loop_class(config.loop)).parameters:
        options.setdefault("format", answer_format)
    loop = make_agent_loop(config.loop, options)
    named = [entry if isinstance(entry, str) else str(entry["name"]) for entry in config.tools]
    ignored = {"tools": ", ".join(named)} if named else {}
    if config.tool_parser != AgentConfig.model_fields["tool_parser"].default:
        ignored["tool_parser"] = config.tool_parser
    if ignored and not loop.offers_tools:
        name, value = next(iter(ignored.items()))
        raise ConfigError(
            f"agent.{name} is ignored by the agent loop {config.loop}",
            got=value,
            expected=f"agent.loop=tool_calling, or no agent.{name}",
            hint="if your own loop lets the policy call tools, set offers_tools = True in it",
        )
    return loop


def sampling_params(sampling: SamplingConfig) -> SamplingParams:
    """Build sampling parameters from the ``sampling`` section."""
    first = sampling.first_token
    hot = None if first is None else FirstToken(temperature=first.temperature, top_k=first.top_k)
    return SamplingParams(**sampling.model_dump(exclude={"first_token"}), first_token=hot)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """One environment of a run, with its pool and runner."""

    label: str
    """Label from the config; empty for a sole environment."""
    weight: float
    config: Config
    """Config of the run with only this environment and its agent settings."""
    spec: EnvironmentSpec
    pool: EnvPool
    runner: EpisodeRunner


def build_run_environments(
    config: Config,
    policy: EpisodePolicy,
    *,
    observer: RolloutObserver | None = None,
    folder: Path | None = None,
    waits: WaitTracker | None = None,
    journals: JournalFolder | None = None,
    nodes: EnvironmentPlaces | None = None,
    settings: Settings | None = None,
) -> tuple[RunEnvironment, ...]:
    """Build the environments of a run, in the order of the config; they share wait tracker, counters and judge.

    With `settings`, those of later stages follow.

    Args:
        config: Config of the run.
        policy: Policy that plays the episodes.
        observer: Observer of turns and episode ends.
        folder: Folder of the run, where a judge stores its answers.
        waits: Table of the run's waits; a new one by default.
        journals: Journals of the episodes in flight, in asynchronous training.
        nodes: Nodes of a cluster for environments and sandboxes; this machine by default.
        settings: Current settings, which give the budgets of training episodes; those of the config by default.

    Raises:
        UsageError: an environment does not exist.
        ConfigError: an agent loop or a tool does not accept an option.
    """
    check_roles(config)
    check_tools(config)
    waits, counters, environments = waits or WaitTracker(), RolloutCounters(), []
    tool_limits = ToolLimits(waits.clock)
    judge = build_judge(config.agent, folder=folder)
    later = () if settings is None else environment_stages(config)
    for part in (*per_environment_configs(config), *later):
        spec = resolve_environment(part.config.sole_environment.name)
        pool = build_env_pool(part.config, spec=spec, waits=waits, nodes=nodes)
        runner = build_runner(
            part.config,
            pool,
            policy,
            observer=observer,
            counters=counters,
            tool_limits=tool_limits,
            judge=judge,
            make_sandbox=None if nodes is None else nodes.make_sandbox,
            journals=journals,
            agent=None if settings is None else partial(settings.agent, part.label.partition(STAGE_MARK)[0]),
        )
        environments.append(
            RunEnvironment(
                label=part.label, weight=part.weight, config=part.config, spec=spec, pool=pool, runner=runner
            )
        )
    return tuple(environments)


async def close_run_environments(environments: Sequence[RunEnvironment]) -> None:
    """Close the environments of a run, each part of them within `close_limit`. No episode may be running."""
    within_s = close_limit()  # of this task: the cancellation of the past does not reach those of `gather`
    closing = (environment.runner.close(within_s=within_s) for environment in environments)
    for outcome in await asyncio.gather(*closing, return_exceptions=True):
        if outcome is not None:
            raise outcome


def build_task_sampler(
    config: Config, *, curriculum: CurriculumConfig | None = None, stages: bool = False
) -> TaskSampler:
    """Build the sampler of a run's tasks.

    Args:
        config: Config of the run.
        curriculum: Pools and horizon; neither by default.
        stages: True to change the settings of environments as the config's stages say.

    Raises:
        UsageError: an environment, a split or a task file does not exist.
    """
    parts, later = per_environment_configs(config), environment_stages(config) if stages else ()
    environments = {part.label: part.config.sole_environment for part in (*parts, *later)}
    return TaskSampler(
        {label: task_source(resolve_environment(found.name), found) for label, found in environments.items()},
        seed=config.run.seed,
        weights={part.label: part.weight for part in parts},
        curriculum=curriculum,
        stages=stage_starts(config) if stages else None,
    )
