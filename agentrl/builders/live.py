"""Checks of runs that learn from live traffic."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.algorithms.options import check_options
from agentrl.algorithms.traits import Input, needed_inputs, tracker_of
from agentrl.config.config import Config
from agentrl.config.derived import agent_loop_class, make_agent_loop, per_environment_configs
from agentrl.env.lookup import resolve_environment
from agentrl.errors import ConfigError
from agentrl.registry import Kind, lookup
from agentrl.rollout.live import LIVE, LiveSessions


def is_live(config: Config) -> bool:
    """Return True if clients start the run's episodes."""
    if not config.has_environment:
        return False
    return any(
        issubclass(agent_loop_class(part.config.agent.loop), LiveSessions) for part in per_environment_configs(config)
    )


def check_live(config: Config) -> None:
    """Check that a run can learn from single sessions that clients reward at any time.

    Raises:
        ConfigError: a setting does not fit.
        UsageError: a key is missing.
    """
    if not is_live(config):
        return
    loop = make_agent_loop(config.agent.loop, config.agent.options) if config.environment is not None else None
    if not isinstance(loop, LiveSessions):
        raise ConfigError(
            "a run on live traffic cannot have other environments",
            got=f"the environments {', '.join(config.environments)}",
            expected="a single environment, as in the shipped config live",
        )
    loop.check_keys()
    for key, value, expected in _misfits(config):
        raise ConfigError(f"{key} does not work with live traffic", got=f"{key} {value}", expected=expected)


def _misfits(config: Config) -> Iterator[tuple[str, object, str]]:
    """Yield the key, the value and the expected value of each setting that does not fit."""
    algorithm, rollout, evaluation, agent = config.algorithm, config.rollout, config.evaluation, config.agent
    environment = config.sole_environment
    if resolve_environment(environment.name) is not LIVE:
        yield "environment.name", environment.name, "that of the config live: clients bring their own tasks"
    for key, value in (("options", environment.options), ("tasks", environment.tasks)):
        if value:
            yield f"environment.{key}", "set", "nothing: clients bring their own tasks"
    for key in ("tools", "roles", "system_prompt", "branch"):
        if getattr(agent, key):
            yield f"agent.{key}", "set", "nothing: clients send their own messages and run their own tools"
    if config.curriculum.horizon is not None or config.curriculum.pools is not None:
        yield "curriculum", "set", "none: clients bring their own tasks"
    if algorithm.group_size != 1:
        yield (
            "algorithm.group_size",
            algorithm.group_size,
            "1: a session is played once, so there are no other episodes to compare it with; "
            "algorithm.advantage=rae uses a running baseline instead",
        )
    estimator = lookup(Kind.ADVANTAGE, algorithm.advantage)
    tracker = tracker_of(estimator)
    if Input.GREEDY_RETURN in needed_inputs(estimator) or (
        tracker is not None and tracker(**check_options(estimator, algorithm.advantage_options)).unit == "task"
    ):
        yield (
            "algorithm.advantage",
            f"{algorithm.advantage}, which needs to play a task again",
            "an estimator for single episodes: rae, reinforce, reinforce++ or gae",
        )
    if algorithm.selection is not None or algorithm.expert is not None:
        yield "algorithm.selection" if algorithm.expert is None else "algorithm.expert", "set", "neither"
    if rollout.is_synchronous:
        yield "rollout.max_staleness", 0, "at least 1: the run serves clients while it trains"
    if rollout.batch_order != "greedy":
        yield "rollout.batch_order", rollout.batch_order, "greedy: an open session may never be rewarded"
    if evaluation.every:
        yield "evaluation.every", evaluation.every, "0: evaluate checkpoints with agentrl eval --model RUN --env ENV"
    if agent.few_shot_turns:
        yield "agent.few_shot_turns", agent.few_shot_turns, "0: clients write the prompts"
    if agent.judge is not None or agent.reward_model is not None:
        yield "agent.judge" if agent.judge else "agent.reward_model", "set", "none: clients give the rewards"
    if environment.max_concurrent < rollout.max_concurrent:
        yield "environment.max_concurrent", environment.max_concurrent, "at least rollout.max_concurrent"
    if config.trainer.episodes is not None:
        yield "trainer.episodes", config.trainer.episodes, "nothing, or another agent.loop"
