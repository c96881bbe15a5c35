"""Scorers of a run's episodes: reward functions, a judge, or a reward model."""

from __future__ import annotations

import asyncio
from functools import partial

from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.config.config import Config, ModelConfig
from agentrl.config.derived import per_environment_configs
from agentrl.config.environment import AgentConfig, RewardModelConfig
from agentrl.env.lookup import resolve_environment
from agentrl.errors import ConfigError
from agentrl.errors.foreign import run_in_own_thread
from agentrl.observe.model_folder import find_model
from agentrl.registry import Kind, lookup
from agentrl.remote.chat import ChatService
from agentrl.render.renderer import Renderer
from agentrl.render.tokenizers import token_breaker
from agentrl.reward import Score, Scorer, weighted
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.env_workers import ThreadWorker
from agentrl.rollout.judges import (
    Decode,
    JudgeClient,
    build_judge,
    judge_service_settings,
    make_judge,
    require_tokens,
    transcript,
)
from agentrl.rollout.policies import EngineEpisodePolicy, EpisodePolicy
from agentrl.rollout.reward_functions import check_columns, find_reward, reward_labels
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy
from agentrl.rollout.task_source import task_source
from agentrl.task import Task
from agentrl.training.preferences import RewardModel
from agentrl.training.signals.without_model import needs_greedy_rollouts
from agentrl.trajectory import Trajectory


def build_scorer(
    config: AgentConfig, model: ModelConfig, pool: EnvPool, policy: EpisodePolicy, *, judge: JudgeClient | None
) -> Scorer:
    """Build the scorer of an ``agent`` section; its resources are closed with the pool.

    `model` has the device and data type of a reward model. Without `judge`, a new one keeps its answers in
    memory.

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
            judged = await run_in_own_thread(self._model.score, text)
        return Score(
            reward=judged + self._settings.environment_weight * earned,
            components={"reward_model": judged, "environment": earned},
            sources={
                **weighted(trajectory.environment_sources, self._settings.environment_weight),
                "reward_model": judged,
            },
        )


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
            make_judge(
                JudgeClient(ChatService(judge_service_settings(agent.judge)), agent.judge), agent.judge, lambda ids: ""
            )
        is_scored = agent.judge is not None or agent.reward_model is not None
        if spec.reward_range == (0.0, 0.0) and agent.reward == AgentConfig().reward and not is_scored:
            raise ConfigError(
                f"environment {spec.name} does not give rewards",
                got="agent.reward environment",
                expected="a reward function: --reward my_module:my_function, or agent.reward in a config"
                + ("; or get_reward() or the attribute reward in the class" if spec.reset_columns else ""),
                hint="see docs/reward-functions.md",
            )


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
    if needs_greedy_rollouts(algorithm):
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
            labels = dict(zip(reward_labels(list(weighted)), weighted.values(), strict=True))
            words = ", ".join(f"{label}: {weight:g}" for label, weight in labels.items())
            raise ConfigError(
                f"{config.algorithm.advantage} weighs reward components itself and ignores weights in agent.reward",
                got=", ".join(f"weight {weight:g} of {name}" for name, weight in weighted.items()),
                expected="no weights in agent.reward",
                hint=f"set algorithm.advantage_options={{weights: {{{words}}}}}",
            )


def _decoder(policy: EpisodePolicy) -> Decode:
    """Return the decoder of the policy's tokens; it is never called for a policy without tokens."""
    renderer = _renderer(policy)
    return (lambda ids: "") if renderer is None else renderer.encoder.decode_plain


def _renderer(policy: EpisodePolicy) -> Renderer | None:
    return policy.renderer if isinstance(policy, EngineEpisodePolicy | ScriptedEpisodePolicy) else None
