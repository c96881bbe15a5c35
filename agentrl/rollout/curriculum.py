"""Curriculum: difficulty pools, and horizons that grow.

Tasks that are solved almost always or almost never are sampled less often. The estimate of a task's success rate is the
mean of a Beta posterior with a uniform prior, whose counts fade as the policy changes. After s successes in n tries, d
steps ago,

    rate = (1 + s f) / (2 + n f),    f = 2^(-d / half_life)

The mean of the posterior is Laplace's rule of succession (Gelman et al., Bayesian Data Analysis, 3rd ed., section 2.1):
the rate of a task that was never played is 1/2, and that of a task with eight failures in eight tries is 1/10, not 0.
Fading counts are the temporal discount of MoPPS (Qu et al. 2025, arXiv 2507.04632, section 3), by training step instead
of by update: the rate of a task that has not been played for a long time returns to 1/2, and the task is tried again.

A horizon limits the turns of episodes. It grows at given training steps, or when enough episodes succeed.
"""

from __future__ import annotations

import enum
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from agentrl.config.config import Config
from agentrl.config.derived import EnvironmentConfigs, most_turns, per_environment_configs
from agentrl.config.environment import HorizonConfig, PooledBy, PoolsConfig
from agentrl.config.schedule import latest_point
from agentrl.config.step_settings import STAGE_MARK
from agentrl.env.lookup import resolve_environment
from agentrl.errors import ConfigError, UsageError
from agentrl.rollout.task_source import task_source
from agentrl.task import Task

Key: TypeAlias = tuple[str, str]
"""Label of an environment (with the stage, for tasks of a later one), and the key within it by ``curriculum.pools.by``:
a task id, a task type, or ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """Number of successes of one group at its task."""

    position: int
    environment: str
    task_id: str
    task_type: str | None
    horizon: int | None
    """Maximum number of turns; ``None`` without a curriculum of horizons."""
    episodes: int
    """Number of trainable episodes."""
    tries: int
    """Number of episodes that report success or failure; see `count_failures`."""
    successes: int
    finished: int = 0
    """Number of trainable episodes that the environment ended, so that it could report success."""
    proposals: Sequence[Mapping[str, Any]] = ()
    """Tasks that the trainable episodes proposed, in their order."""
    order: str = ""
    """See `agentrl.rollout.task_order.SampledTask`."""


def count_failures(outcomes: Sequence[GroupOutcome], known: Set[str], setting: str) -> list[GroupOutcome]:
    """Count all episodes of environments that report success in some; those that a limit ended may have none.

    Until an environment reports success, its episodes are not counted.

    Args:
        outcomes: Groups of a step.
        known: Environments that have reported success in earlier steps.
        setting: Config key that needs success, for the error message.

    Raises:
        UsageError: an environment has ended episodes, and has never reported success.
    """
    reporting = known | {outcome.environment for outcome in outcomes if outcome.tries}
    for outcome in outcomes:
        if outcome.finished and outcome.environment not in reporting:
            raise UsageError(
                f"the environment of task {outcome.task_id} does not report success",
                expected='info["success"] at the end of an episode',
                hint=f"remove {setting}",
            )
    return [replace(one, tries=one.episodes if one.environment in reporting else 0) for one in outcomes]


class Pool(enum.StrEnum):
    """Pools by success rate."""

    EASY = "easy"
    HARD = "hard"
    OPEN = "open"
    """Neither easy nor hard, or without an estimate; always played."""


@dataclass(frozen=True, slots=True)
class SuccessEstimate:
    """Faded counts of successes and tries after a training step."""

    successes: float = 0.0
    tries: float = 0.0
    step: int = 0

    def fade_to(self, step: int, half_life: float) -> SuccessEstimate:
        """Return the counts at a later step; they halve every `half_life` steps."""
        factor = 2.0 ** (-(step - self.step) / half_life)
        return SuccessEstimate(self.successes * factor, self.tries * factor, step)

    @property
    def rate(self) -> float:
        """Posterior mean of the success rate."""
        return (1.0 + self.successes) / (2.0 + self.tries)


class Pools:
    """Success rates of tasks, task types or environments, which decide the tasks to play."""

    def __init__(self, settings: PoolsConfig, *, seed: int) -> None:
        self.settings = settings
        self.step = 0
        self._seed = seed
        self._evidence: dict[Key, SuccessEstimate] = {}

    def plays(self, environment: str, task: Task | None, turn: int) -> bool:
        """Return True if a drawn task is played: always if its pool is open, else with probability ``revisit``."""
        if self.pool_of(self.key(environment, task)) is Pool.OPEN:
            return True
        return random.Random(f"{self._seed}/revisit/{environment}/{turn}").random() < self.settings.revisit

    def pool_of(self, key: Key) -> Pool:
        """Return the current pool of a key."""
        evidence = self._evidence.get(key)
        if evidence is None:
            return Pool.OPEN
        rate = evidence.fade_to(self.step, self.settings.half_life).rate
        if rate > self.settings.easy_above:
            return Pool.EASY
        return Pool.HARD if rate < self.settings.hard_below else Pool.OPEN

    def key(self, environment: str, task: Task | None) -> Key:
        """Return the key under which a task's success is counted."""
        if task is None or self.settings.by is PooledBy.ENVIRONMENT:
            return environment, ""
        if self.settings.by is PooledBy.TASK:
            return environment, task.id
        if task.type is None:
            raise UsageError(
                f"task {task.id} of environment {task.environment} has no type",
                expected="a type for each task",
                hint="set curriculum.pools.by=task",
            )
        return environment.partition(STAGE_MARK)[0], task.type

    def learn(self, outcomes: Sequence[GroupOutcome]) -> None:
        """Count the groups of a complete training step."""
        self.step += 1
        known = {label.partition(STAGE_MARK)[0] for (label, _), found in self._evidence.items() if found.tries}
        for outcome in count_failures(outcomes, known, "curriculum.pools"):
            key = self._key_of(outcome)
            before = self._evidence.get(key, SuccessEstimate()).fade_to(self.step, self.settings.half_life)
            self._evidence[key] = SuccessEstimate(
                before.successes + outcome.successes, before.tries + outcome.tries, self.step
            )

    def sizes(self) -> dict[Pool, int]:
        """Return the number of played keys in each pool."""
        counts = Counter(map(self.pool_of, self._evidence))
        return {pool: counts[pool] for pool in Pool}

    def _key_of(self, outcome: GroupOutcome) -> Key:
        if self.settings.by is PooledBy.TASK:
            return outcome.order or outcome.environment, outcome.task_id
        return outcome.environment, "" if self.settings.by is PooledBy.ENVIRONMENT else outcome.task_type or ""

    def state_dict(self) -> dict[str, Any]:
        """Return the exact state for `load_state_dict` in plain JSON types."""
        rows = [[*key, found.successes, found.tries, found.step] for key, found in self._evidence.items()]
        return {"step": self.step, "evidence": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.step = state["step"]
        self._evidence = {(label, key): SuccessEstimate(*numbers) for label, key, *numbers in state["evidence"]}


class Horizon:
    """Maximum number of turns of the next episodes of each environment.

    If the horizon grows by success, an environment reaches the next stage when successes / tries exceeds
    ``success_above`` over the last ``over_steps`` training steps in which it was played at its present stage. The
    counts then restart at 0. An environment never returns to an earlier stage.
    """

    def __init__(self, settings: HorizonConfig) -> None:
        self.settings = settings
        self._stage: dict[str, int] = defaultdict(int)
        self._recent: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """Successes and tries at the present stage in each training step, by environment."""

    @property
    def wants_outcomes(self) -> bool:
        """True if the horizon grows by success."""
        return self.settings.at_steps is None

    def turns(self, environment: str, step: int) -> int:
        """Return the maximum number of turns of an episode that starts after `step` training steps."""
        steps = self.settings.at_steps
        stage = self._stage[environment] if steps is None else latest_point(steps, step)
        return self.settings.turns[stage]

    def learn(self, outcomes: Sequence[GroupOutcome]) -> None:
        """Count the groups of a complete training step."""
        if not self.wants_outcomes:
            return
        reported: dict[str, list[GroupOutcome]] = defaultdict(list)
        setting = "curriculum.horizon.success_above, or use curriculum.horizon.at_steps"
        known = {name for name, stage in self._stage.items() if stage} | {
            name for name, found in self._recent.items() if found
        }
        for outcome in count_failures(outcomes, known, setting):
            if outcome.horizon == self.settings.turns[self._stage[outcome.environment]] and outcome.tries:
                reported[outcome.environment].append(outcome)
        for environment, found in reported.items():
            self._count(environment, sum(t.successes for t in found), sum(t.tries for t in found))

    def _count(self, environment: str, successes: int, tries: int) -> None:
        over, above = self.settings.over_steps, self.settings.success_above
        recent = [*self._recent[environment], (successes, tries)][-over:]
        self._recent[environment] = recent
        solved, played = (sum(counts) for counts in zip(*recent, strict=True))
        is_last = self._stage[environment] == len(self.settings.turns) - 1
        if above is not None and not is_last and len(recent) == over and solved > above * played:
            self._stage[environment] += 1
            self._recent[environment] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict` in plain JSON types."""
        return {"stage": dict(self._stage), "recent": {name: list(counts) for name, counts in self._recent.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._stage = defaultdict(int, state["stage"])
        recent = {name: [(solved, played) for solved, played in counts] for name, counts in state["recent"].items()}
        self._recent = defaultdict(list, recent)


def check_curriculum(config: Config) -> None:
    """Check that the curriculum has an effect within the run.

    Raises:
        ConfigError: a horizon that no environment allows, or stages or pools that never change the sampled tasks.
    """
    if config.curriculum.horizon is not None:
        _check_horizon(config, config.curriculum.horizon, config.trainer.steps)
    if config.curriculum.pools is not None:
        _check_pools(config, config.curriculum.pools)


def _check_horizon(config: Config, horizon: HorizonConfig, steps: int) -> None:
    limits = {_name(part): most_turns(part) for part in per_environment_configs(config)}
    most = max(limits.values())
    if horizon.turns[-1] > most:
        raise ConfigError(
            "curriculum.horizon.turns is longer than the longest episode",
            got=horizon.turns[-1],
            expected=f"at most {most} turns",
            hint="limits: "
            + ", ".join(f"{name} {turns}" for name, turns in limits.items())
            + "; each is the smaller of the environment's limit and agent.max_turns",
        )

    last = max([*(horizon.at_steps or []), horizon.over_steps if horizon.success_above is not None else 0])
    if last >= steps:
        raise ConfigError(
            "curriculum.horizon grows after the end of the run",
            got=f"step {last}",
            expected=f"a step before trainer.steps, {steps}",
            hint="remove the last stage, or train longer",
        )


def _check_pools(config: Config, pools: PoolsConfig) -> None:
    parts = per_environment_configs(config)
    match pools.by:
        case PooledBy.ENVIRONMENT if len(parts) == 1:
            raise ConfigError(
                "curriculum.pools.by environment needs several environments",
                got="one environment",
                expected="several, such as sizes of one puzzle",
                hint="set curriculum.pools.by to task or type",
            )
        case PooledBy.TYPE:
            for part in parts:
                _check_typed(part)
        case PooledBy.TASK:
            _check_walked_twice(config, parts)


def _check_typed(part: EnvironmentConfigs) -> None:
    environment = part.config.sole_environment
    if task_source(resolve_environment(environment.name), environment)[0].type is None:
        raise ConfigError(
            "curriculum.pools.by type needs tasks with a type",
            got=f"tasks of {_name(part)} without a type",
            expected="tasks with a type",
            hint="set curriculum.pools.by to task or environment",
        )


def _check_walked_twice(config: Config, parts: tuple[EnvironmentConfigs, ...]) -> None:
    """Require that at least one task repeats: pools by task estimate the success of repeated tasks."""
    turns = config.trainer.steps * config.trainer.tasks_per_step
    weights = sum(part.weight for part in parts)
    sizes = {}
    for part in parts:
        environment = part.config.sole_environment
        sizes[_name(part)] = len(task_source(resolve_environment(environment.name), environment))
        if turns * part.weight / weights > sizes[_name(part)]:
            return
    raise ConfigError(
        "curriculum.pools.by task has no effect: no task repeats in this run",
        got=f"{turns:,} groups, and " + ", ".join(f"{size:,} tasks of {name}" for name, size in sizes.items()),
        expected="fewer tasks than groups",
        hint="set curriculum.pools.by to type or environment, or use fewer tasks, from a file (environment.tasks)",
    )


def _name(part: EnvironmentConfigs) -> str:
    return part.label or part.config.sole_environment.name
