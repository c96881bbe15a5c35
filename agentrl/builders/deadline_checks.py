"""Checks of a run's deadlines: one that a shorter deadline always precedes, and staleness that drops long episodes.

Only deadlines that differ from their defaults are compared with others, because a run's ``config.yaml`` contains the
defaults, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from agentrl.builders.tools import agents_of, build_tools, sandbox_maker
from agentrl.config.config import Config
from agentrl.config.derived import per_environment_configs
from agentrl.config.engines import ServerEngineConfig
from agentrl.config.environment import AgentConfig, EnvironmentConfig
from agentrl.config.estimate import EstimateRow
from agentrl.config.section import Section
from agentrl.errors import ConfigError
from agentrl.sandbox import DEFAULT_LIMITS, read_spec
from agentrl.tool import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Time limit of the config."""

    key: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Precedence:
    """Pair of nested deadlines; the inner one must not be longer than the outer one."""

    inner: Deadline
    outer: Deadline
    effect: str
    """Effect of an outer deadline that is too short."""


def check_deadlines(config: Config) -> None:
    """Check that no deadline is ineffective because a shorter one always precedes it.

    Raises:
        ConfigError: a deadline is longer than another one that always ends the wait first.
    """
    for pair in _pairs(config):
        if pair.inner.seconds > pair.outer.seconds:
            raise ConfigError(
                f"{pair.inner.key} contradicts {pair.outer.key}",
                got=f"{pair.inner.seconds:g} s and {pair.outer.seconds:g} s: {pair.effect}",
                expected=f"{pair.inner.key} of at most {pair.outer.seconds:g}",
                hint=f"lower {pair.inner.key}, or raise {pair.outer.key}",
            )


def _pairs(config: Config) -> Iterator[Precedence]:
    for part in per_environment_configs(config):
        prefix = f"environments.{part.label}" if part.label else "environment"
        yield from _episode_pairs(prefix, part.config.sole_environment, part.config.agent)
        for agent in agents_of(part.config.agent):
            yield from _sandbox_pairs(agent)
    if isinstance(config.engine, ServerEngineConfig):
        effect = "every answer times out before its server counts as lost"
        answer = Deadline(key="engine.timeout_s", seconds=config.engine.timeout_s)
        yield from _pair(config.engine, "health_timeout_s", "engine", answer, effect)


def _episode_pairs(prefix: str, environment: EnvironmentConfig, agent: AgentConfig) -> Iterator[Precedence]:
    if agent.max_seconds is None:
        return
    episode = Deadline(key="agent.max_seconds", seconds=agent.max_seconds)
    for name, what in (("reset_timeout_s", "reset"), ("step_timeout_s", "step")):
        effect = f"a slow {what} would be a failure of the environment, although the episode's time was over before"
        yield from _pair(environment, name, prefix, episode, effect)
    yield from _pair(agent, "tool_timeout_s", "agent", episode, "the episode's time is always over first")


def _sandbox_pairs(agent: AgentConfig) -> Iterator[Precedence]:
    """Yield the limit of a sandbox's commands and the longest deadline of the tools that run them."""
    if agent.sandbox is None:
        return
    sandbox_maker(agent)  # reports an invalid section
    seconds = read_spec(agent.sandbox).limits.seconds
    users = [tool for tool in build_tools(agent) if isinstance(tool, Tool) and tool.needs_sandbox]
    if seconds is None or seconds == DEFAULT_LIMITS.seconds or not users:
        return
    longest = max(users, key=lambda tool: tool.rules.timeout_s or agent.tool_timeout_s)
    own = longest.rules.timeout_s
    key = "agent.tool_timeout_s" if own is None else f"timeout_s of tool {longest.name}"
    yield Precedence(
        inner=Deadline(key="agent.sandbox.limits.seconds", seconds=seconds),
        outer=Deadline(key=key, seconds=own or agent.tool_timeout_s),
        effect="the tool's call always times out first",
    )


def _pair(section: Section, name: str, prefix: str, outer: Deadline, effect: str) -> Iterator[Precedence]:
    seconds = getattr(section, name)
    if seconds != type(section).model_fields[name].default:
        yield Precedence(inner=Deadline(key=f"{prefix}.{name}", seconds=seconds), outer=outer, effect=effect)


def longest_episode_s(config: Config) -> float | None:
    """Return the maximum seconds of an episode; ``None`` if an environment's episodes are not limited."""
    limits = [part.config.agent.max_seconds for part in per_environment_configs(config)]
    known = [limit for limit in limits if limit is not None]
    return max(known) if len(known) == len(limits) else None


def check_staleness(config: Config, step_s: float) -> list[EstimateRow]:
    """Compare ``max_staleness + 1`` steps with the longest episode, which trains within them or is dropped.

    Returns:
        Rows for a dry run.

    Raises:
        ConfigError: greedy batches drop episodes that the config allows.
    """
    rollout, longest_s = config.rollout, longest_episode_s(config)
    steps, source = rollout.max_staleness + 1, "rollout.max_staleness + 1"
    window = "step" if steps == 1 else f"{steps} steps"
    rows: list[EstimateRow] = [(window, f"{steps * step_s:,g} s", f"{source}, of {step_s:g} s each")]
    if longest_s is None:
        return [*rows, ("longest episode", "not limited", "agent.max_seconds")]
    rows.append(("longest episode", f"{longest_s:,g} s", "agent.max_seconds"))
    if rollout.is_synchronous or longest_s <= steps * step_s:
        return rows
    enough = math.ceil(longest_s / step_s) - 1
    if rollout.batch_order == "greedy":
        raise ConfigError(
            "rollout.max_staleness contradicts agent.max_seconds: greedy batches drop slow episodes",
            got=f"{steps} steps of {step_s:g} s ({source}), and episodes of up to {longest_s:g} s",
            expected=f"agent.max_seconds of at most {steps * step_s:g}",
            hint=f"set rollout.batch_order=windowed, or rollout.max_staleness={enough}",
        )
    return [*rows, ("slow episodes", "delay their batch", f"none does with rollout.max_staleness {enough}")]
