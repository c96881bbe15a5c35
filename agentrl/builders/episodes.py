"""The environments of a run, each with the runner of its episodes: agent loop, tools, scorer, budgets."""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.agent_loop import AgentLoop
from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.builders.environments import task_source
from agentrl.config.config import Config, ModelConfig, SamplingConfig
from agentrl.config.derived import parts_of
from agentrl.config.engines import EngineConfig, ServerEngineConfig
from agentrl.config.environment import AgentConfig, CurriculumConfig, JudgeConfig, RewardModelConfig
from agentrl.engine import SamplingParams
from agentrl.env import EnvironmentSpec
from agentrl.env_lookup import resolve_environment
from agentrl.errors import ConfigError, UsageError
from agentrl.observe.model_folder import find_model
from agentrl.registry import Kind, lookup
from agentrl.remote.chat import ChatService, ServiceSettings
from agentrl.reward import Score, Scorer, fingerprint
from agentrl.rollout.env_pool import EnvPool, ThreadWorker
from agentrl.rollout.judges import Decode, Judge, require_tokens, transcript
from agentrl.rollout.policies import EngineEpisodePolicy, EpisodePolicy
from agentrl.rollout.reward_functions import FunctionReward, WeightedReward, WeightedSum
from agentrl.rollout.runner import EpisodeRunner, make_agent_loop
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy
from agentrl.rollout.task_order import TaskSampler
from agentrl.rollout.tools import ToolLimits
from agentrl.rollout.turns import EpisodeLimits
from agentrl.rollout.waits import RolloutCounters, RolloutObserver, Waits
from agentrl.sandbox import Sandbox, open_sandbox, read_spec
from agentrl.task import Task
from agentrl.tool import Tool, Toolset, tool
from agentrl.tool_schema import Arguments, WrongArguments
from agentrl.training.reward_model import RewardModel
from agentrl.trajectory import Trajectory

LIMITS = ("timeout_s", "max_tokens", "max_concurrent", "max_per_second")
"""Rules of a tool that a config may change."""


def build_tools(agent: AgentConfig) -> list[Tool | Toolset]:
    """The configured tools, with their options.

    Raises:
        ConfigError: options that a tool does not take, or two tools of one name.
        UnknownNameError: no such tool.
    """
    found = [find_tool(entry) for entry in agent.tools]
    counts = Counter(one.name for one in found if isinstance(one, Tool))
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ConfigError("agent.tools holds two tools of one name", got=", ".join(twice), expected="one of a name")
    return found


def find_tool(entry: str | Mapping[str, Any]) -> Tool | Toolset:
    """Find what an entry of ``agent.tools`` names: a registry name or ``module:attr``, alone or with options.

    A plain function becomes a tool. Limits of calls (`LIMITS`) may be among the options of any tool.

    Raises:
        ConfigError: options that it does not take.
        UnknownNameError: no such tool.
    """
    options = {} if isinstance(entry, str) else {key: value for key, value in entry.items() if key != "name"}
    name = entry if isinstance(entry, str) else str(entry["name"])
    found = lookup(Kind.TOOL, name)
    if inspect.isclass(found) and issubclass(found, Toolset):
        return _make_toolset(name, found, options)
    if not callable(found):
        raise ConfigError(f"{name} is no tool", got=type(found).__name__, expected="a function with @agentrl.tool")
    made = found if isinstance(found, Tool) else tool(found)
    limits = {name: options.pop(name) for name in LIMITS if name in options}
    if limits:
        made = made.with_rules(limits)
    if not options and not made.is_stateful:
        return made
    return made.with_options(options)


def _make_toolset(name: str, kind: type[Toolset], options: Mapping[str, Any]) -> Toolset:
    arguments = Arguments(f"tools {name}", types.MethodType(kind.__init__, kind))
    try:
        return kind(**arguments.read(options))
    except WrongArguments as error:
        raise ConfigError(f"options of tools {name} do not fit: {error}", expected=arguments.described()) from error


def sandbox_maker(agent: AgentConfig) -> Callable[[], Sandbox] | None:
    """Makes the sandboxes of episodes, as ``agent.sandbox`` says.

    Raises:
        ConfigError: the section is not understood.
    """
    if agent.sandbox is None:
        return None
    try:
        return functools.partial(open_sandbox, read_spec(agent.sandbox))
    except UsageError as error:
        what = f"agent.sandbox: {error.what}"
        raise ConfigError(what, got=error.got, expected=error.expected, hint=error.hint) from error


def uses_sandbox(tools: Sequence[Tool | Toolset]) -> bool:
    """Check whether one of the tools works in the episode's sandbox."""
    return any(isinstance(one, Tool) and one.needs_sandbox for one in tools)


def check_tools(config: Config) -> None:
    """Check the tools of all environments before anything is played.

    Raises:
        ConfigError: a tool needs a sandbox that is not configured, or none needs the one that is.
    """
    agents = [part.config.agent for part in parts_of(config)]
    users = [agent for agent in agents if uses_sandbox(build_tools(agent))]
    for agent in agents:
        sandbox_maker(agent)
    if users and config.agent.sandbox is None:
        names = [one.name for one in build_tools(users[0]) if isinstance(one, Tool) and one.needs_sandbox]
        raise ConfigError(
            f"the tools {', '.join(names)} need a sandbox" if len(names) > 1 else f"tool {names[0]} needs a sandbox",
            expected="the section agent.sandbox",
            hint="set agent.sandbox={type: local}",
        )
    if config.agent.sandbox is not None and not users:
        raise ConfigError(
            "agent.sandbox is ignored: no tool uses it",
            expected="a tool that does, such as python, bash or read_file, in agent.tools",
            hint="or remove agent.sandbox",
        )


def build_scorer(config: AgentConfig, model: ModelConfig, pool: EnvPool, policy: EpisodePolicy) -> Scorer:
    """The scorer of an ``agent`` section; what it opened is closed with the pool.

    Args:
        config: Who scores.
        model: Device and number format of a reward model.
        pool: Of the environment.
        policy: Who plays.

    Raises:
        ConfigError: two are asked for, or the judge's prompt is no template.
        UsageError: there is no such reward model.
        UnknownNameError: no such reward function.
    """
    _check_one(config)
    if config.judge is not None:
        service = ChatService(_settings(config.judge))
        pool.belongings.push_async_callback(service.close)
        return Judge(service, config.judge, _decoder(policy))
    if config.reward_model is not None:
        return RewardModelScorer(config.reward_model, model, _decoder(policy))
    thread = ThreadWorker()
    pool.belongings.push_async_callback(thread.close)
    return find_reward(config, thread)


def _check_one(config: AgentConfig) -> None:
    asked = {
        "reward": config.reward != AgentConfig().reward,
        "judge": config.judge is not None,
        "reward_model": config.reward_model is not None,
    }
    if sum(asked.values()) > 1:
        raise ConfigError(
            "an episode has one scorer",
            got=" and ".join(f"agent.{name}" for name, is_asked in asked.items() if is_asked),
            expected="one of them",
            hint="environment_weight of a judge or a reward model adds the environment's own reward",
        )


class RewardModelScorer(Scorer):
    """Lets a reward model read episodes, one at a time, in a thread.

    Args:
        settings: Which.
        model: Its device and number format.
        decode: Text of the policy's tokens.

    Raises:
        UsageError: there is no such model, or it has no output for a reward.
    """

    def __init__(self, settings: RewardModelConfig, model: ModelConfig, decode: Decode) -> None:
        self._settings, self._decode = settings, decode
        self._model = RewardModel(
            find_model(settings.path), dtype=model.dtype, device=model.device, max_tokens=settings.max_tokens
        )
        self._one_at_a_time = asyncio.Lock()

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Its reward, plus the weighted reward of the environment.

        Raises:
            UsageError: the episode has no tokens to be read.
        """
        require_tokens(trajectory, "a reward model")
        earned = trajectory.environment_reward
        text = transcript(trajectory, self._decode)
        async with self._one_at_a_time:
            judged = await asyncio.to_thread(self._model.score, text)
        return Score(
            reward=judged + self._settings.environment_weight * earned,
            components={"reward_model": judged, "environment": earned},
        )


def find_reward(config: AgentConfig, thread: ThreadWorker) -> Scorer:
    """Find what ``agent.reward`` names: one scorer alone, or the weighted sum of several rewards.

    Args:
        config: Names, weights and options.
        thread: Runs functions that block.

    Raises:
        UnknownNameError: no such reward function.
        ConfigError: something that is no reward function, options that it does not take, or two of one name.
    """
    entries = [{"name": entry} if isinstance(entry, str) else entry for entry in config.reward]
    found = [_found(entry, thread) for entry in entries]
    if len(found) == 1 and not isinstance(found[0], FunctionReward) and entries[0].get("weight", 1) == 1:
        return found[0]
    labels = _labels([str(entry["name"]) for entry in entries])
    return WeightedSum(
        [
            WeightedReward(name=label, weight=float(entry.get("weight", 1.0)), scorer=scorer)
            for label, entry, scorer in zip(labels, entries, found, strict=True)
        ]
    )


def _found(entry: Mapping[str, Any], thread: ThreadWorker) -> Scorer:
    name = str(entry["name"])
    options = {key: value for key, value in entry.items() if key not in ("name", "weight")}
    target = lookup(Kind.REWARD, name)
    if isinstance(target, Scorer):
        if options:
            raise ConfigError(f"reward {name} takes no options", got=", ".join(options), expected="none")
        return target
    if inspect.isclass(target) and issubclass(target, Scorer):
        try:
            return target(**options)
        except TypeError as error:
            raise ConfigError(f"options of reward {name} do not fit", got=error) from error
    return FunctionReward(name, target, options, thread)


def _labels(names: Sequence[str]) -> list[str]:
    """Short names, or whole ones where two of them would be the same."""
    short = [name.rpartition(":")[2].rpartition(".")[2] for name in names]
    return [name if short.count(label) > 1 else label for name, label in zip(names, short, strict=True)]


def reward_fingerprints(config: AgentConfig) -> dict[str, str]:
    """Hash the code of the functions that ``agent.reward`` names, by name; the default has no hash."""
    names = [entry if isinstance(entry, str) else str(entry["name"]) for entry in config.reward]
    return {name: fingerprint(lookup(Kind.REWARD, name)) for name in names if name not in AgentConfig().reward}


def check_rewards(config: Config) -> None:
    """Check, before a run has a folder, what scores the episodes of all environments.

    Raises:
        UnknownNameError: no such reward function.
        ConfigError: a function that takes other arguments, or nothing rewards the episodes of an environment that gives
            no rewards itself.
    """
    for part in parts_of(config):
        agent, spec = part.config.agent, resolve_environment(part.config.sole_environment.name)
        _check_one(agent)
        find_reward(agent, ThreadWorker())
        is_scored = agent.judge is not None or agent.reward_model is not None
        if spec.reward_range == (0.0, 0.0) and agent.reward == AgentConfig().reward and not is_scored:
            raise ConfigError(
                f"environment {spec.name} gives no rewards of its own",
                got="agent.reward environment",
                expected="a reward function: --reward my_module:my_function, or agent.reward in a config",
                hint="see docs/reward-functions.md",
            )


def check_reward_weights(config: Config) -> None:
    """Check that an estimator which normalises the components of rewards is not expected to read their weights.

    Raises:
        ConfigError: it would ignore them.
    """
    if Input.COMPONENTS not in needed_inputs(lookup(Kind.ADVANTAGE, config.algorithm.advantage)):
        return
    for part in parts_of(config):
        entries = [entry for entry in part.config.agent.reward if isinstance(entry, dict)]
        weighted = {str(entry["name"]): entry.get("weight", 1) for entry in entries if entry.get("weight", 1) != 1}
        if weighted:
            labels = dict(zip(_labels(list(weighted)), weighted.values(), strict=True))
            words = ", ".join(f"{label}: {weight:g}" for label, weight in labels.items())
            raise ConfigError(
                f"{config.algorithm.advantage} weighs the components of a reward itself, and ignores weights in "
                "agent.reward",
                got=", ".join(f"weight {weight:g} of {name}" for name, weight in weighted.items()),
                expected="no weights there",
                hint=f"set algorithm.advantage_options={{weights: {{{words}}}}}",
            )


def longest_score_s(judge: JudgeConfig) -> float:
    """Seconds that a judge may take for an episode."""
    return judge.engine.timeout_s * judge.attempts


def _settings(judge: JudgeConfig) -> ServiceSettings:
    engine = judge.engine
    return ServiceSettings(
        url=engine.url,
        model=engine.model,
        api_key_variable=engine.api_key_variable,
        timeout_s=engine.timeout_s,
        retries=engine.retries,
        max_concurrent=engine.max_concurrent,
        section="agent.judge.engine",
    )


def _decoder(policy: EpisodePolicy) -> Decode:
    """Decode the policy's tokens; a policy without tokens is never asked."""
    renderer = policy.renderer if isinstance(policy, EngineEpisodePolicy | ScriptedEpisodePolicy) else None
    return (lambda ids: "") if renderer is None else renderer.encoder.decode_plain


def build_env_pool(config: Config, *, spec: EnvironmentSpec | None = None, waits: Waits | None = None) -> EnvPool:
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
) -> EpisodeRunner:
    """A runner of episodes, as the ``agent`` section says; what its tools opened is closed with the pool.

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
    scorer = build_scorer(config.agent, config.model, pool, policy)
    if config.agent.judge is not None:
        limits = replace(limits, score_timeout_s=longest_score_s(config.agent.judge))
    elif isinstance(scorer, WeightedSum):
        limits = replace(limits, score_timeout_s=None)  # functions have deadlines, which begin when their turn comes
    tools = build_tools(config.agent)
    for one in tools:
        if isinstance(one, Toolset):
            pool.belongings.push_async_callback(one.close)
    return EpisodeRunner(
        pool=pool,
        loop=build_loop(config.agent),
        policy=policy,
        limits=limits,
        tools=tools,
        tool_limits=tool_limits,
        make_sandbox=sandbox_maker(config.agent),
        scorer=scorer,
        system_prompt=config.agent.system_prompt,
        retries=config.rollout.retries if retries is None else retries,
        observer=observer,
        counters=counters,
    )


def _answer_timeout_s(engine: EngineConfig) -> float:
    """Return how long an episode waits for an answer: servers may have to come back first."""
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
    config: Config, policy: EpisodePolicy, *, observer: RolloutObserver | None = None
) -> tuple[RunEnvironment, ...]:
    """The environments of a run, in the order of its config; they share their waits and counters.

    Raises:
        UsageError: an environment that is not there.
        ConfigError: options that an agent loop or a tool does not take.
    """
    check_tools(config)
    waits, counters, environments = Waits(), RolloutCounters(), []
    tool_limits = ToolLimits(waits.clock)
    for part in parts_of(config):
        spec = resolve_environment(part.config.sole_environment.name)
        pool = build_env_pool(part.config, spec=spec, waits=waits)
        runner = build_runner(part.config, pool, policy, observer=observer, counters=counters, tool_limits=tool_limits)
        environments.append(
            RunEnvironment(
                label=part.label, weight=part.weight, config=part.config, spec=spec, pool=pool, runner=runner
            )
        )
    return tuple(environments)


async def close_run_environments(environments: Sequence[RunEnvironment]) -> None:
    """Close their environments. No episode may be running."""
    await asyncio.gather(*(environment.pool.close() for environment in environments))


def build_task_sampler(config: Config, *, curriculum: CurriculumConfig | None = None) -> TaskSampler:
    """The order in which a run plays its tasks.

    Args:
        config: The run.
        curriculum: Pools and horizon; neither when left out.

    Raises:
        UsageError: an environment, a split or a file of tasks that is not there.
    """
    parts = parts_of(config)
    environments = {part.label: part.config.sole_environment for part in parts}
    return TaskSampler(
        {label: task_source(resolve_environment(found.name), found) for label, found in environments.items()},
        seed=config.run.seed,
        weights={part.label: part.weight for part in parts},
        curriculum=curriculum,
    )
