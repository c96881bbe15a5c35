"""Scorers of a run's episodes: reward functions, a judge, or a reward model."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.config.config import Config, ModelConfig
from agentrl.config.derived import per_environment_configs
from agentrl.config.environment import AgentConfig, RewardModelConfig
from agentrl.config.judge import JudgeConfig
from agentrl.env.lookup import resolve_environment
from agentrl.errors import ConfigError
from agentrl.observe.model_folder import find_model
from agentrl.registry import Kind, lookup
from agentrl.remote.chat import ChatService, ServiceSettings
from agentrl.render.renderer import Renderer
from agentrl.render.tokenizers import token_breaker
from agentrl.reward import Score, Scorer
from agentrl.rollout.env_pool import EnvPool, ThreadWorker
from agentrl.rollout.judges import ROUNDS, Decode, JudgeClient, make_judge, pairs_of, require_tokens, transcript
from agentrl.rollout.policies import EngineEpisodePolicy, EpisodePolicy
from agentrl.rollout.reward_functions import FunctionReward, WeightedReward, WeightedSum
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy
from agentrl.rollout.task_source import task_source
from agentrl.rollout.waits import RolloutCounters
from agentrl.task import Task, TaskSource
from agentrl.training.preferences import RewardModel
from agentrl.trajectory import Trajectory

JUDGE_FILE = "judge.jsonl"
"""File in the run's folder with the judge's answers and token counts."""


def build_judge(
    config: AgentConfig, *, folder: Path | None = None, counters: RolloutCounters | None = None
) -> JudgeClient | None:
    """Build the client of the judge that all episodes of a run share; ``None`` if the config has no judge.

    Args:
        config: The ``agent`` section.
        folder: Folder of the run, for the judge's answers and spent budget.
        counters: Counters that the judge updates.
    """
    judge = config.judge
    if judge is None:
        return None
    keeps = judge.cache == "disk" or judge.budget.is_limited
    file = folder / JUDGE_FILE if folder is not None and keeps else None
    return JudgeClient(ChatService(_settings(judge)), judge, file=file, counters=counters)


def build_scorer(
    config: AgentConfig,
    model: ModelConfig,
    pool: EnvPool,
    policy: EpisodePolicy,
    *,
    judge: JudgeClient | None = None,
) -> Scorer:
    """Build the scorer of an ``agent`` section; its resources are closed with the pool.

    Args:
        config: The ``agent`` section.
        model: Section with the device and number format of a reward model.
        pool: Pool of the environment.
        policy: Policy that plays.
        judge: Judge shared by the run; by default a new one that keeps its answers in memory.

    Raises:
        ConfigError: the section sets several scorers, or the judge's prompt is not a valid template.
        UsageError: the reward model does not exist.
        UnknownNameError: a reward function does not exist.
    """
    _check_one(config)
    if config.judge is not None:
        client = judge or build_judge(config)
        assert client is not None
        pool.cleanup.push_async_callback(client.close)
        breaker = token_breaker(config.judge.engine.model, _renderer(policy))
        return make_judge(client, config.judge, _decoder(policy), break_up=breaker)
    if config.reward_model is not None:
        return RewardModelScorer(config.reward_model, model, _decoder(policy))
    thread = ThreadWorker()
    pool.cleanup.push_async_callback(thread.close)
    return find_reward(config, thread)


def _check_one(config: AgentConfig) -> None:
    scorers = {
        "reward": config.reward != AgentConfig().reward,
        "judge": config.judge is not None,
        "reward_model": config.reward_model is not None,
    }
    if sum(scorers.values()) > 1:
        raise ConfigError(
            "an episode can have only one scorer",
            got=" and ".join(f"agent.{name}" for name, is_set in scorers.items() if is_set),
            expected="one of them",
            hint="environment_weight of a judge or a reward model adds the environment's own reward",
        )


class RewardModelScorer(Scorer):
    """Scorer that runs a reward model on episodes, one at a time, in a thread.

    Args:
        settings: Section of the reward model.
        model: Section with the device and number format.
        decode: Converts the policy's tokens to text.

    Raises:
        UsageError: the model does not exist, or has no reward output.
    """

    def __init__(self, settings: RewardModelConfig, model: ModelConfig, decode: Decode) -> None:
        self._settings, self._decode = settings, decode
        self._model = RewardModel(
            find_model(settings.path), dtype=model.dtype, device=model.device, max_tokens=settings.max_tokens
        )
        self._one_at_a_time = asyncio.Lock()

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Return the model's reward plus the weighted reward of the environment.

        Raises:
            UsageError: the episode has no tokens.
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
    """Build the scorer of ``agent.reward``: a single scorer, or the weighted sum of several rewards.

    Args:
        config: Section with names, weights and options.
        thread: Thread for functions that block.

    Raises:
        UnknownNameError: a reward function does not exist.
        ConfigError: an object is not a reward function, does not accept an option, or has the name of another one.
    """
    entries = [{"name": entry} if isinstance(entry, str) else entry for entry in config.reward]
    found = [_make_scorer(entry, thread) for entry in entries]
    if len(found) == 1 and not isinstance(found[0], FunctionReward) and entries[0].get("weight", 1) == 1:
        return found[0]
    labels = _labels([str(entry["name"]) for entry in entries])
    return WeightedSum(
        [
            WeightedReward(name=label, weight=float(entry.get("weight", 1.0)), scorer=scorer)
            for label, entry, scorer in zip(labels, entries, found, strict=True)
        ]
    )


def _make_scorer(entry: Mapping[str, Any], thread: ThreadWorker) -> Scorer:
    name = str(entry["name"])
    options = {key: value for key, value in entry.items() if key not in ("name", "weight")}
    target = lookup(Kind.REWARD, name)
    if isinstance(target, Scorer):
        if options:
            raise ConfigError(f"reward {name} does not accept options", got=", ".join(options), expected="none")
        return target
    if inspect.isclass(target) and issubclass(target, Scorer):
        try:
            return target(**options)
        except TypeError as error:
            raise ConfigError(f"options of reward {name} are invalid", got=error) from error
    return FunctionReward(name, target, options, thread)


def _labels(names: Sequence[str]) -> list[str]:
    """Return short names, or full ones where the short ones are equal."""
    short = [name.rpartition(":")[2].rpartition(".")[2] for name in names]
    return [name if short.count(label) > 1 else label for name, label in zip(names, short, strict=True)]


def check_rewards(config: Config) -> None:
    """Check the scorers of all environments.

    Raises:
        UnknownNameError: a reward function does not exist.
        ConfigError: a function has the wrong arguments or needs a column that a task lacks, or an environment without
            rewards has no scorer.
    """
    for part in per_environment_configs(config):
        agent, spec = part.config.agent, resolve_environment(part.config.sole_environment.name)
        _check_one(agent)
        check_columns(agent, partial(task_source, spec, part.config.sole_environment))
        if agent.judge is not None:
            make_judge(JudgeClient(ChatService(_settings(agent.judge)), agent.judge), agent.judge, lambda ids: "")
        is_scored = agent.judge is not None or agent.reward_model is not None
        if spec.reward_range == (0.0, 0.0) and agent.reward == AgentConfig().reward and not is_scored:
            raise ConfigError(
                f"environment {spec.name} does not give rewards",
                got="agent.reward environment",
                expected="a reward function: --reward my_module:my_function, or agent.reward in a config",
                hint="see docs/reward-functions.md",
            )


def check_columns(agent: AgentConfig, tasks: Callable[[], TaskSource]) -> None:
    """Check that tasks have the columns that reward functions request as parameters.

    Args:
        agent: Section with the reward functions.
        tasks: Returns the tasks; called only if a function requests columns. All rows of a file are checked, or the
            first generated task.

    Raises:
        UnknownNameError: a reward function does not exist.
        ConfigError: an object is not a reward function, or a task lacks a column.
        UsageError: the tasks cannot be read.
    """
    scorer = find_reward(agent, ThreadWorker())
    asking = [one for one in scorer.functions if one.required_columns] if isinstance(scorer, WeightedSum) else []
    if not asking:
        return
    source = tasks()
    for task in source if isinstance(source, list) else [source[0]]:
        for function in asking:
            function.check_columns(task)


def judge_rows(config: Config) -> list[tuple[str, str, str]]:
    """Return a dry run's rows about the judge: name, value, source."""
    judge, algorithm = config.agent.judge, config.algorithm
    if judge is None:
        return []
    each = requests_per_group(judge, algorithm.group_size)
    tasks, steps = config.trainer.tasks_per_step, config.trainer.steps
    kind = judge.kind if judge.compare is None else judge.compare.how
    rows = [
        ("judge", kind, f"{judge.engine.model} at {judge.engine.url}"),
        (
            "judge's requests per group",
            f"{each:,}",
            f"algorithm.group_size {algorithm.group_size}, if all are readable",
        ),
        ("judge's requests", f"{each * tasks * steps:,}", f"{steps:,} steps of {tasks:,} groups, no evaluations"),
    ]
    budget = judge.budget
    limits = {"requests": budget.max_requests, "tokens": budget.max_tokens_total, "cost": budget.max_cost}
    words = ", ".join(f"{limit:,} {name}" for name, limit in limits.items() if limit is not None)
    return [*rows, ("judge's budget", words, f"then {budget.when_spent}")] if words else rows


def requests_per_group(judge: JudgeConfig, size: int) -> int:
    """Return the number of judge requests per group if all answers are readable and none is cached.

    Rubric items from tasks are not counted.
    """
    if judge.compare is None:
        items = len(judge.rubric.items) if judge.rubric is not None else 1
        return size * (items if judge.rubric_requests == "each" else 1)
    if judge.compare.how == "listwise":
        return judge.compare.rounds or ROUNDS
    return 2 * len(pairs_of(size, judge.compare.opponents, seed=""))


def check_comparison(config: Config) -> None:
    """Check that a judge which compares episodes gets groups of several episodes of the policy only.

    Raises:
        ConfigError: groups or evaluations have one episode, or groups have rollouts that the judge does not rank.
    """
    judge, algorithm = config.agent.judge, config.algorithm
    if judge is None or judge.compare is None:
        return
    compared = "agent.judge.compare ranks the episodes of a group"
    if algorithm.group_size < 2:
        raise ConfigError(compared, got="algorithm.group_size 1", expected="at least 2")
    if algorithm.expert is not None:
        raise ConfigError(compared, got="algorithm.expert, whose episodes would have no rank", expected="no expert")
    if Input.GREEDY_RETURN in needed_inputs(lookup(Kind.ADVANTAGE, algorithm.advantage)):
        raise ConfigError(
            compared,
            got=f"algorithm.advantage {algorithm.advantage}, whose greedy rollout would have no rank",
            expected="an estimator without a greedy rollout, such as grpo or rloo",
        )
    if config.evaluation.every and config.evaluation.samples < 2:
        raise ConfigError(
            compared,
            got=f"evaluations of {config.evaluation.samples} sample per task",
            expected="evaluation.samples of at least 2",
            hint="set evaluation.samples=4, or evaluation.every=0",
        )


def check_reward_weights(config: Config) -> None:
    """Check that reward weights are not set if the advantage estimator ignores them.

    Raises:
        ConfigError: weights are set, and the estimator weighs reward components itself.
    """
    if Input.COMPONENTS not in needed_inputs(lookup(Kind.ADVANTAGE, config.algorithm.advantage)):
        return
    for part in per_environment_configs(config):
        entries = [entry for entry in part.config.agent.reward if isinstance(entry, dict)]
        weighted = {str(entry["name"]): entry.get("weight", 1) for entry in entries if entry.get("weight", 1) != 1}
        if weighted:
            labels = dict(zip(_labels(list(weighted)), weighted.values(), strict=True))
            words = ", ".join(f"{label}: {weight:g}" for label, weight in labels.items())
            raise ConfigError(
                f"{config.algorithm.advantage} weighs reward components itself and ignores weights in agent.reward",
                got=", ".join(f"weight {weight:g} of {name}" for name, weight in weighted.items()),
                expected="no weights in agent.reward",
                hint=f"set algorithm.advantage_options={{weights: {{{words}}}}}",
            )


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
    """Return the decoder of the policy's tokens; it is never called for a policy without tokens."""
    renderer = _renderer(policy)
    return (lambda ids: "") if renderer is None else renderer.encoder.decode_plain


def _renderer(policy: EpisodePolicy) -> Renderer | None:
    return policy.renderer if isinstance(policy, EngineEpisodePolicy | ScriptedEpisodePolicy) else None
