"""Current settings: the config of each training step, with the values that ``schedules`` gives its keys.

A step gets its config from `Settings` and passes it to the rollout and the trainer, which do not know about schedules.
Without schedules, it is the run's config. Evaluations always use the run's config, so that those of a run are
comparable.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from agentrl.config.config import Config
from agentrl.config.derived import SOLE, EnvironmentConfigs, per_environment_configs
from agentrl.config.environment import AgentConfig
from agentrl.config.keys import all_keys
from agentrl.config.load import describe_expected
from agentrl.config.schedule import FORM_KEYS, ScheduleConfig
from agentrl.config.schedule_forms import BUDGETS, PLAIN_KEYS
from agentrl.errors import AgentRLError, ConfigError, did_you_mean
from agentrl.observe.metric_table import documented_names, find_documented
from agentrl.registry import Kind, lookup

OPTIONS = {"advantage_options": Kind.ADVANTAGE, "loss_options": Kind.LOSS}
"""Sections of ``algorithm`` with the options of one function."""
FUNCTIONS = {"shaping": Kind.SHAPING, "filters": Kind.FILTER}
"""Sections of ``algorithm`` with the options of several functions by name."""
ENVIRONMENT_KEYS = ("options", "tasks", "split")
"""Keys of an environment that a stage may change."""
METRICS = {"algorithm.entropy_coef": "train/entropy", "algorithm.kl_coef": "train/kl_reference"}
"""Default metrics of schedules with a target."""
PREFIX = "settings/"
"""Prefix of the metrics of current values."""
EPISODES = "trajectories/trained"
"""Metric that counts the trained episodes of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """Key of a plan, with its schedule."""

    key: str
    schedule: ScheduleConfig
    own: Any
    """Value under the key itself."""
    is_integer: bool = False

    @property
    def is_of_environment(self) -> bool:
        """True if the key belongs to an environment, whose tasks change with it."""
        return self.key.partition(".")[0] in ("environment", "environments")

    @property
    def metric(self) -> str:
        """Metric that has the target."""
        return self.schedule.metric or METRICS[self.key]

    def at(self, step: int) -> Any:
        """Return the value at a training step; the key's own value for a target."""
        if self.schedule.target is not None:
            return self.own
        return self.schedule.at(step, self.own, is_integer=self.is_integer)

    def describe(self) -> str:
        """Describe the values in one line: ``0: 1.4, 500: 1.45``."""
        schedule = self.schedule
        bounds = [f"{name} {bound:g}" for name in ("min", "max") if (bound := getattr(schedule, name)) is not None]
        limits = f", {', '.join(bounds)}" if bounds else ""
        if schedule.factor is not None:
            return f"{_format(self.own)} x {schedule.factor:g}^step{limits}"
        if schedule.target is not None:
            by = f"horizon {schedule.horizon:g} episodes" if schedule.step is None else f"+-{schedule.step:g} a step"
            gate = ", 0 above it" if schedule.only_below else ""
            return f"{_format(self.own)}, then {self.metric} to {schedule.target:g}{gate} ({by}{limits})"
        points = {**({} if 0 in (schedule.points or {}) else {0: self.own}), **(schedule.points or {})}
        values = ", ".join(f"{step}: {_format(value)}" for step, value in points.items())
        return values if schedule.shape == "constant" else f"{values} ({schedule.shape})"


def _format(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def plan(config: Config) -> tuple[PlanEntry, ...]:
    """Return the keys that change during training, with their schedules, in the order of the config.

    Raises:
        ConfigError: a key cannot change, has no value at the first step, or is scheduled twice.
    """
    return tuple(_entry(config, key, schedule) for key, schedule in (config.schedules or {}).items())


def _entry(config: Config, key: str, schedule: ScheduleConfig) -> PlanEntry:
    _check_key(config, key)
    own, is_integer = _own_value(config, key)
    entry = PlanEntry(key=key, schedule=schedule, own=own, is_integer=is_integer)
    if own is None and 0 not in (schedule.points or {}) and not entry.is_of_environment:
        raise ConfigError(
            f"the schedule of {key} has no value at step 0",
            got="a key that is not set",
            hint=f"set {key}, or a point 0",
        )
    if schedule.target is not None and schedule.metric is None and key not in METRICS:
        raise ConfigError(f"the schedule of {key} has a target without a metric", hint="set its metric: train/entropy")
    if schedule.factor is not None and own == 0:
        raise ConfigError(f"the factor of the schedule of {key} changes nothing", got=f"{key} 0", hint=f"set {key}")
    if schedule.metric is not None and find_documented(schedule.metric) is None:
        raise ConfigError(
            f"the schedule of {key} has the target of an unknown metric",
            got=schedule.metric,
            expected="a metric in docs/metrics.md",
            hint=did_you_mean(schedule.metric, documented_names()),
        )
    late = [step for step in schedule.steps if step >= config.trainer.steps]
    if late:
        raise ConfigError(
            f"the schedule of {key} changes after the end of the run",
            got=f"step {late[0]}",
            expected=f"a step before trainer.steps, {config.trainer.steps}",
        )
    values = [*(schedule.points or {}).values(), *([] if own is None else [own])]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if not numeric and not (entry.is_of_environment and schedule.points is not None and schedule.shape == "constant"):
        wrong = next(v for v in values if isinstance(v, bool) or not isinstance(v, int | float))
        raise ConfigError(f"a value of the schedule of {key} is not a number", got=repr(wrong), expected="a number")
    return entry


def _check_key(config: Config, key: str) -> None:
    """Raise a `ConfigError` for a key that cannot change during training, with the nearest one that can."""
    known = [*PLAIN_KEYS, *_option_keys(config)]
    if key in known or _is_environment_key(config, key) or _is_open_option(config, key):
        return
    raise ConfigError(
        f"{key} cannot change during training",
        expected="a numeric key of sampling, of the budgets in agent, or of algorithm; trainer.learning_rate; or "
        "options, tasks or split of an environment",
        hint=_other_key(key, known),
    )


def _other_key(key: str, known: Sequence[str]) -> str | None:
    """Say what probably was meant by a key that cannot change."""
    whole, _, last = key.rpartition(".")
    if last in FORM_KEYS and whole in known:
        return f"a stage has plain values; {last} is part of a schedule: schedules={{{whole}: {{{last}: ...}}}}"
    if key.startswith("curriculum.horizon"):
        return "the turn limit changes by curriculum.horizon.at_steps, or by schedules={agent.max_turns: {0: 5, 9: 10}}"
    return None if tuple(key.split(".")) in all_keys() else did_you_mean(key, known)


def _is_environment_key(config: Config, key: str) -> bool:
    section, *rest = key.split(".")
    if section == "environments" and rest and rest[0] in config.environments:
        rest = rest[1:]
    elif section != "environment" or config.environment is None:
        return False
    return bool(rest) and rest[0] in ENVIRONMENT_KEYS and (len(rest) > 1) == (rest[0] == "options")


def _is_open_option(config: Config, key: str) -> bool:
    """Return True for an option of a function that the config has; its own check knows the function's options."""
    section, _, rest = key.partition(".")
    name, *path = rest.split(".")
    if section != "algorithm" or not path:
        return False
    if name in OPTIONS:
        return len(path) == 1 and not _options_of(OPTIONS[name], _function(config, OPTIONS[name]))
    return name == "role_weights" and len(path) == 1


def _option_keys(config: Config) -> Iterator[str]:
    for section, kind in OPTIONS.items():
        yield from (f"algorithm.{section}.{name}" for name in _options_of(kind, _function(config, kind)))
    for section, kind in FUNCTIONS.items():
        for function in getattr(config.algorithm, section):
            yield from (f"algorithm.{section}.{function}.{name}" for name in _options_of(kind, function))


def _function(config: Config, kind: Kind) -> str:
    return config.algorithm.advantage if kind is Kind.ADVANTAGE else config.algorithm.loss


def _options_of(kind: Kind, name: str) -> list[str]:
    """Return the names of a function's options; none if it cannot be imported here."""
    with suppress(AgentRLError, TypeError, ValueError):
        parameters = inspect.signature(lookup(kind, name)).parameters.values()
        return [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    return []


def _own_value(config: Config, key: str) -> tuple[Any, bool]:
    """Return a key's own value, ``None`` if it is not set, and True if it is an integer key."""
    node: Any = config
    is_integer = False
    for name in key.split("."):
        if isinstance(node, BaseModel):
            annotation = type(node).model_fields[name].annotation
            is_integer = annotation is int or int in get_args(annotation)
            node = getattr(node, name)
        else:
            is_integer = False
            node = None if node is None else node.get(name)
    return node, is_integer


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a config with other values of some keys, which are not checked."""
    for key, value in values.items():
        config = _with_value(config, key.split("."), value)
    return config


def _with_value(node: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    if isinstance(node, BaseModel):
        return node.model_copy(update={name: _with_value(getattr(node, name), rest, value) if rest else value})
    return {**(node or {}), name: _with_value(node.get(name, {}), rest, value) if rest else value}


class Settings:
    """Current settings of a training step.

        settings = Settings(config)
        settings.advance(step=10)            # before the eleventh step
        settings.config.sampling.temperature
        settings.observe(metrics)            # after it, for schedules with a target

    Raises:
        ConfigError: see `plan`.
    """

    def __init__(self, config: Config) -> None:
        self._run, self._plan = config, plan(config)
        self._adapted = {one.key: float(one.own) for one in self._plan if one.schedule.target is not None}
        self._used = dict(self._adapted)
        self.step = 0
        self._agents: dict[str, AgentConfig] = {}
        self._set(self._values(0))

    def _values(self, step: int) -> dict[str, Any]:
        found = {one.key: one.at(step) for one in self._plan if not one.is_of_environment}
        return {**found, **self._used}

    def _set(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self.config = with_values(self._run, values)
        self._agents = {}

    @property
    def changes(self) -> bool:
        """True if any setting changes during the run."""
        return bool(self._plan)

    def advance(self, step: int) -> None:
        """Use the settings of the training step after `step` finished ones."""
        self.step = step
        values = self._values(step)
        if values != self.values:
            self._set(values)

    def agent(self, label: str = SOLE) -> AgentConfig:
        """Return the agent's settings in an environment, by its label."""
        if not self._agents:
            self._agents = {part.label: part.config.agent for part in per_environment_configs(self.config)}
        return self._agents[label]

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Adapt the values of schedules with a target after a training step with these metrics."""
        for one in self._plan:
            measured = metrics.get(one.metric, math.nan) if one.schedule.target is not None else math.nan
            if one.schedule.target is None or not math.isfinite(measured):
                continue
            episodes = metrics.get(EPISODES, 0.0)
            value = self._adapted[one.key] = one.schedule.adapt(self._adapted[one.key], measured, episodes=episodes)
            is_off = one.schedule.only_below and measured >= one.schedule.target
            self._used[one.key] = 0.0 if is_off else value

    def metrics(self) -> dict[str, float]:
        """Return the current values under ``settings/KEY``; for an environment, the number of its stage, from 0."""
        found = {f"{PREFIX}{key}": float(value) for key, value in self.values.items() if value is not None}
        for label, starts in stage_starts(self._run).items():
            name = "environment" if label == SOLE else f"environments.{label}"
            found[f"{PREFIX}{name}"] = float(sum(start <= self.step for start in starts))
        return found

    def state_dict(self) -> dict[str, list[float]]:
        """Return the adapted values and the current values of schedules with a target."""
        return {key: [value, self._used[key]] for key, value in self._adapted.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the state that `state_dict` returned; keys that no longer have a target are ignored."""
        for key, (value, used) in state.items():
            if key in self._adapted:
                self._adapted[key], self._used[key] = float(value), float(used)


def stage_starts(config: Config) -> dict[str, list[int]]:
    """Return the training steps after which an environment's settings change, by label; no entry without changes."""
    found: dict[str, set[int]] = {}
    for one in plan(config):
        if one.is_of_environment:
            label = one.key.split(".")[1] if one.key.startswith("environments.") else SOLE
            values = [(0, one.own), *(one.schedule.points or {}).items()]
            changed = [step for (_, before), (step, value) in itertools.pairwise(values) if value != before]
            found.setdefault(label, set()).update(changed)
    return {label: sorted(starts) for label, starts in found.items() if starts}


STAGE_MARK = "~"
"""Character between the label of an environment and the number of its stage; labels do not contain it."""


def stage_label(label: str, stage: int) -> str:
    """Return the name of an environment's settings in a stage, from 0: its label, and ``LABEL~1`` in the second."""
    return f"{label}{STAGE_MARK}{stage}" if stage else label


def environment_stages(config: Config) -> tuple[EnvironmentConfigs, ...]:
    """Return the configs of environments in their stages after the first, named by `stage_label`."""
    entries = [one for one in plan(config) if one.is_of_environment]
    found: list[EnvironmentConfigs] = []
    for label, starts in stage_starts(config).items():
        for stage, step in enumerate(starts, 1):
            values = {one.key: one.schedule.at(step, one.own) for one in entries}
            changed = with_values(config, {key: value for key, value in values.items() if value is not None})
            part = next(part for part in per_environment_configs(changed) if part.label == label)
            found.append(replace(part, label=stage_label(label, stage)))
    return tuple(found)


def configs_at_points(config: Config) -> dict[int, Config]:
    """Return the config at each step at which a value changes its course, and at the step before; all are validated.

    Raises:
        ConfigError: a value is out of range at one of the points; see `plan` as well.
    """
    entries = plan(config)
    if not entries:
        return {}
    steps = {0, config.trainer.steps - 1}
    for one in entries:
        steps |= {near for step in one.schedule.steps for near in (step - 1, step) if near >= 0}
    found = {step: _config_at(config, entries, step, {}) for step in sorted(steps)}
    for one in entries:
        for name in ("min", "max"):
            bound = getattr(one.schedule, name)
            if bound is not None and one.schedule.target is not None:
                _config_at(config, entries, 0, {one.key: bound})
    return found


def _config_at(config: Config, entries: Sequence[PlanEntry], step: int, bounds: Mapping[str, Any]) -> Config:
    values = {one.key: one.at(step) for one in entries} | dict(bounds)
    plain = config.model_copy(update={"schedules": None})
    changed = with_values(plain, {key: value for key, value in values.items() if value is not None})
    try:
        return Config.model_validate(changed.model_dump(warnings=False))
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":
            raise ConfigError(f"schedules, at step {step}: {first['ctx']['error']}") from None
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"schedules: {where} is invalid at step {step}",
            got=repr(first.get("input")),
            expected=describe_expected(first),
        ) from None


def check_schedules(config: Config) -> None:
    """Check the plan of a run, and its config at every point.

    Raises:
        ConfigError: a key cannot change, a value is out of range or needs what the run does not build, or a setting
            would be overridden.
    """
    entries = {one.key: one for one in plan(config)}
    if "trainer.learning_rate" in entries and config.trainer.schedule != "constant":
        raise ConfigError(
            "trainer.schedule and the schedule of trainer.learning_rate both change the learning rate",
            got=f"trainer.schedule {config.trainer.schedule}",
            expected="constant",
        )
    if any(key.startswith("sampling.") for key in entries) and not config.rollout.is_synchronous:
        raise ConfigError(
            "sampling can change only in synchronous training: other batches have episodes from several steps, which "
            "would have different distributions",
            got=f"rollout.max_staleness {config.rollout.max_staleness}",
            expected="rollout.max_staleness 0",
        )
    if config.trainer.episodes is not None and (others := [key for key in entries if _plays(key)]):
        raise ConfigError(f"{others[0]} has no effect on stored episodes", hint="remove its schedule")
    for step, changed in configs_at_points(config).items():
        if changed.algorithm.keeps_reference and not config.algorithm.keeps_reference:
            raise ConfigError(
                f"algorithm.kl_coef is above 0 at step {step}, but the run starts without a reference policy",
                got="algorithm.kl_coef 0",
                expected="algorithm.kl_coef above 0, with its first value as a point at step 0",
            )
    for key, one in entries.items():
        if key.startswith("algorithm.shaping.kl.") and config.algorithm.shaping["kl"].get("target") is not None:
            raise ConfigError(f"{key} is adapted by algorithm.shaping.kl.target already", hint="remove one of them")
        if one.schedule.target is not None and one.is_of_environment:
            raise ConfigError(f"{key} of an environment cannot follow a target", expected="points")


def _plays(key: str) -> bool:
    return key.startswith(("sampling.", "agent.", "environment"))


def at_largest(config: Config) -> Config:
    """Return a config with the largest budgets that its schedules reach, for estimates."""
    largest = {}
    for one in plan(config):
        if one.key.removeprefix("agent.") in BUDGETS:
            values = [one.own, one.schedule.max, *(one.schedule.points or {}).values()]
            largest[one.key] = max(value for value in values if value is not None)
    return with_values(config, largest)


def plan_rows(config: Config) -> list[tuple[str, str, str]]:
    """Return the rows of the dry run's table about keys that change: key, values by step, and source."""
    return [(one.key, one.describe(), "schedules") for one in plan(config)]
