"""The environments of a run, each with the runner of its episodes: agent loop, tools, scorer, budgets."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.agent_loop import AgentLoop
from agentrl.builders.environments import task_source
from agentrl.builders.rewards import build_judge, build_scorer
from agentrl.builders.roles import build_roles, check_roles
from agentrl.builders.tools import build_tools, check_tools, sandbox_maker
from agentrl.config.config import Config, SamplingConfig
from agentrl.config.derived import agent_loop_class, per_environment_configs
from agentrl.config.engines import EngineConfig, ServerEngineConfig
from agentrl.config.environment import AgentConfig, CurriculumConfig
from agentrl.engine import SamplingParams
from agentrl.env import EnvironmentSpec
from agentrl.env_lookup import resolve_environment
from agentrl.errors import ConfigError
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.judges.client import JudgeClient
from agentrl.rollout.policies import EpisodePolicy
from agentrl.rollout.reward_functions import WeightedSum
from agentrl.rollout.runner import EpisodeRunner, make_agent_loop, role_names
from agentrl.rollout.shots import Shots
from agentrl.rollout.task_order import TaskSampler
from agentrl.rollout.tools import ToolLimits
from agentrl.rollout.turns import EpisodeLimits
from agentrl.rollout.waits import RolloutCounters, RolloutObserver, WaitTracker
from agentrl.tool import Toolset

TRAIN = "train"


def build_env_pool(config: Config, *, spec: EnvironmentSpec | None = None, waits: WaitTracker | None = None) -> EnvPool:
    """The environments of a run, as the ``environment`` section says."""
    environment = config.sole_environment
    return EnvPool.from_config(spec or resolve_environment(environment.name), environment, waits=waits)


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
) -> EpisodeRunner:
    """A runner of episodes, as the ``agent`` section says; what its tools and its judge opened is closed with the pool.

    Raises:
        ConfigError: see `build_loop`.
        UnknownNameError: no such loop, tool or reward function.
    """
    limits = EpisodeLimits.from_config(
        config.agent,
        pool.spec,
        config.sole_environment.options,
        answer_timeout_s=_answer_timeout_s(config.engine),
    )
    scorer = build_scorer(config.agent, config.model, pool, policy, judge=judge)
    if config.agent.judge is not None or isinstance(scorer, WeightedSum):
        limits = replace(limits, score_timeout_s=None)  # requests and functions have deadlines, from when they begin
    tools = build_tools(config.agent)
    for one in tools:
        if isinstance(one, Toolset):
            pool.cleanup.push_async_callback(one.close)
    loop = build_loop(config.agent, pool.spec.answer_format)
    roles = build_roles(config.agent, loop, pool.roles)
    if role_names(loop, config.agent.called_roles) or not loop.turns_are_steps:
        limits = replace(limits, max_turns=config.agent.max_turns)  # the environment counts its own steps
    for toolset in (one for setup in roles for one in setup.tools or () if isinstance(one, Toolset)):
        pool.cleanup.push_async_callback(toolset.close)
    return EpisodeRunner(
        pool=pool,
        loop=loop,
        roles=roles,
        policy=policy,
        limits=limits,
        tools=tools,
        tool_limits=tool_limits,
        make_sandbox=sandbox_maker(config.agent),
        shots=_shots(config, pool.spec),
        scorer=scorer,
        system_prompt=config.agent.system_prompt,
        retries=config.rollout.retries if retries is None else retries,
        observer=observer,
        counters=counters,
    )


def _shots(config: Config, spec: EnvironmentSpec) -> Shots | None:
    """Return the examples of a prompt, played on tasks of the training split, if there is one."""
    if not config.agent.shots:
        return None
    environment = config.sole_environment
    if environment.tasks is None and TRAIN in spec.splits:
        environment = environment.model_copy(update={"split": TRAIN})
    return Shots(config.agent.shots, task_source(spec, environment))


def _answer_timeout_s(engine: EngineConfig) -> float:
    """Return how long an episode waits for an answer: servers may have to come back first."""
    return engine.timeout_s + (engine.start_timeout_s if isinstance(engine, ServerEngineConfig) else 0.0)


def build_loop(config: AgentConfig, answer_format: str = "") -> AgentLoop:
    """Return the agent loop, as the ``agent`` section says.

    Args:
        config: The section.
        answer_format: ``format`` of a loop that has this option, where the section does not set it.

    Raises:
        ConfigError: the loop does not take the options, or would ignore a setting.
        UnknownNameError: no such loop.
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
            hint="a loop of your own that lets the policy call tools says so: offers_tools = True",
        )
    return loop


def sampling_params(sampling: SamplingConfig) -> SamplingParams:
    """Make sampling parameters as the ``sampling`` section says."""
    return SamplingParams(**sampling.model_dump())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """One environment of a run, ready to be played."""

    label: str
    """As the user calls it; empty for the only one."""
    weight: float
    config: Config
    """The run's, with this environment alone and the agent as it is there."""
    spec: EnvironmentSpec
    pool: EnvPool
    runner: EpisodeRunner


def build_run_environments(
    config: Config, policy: EpisodePolicy, *, observer: RolloutObserver | None = None, folder: Path | None = None
) -> tuple[RunEnvironment, ...]:
    """The environments of a run, in the order of its config; they share their waits, counters and judge.

    Args:
        config: The run.
        policy: Who plays.
        observer: Notified of turns and endings.
        folder: Of the run; a judge keeps its answers there.

    Raises:
        UsageError: an environment that is not there.
        ConfigError: options that an agent loop or a tool does not take.
    """
    check_roles(config)
    check_tools(config)
    waits, counters, environments = WaitTracker(), RolloutCounters(), []
    tool_limits = ToolLimits(waits.clock)
    judge = build_judge(config.agent, folder=folder, counters=counters)
    for part in per_environment_configs(config):
        spec = resolve_environment(part.config.sole_environment.name)
        pool = build_env_pool(part.config, spec=spec, waits=waits)
        runner = build_runner(
            part.config, pool, policy, observer=observer, counters=counters, tool_limits=tool_limits, judge=judge
        )
        environments.append(
            RunEnvironment(
                label=part.label, weight=part.weight, config=part.config, spec=spec, pool=pool, runner=runner
            )
        )
    return tuple(environments)


async def close_run_environments(environments: Sequence[RunEnvironment]) -> None:
    """Close their environments. No episode may be running."""
    await asyncio.gather(*(environment.runner.close() for environment in environments))


def build_task_sampler(config: Config, *, curriculum: CurriculumConfig | None = None) -> TaskSampler:
    """The order in which a run plays its tasks.

    Args:
        config: The run.
        curriculum: Pools and horizon; neither when left out.

    Raises:
        UsageError: an environment, a split or a file of tasks that is not there.
    """
    parts = per_environment_configs(config)
    environments = {part.label: part.config.sole_environment for part in parts}
    return TaskSampler(
        {label: task_source(resolve_environment(found.name), found) for label, found in environments.items()},
        seed=config.run.seed,
        weights={part.label: part.weight for part in parts},
        curriculum=curriculum,
    )
