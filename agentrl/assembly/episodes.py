"""What plays episodes: environments, agent loop, tools, scorer, budgets."""

from __future__ import annotations

from dataclasses import replace

from agentrl.agent_loop import AgentLoop
from agentrl.assembly.environments import find_environment
from agentrl.assembly.judges import build_scorer, longest_score_s
from agentrl.assembly.tools import build_tools, sandbox_maker
from agentrl.config.engines import EngineConfig, ServerEngineConfig
from agentrl.config.episodes import AgentConfig
from agentrl.config.schema import Config, SamplingConfig
from agentrl.env import EnvironmentSpec
from agentrl.errors import ConfigError
from agentrl.policy import SamplingParams
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.counters import RolloutCounters, RolloutObserver
from agentrl.rollout.environments import EnvironmentHost
from agentrl.rollout.loops import make_agent_loop
from agentrl.rollout.reward_functions import WeightedSum
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.speaker import Speaker
from agentrl.rollout.stall import Waits
from agentrl.rollout.tool_desk import ToolDesk
from agentrl.tool import Toolset


def build_host(config: Config, *, spec: EnvironmentSpec | None = None, waits: Waits | None = None) -> EnvironmentHost:
    """The environments of a run, as the ``environment`` section says."""
    environment = config.sole_environment
    return EnvironmentHost.from_config(spec or find_environment(environment), environment, waits=waits)


def build_runner(
    config: Config,
    host: EnvironmentHost,
    speaker: Speaker,
    *,
    observer: RolloutObserver | None = None,
    counters: RolloutCounters | None = None,
    desk: ToolDesk | None = None,
    retries: int | None = None,
) -> EpisodeRunner:
    """A runner of episodes, as the ``agent`` section says; what its tools opened is closed with the host.

    Raises:
        ConfigError: see `build_loop`.
        UnknownNameError: no such loop, tool or reward function.
    """
    limits = EpisodeLimits.from_config(
        config.agent,
        host.spec,
        config.sole_environment.options,
        answer_timeout_s=_answer_timeout_s(config.engine),
    )
    scorer = build_scorer(config.agent, config.model, host, speaker)
    if config.agent.judge is not None:
        limits = replace(limits, score_timeout_s=longest_score_s(config.agent.judge))
    elif isinstance(scorer, WeightedSum):
        limits = replace(limits, score_timeout_s=None)  # functions have deadlines, which begin when their turn comes
    tools = build_tools(config.agent)
    for one in tools:
        if isinstance(one, Toolset):
            host.belongings.push_async_callback(one.close)
    return EpisodeRunner(
        host=host,
        loop=build_loop(config.agent),
        speaker=speaker,
        limits=limits,
        tools=tools,
        desk=desk,
        make_sandbox=sandbox_maker(config.agent),
        scorer=scorer,
        system_prompt=config.agent.system_prompt,
        retries=config.rollout.retries if retries is None else retries,
        observer=observer,
        counters=counters,
    )


def _answer_timeout_s(engine: EngineConfig) -> float:
    """How long an episode waits for an answer: servers may have to come back first."""
    return engine.timeout_s + (engine.start_timeout_s if isinstance(engine, ServerEngineConfig) else 0.0)


def build_loop(config: AgentConfig) -> AgentLoop:
    """The agent loop, as the ``agent`` section says.

    Raises:
        ConfigError: the loop does not take the options, or would ignore a setting.
        UnknownNameError: no such loop.
    """
    loop = make_agent_loop(config.loop, config.options)
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
    """How to sample, as the ``sampling`` section says."""
    return SamplingParams(**sampling.model_dump())
