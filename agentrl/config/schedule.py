"""Schedules: values of one key over the training steps, by points, by a factor, or by a target of a metric."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from agentrl.config.schedule_forms import (
    FORMS,
    PLAIN_KEYS,
    check_form,
    check_stage,
    check_stage_value,
    has_form,
    is_by_steps,
    is_step,
)
from agentrl.config.section import Finite, Section

Shape: TypeAlias = Literal["constant", "linear", "cosine"]
"""Course of a value between two points."""
MAX_CHANGE = 0.2
"""Largest relative error that an adaptive coefficient's update counts (arXiv 1909.08593, section 2.2)."""


def interpolate(shape: Shape, start: float, end: float, progress: float) -> float:
    """Return a value between two points; `progress` is 0 at the first point and 1 at the second one.

    >>> [interpolate(shape, 2.0, 4.0, 0.5) for shape in ("constant", "linear", "cosine")]
    [2.0, 3.0, 3.0]
    """
    match shape:
        case "constant":
            return start
        case "linear":
            return start + (end - start) * progress
        case "cosine":
            return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def latest_point(steps: Sequence[int], step: int) -> int:
    """Return the index of the last of increasing steps that is at most `step`; -1 before the first one."""
    return bisect.bisect_right(steps, step) - 1


def proportional_change(coef: float, measured: float, *, target: float, share: float) -> float:
    """Update an adaptive coefficient: coef (1 + clip(measured / target - 1, -0.2, 0.2) share).

    Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593, section 2.2.

    Args:
        coef: Coefficient before the update.
        measured: Measured value, which a larger coefficient lowers.
        target: Target of the measured value.
        share: Episodes of the step over the horizon.
    """
    error = min(max(measured / target - 1, -MAX_CHANGE), MAX_CHANGE)
    return coef * (1 + error * share)


class ScheduleConfig(Section):
    """Values of one key over the training steps: exactly one of ``points``, ``factor`` and ``target``."""

    points: dict[int, Any] | None = None
    """Values from given steps on, where 0 is the first training step: ``{0: 1.4, 500: 1.45}``; before the first point,
    the key's own value. A mapping of steps is short for ``{points: …}``."""
    shape: Literal["constant", "linear", "cosine"] = "constant"
    """Course between two points; after the last point, the value does not change."""
    factor: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Factor of the value after each training step, from the key's own value, within ``min`` and ``max``."""
    target: Finite | None = None
    """Target of ``metric``; the value is adapted after each training step, from the key's own value, within ``min`` and
    ``max``."""
    metric: str | None = None
    """Metric of a training step that has the target; ``train/entropy`` for ``algorithm.entropy_coef``, and
    ``train/kl_reference`` for ``algorithm.kl_coef``, if not set."""
    step: Finite | None = None
    """Change of the value after a step in which the metric is below the target; otherwise the value changes by the
    opposite."""
    horizon: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Episodes in which the value changes by at most a fifth, instead of ``step``: it grows while the metric is above
    the target, as an adaptive KL coefficient does."""
    only_below: bool = False
    """True to use the value only after steps in which the metric was below the target, and 0 otherwise, as Skywork-OR1
    does."""
    min: Finite | None = None
    """Smallest value."""
    max: Finite | None = None
    """Largest value."""

    @model_validator(mode="before")
    @classmethod
    def _points_alone(cls, data: Any) -> Any:
        return {"points": data} if is_by_steps(data) else data

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        forms = [name for name in ("points", "factor", "target") if getattr(self, name) is not None]
        if len(forms) != 1:
            raise ValueError(f"a schedule has {' and '.join(forms) or 'no values'}: {FORMS}")
        used = {
            "points": ("shape",),
            "factor": ("min", "max"),
            "target": ("metric", "step", "horizon", "only_below", "min", "max"),
        }
        fields = type(self).model_fields
        for name in fields:
            if name not in (*forms, *used[forms[0]]) and getattr(self, name) != fields[name].default:
                raise ValueError(f"{name} of a schedule is ignored with {forms[0]}: remove it")
        return self

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        if self.points is not None:
            steps = list(self.points)
            if not steps or steps[0] < 0 or any(low >= high for low, high in itertools.pairwise(steps)):
                raise ValueError(f"points of a schedule are at {steps}: expected increasing steps from 0")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min:g}) of a schedule exceeds max ({self.max:g})")
        if self.target is None:
            return self
        if (self.step is None) == (self.horizon is None):
            raise ValueError("a schedule with a target changes the value by step or by horizon: set one of them")
        if self.horizon is not None and (self.target <= 0 or self.only_below):
            raise ValueError("horizon of a schedule needs a target above 0, and no only_below")
        return self

    @property
    def steps(self) -> list[int]:
        """Steps of the points; only the first step for other forms."""
        return [0] if self.points is None else list(self.points)

    def at(self, step: int, own: Any, *, is_integer: bool = False) -> Any:
        """Return the value at a training step, from 0, by points or factor.

        Args:
            step: Number of finished training steps.
            own: The key's own value.
            is_integer: True to round values between points, and those by a factor.
        """
        if self.factor is not None:
            value = self.clamp(_times_power(own, self.factor, step))
            return round(value) if is_integer and math.isfinite(value) else value
        points = {**({} if 0 in (self.points or {}) else {0: own}), **(self.points or {})}
        steps, values = list(points), list(points.values())
        place = latest_point(steps, step)
        if self.shape == "constant" or place == len(steps) - 1:
            return values[place]
        progress = (step - steps[place]) / (steps[place + 1] - steps[place])
        value = interpolate(self.shape, values[place], values[place + 1], progress)
        return round(value) if is_integer else value

    def clamp(self, value: float) -> float:
        """Return a value within ``min`` and ``max``."""
        value = value if self.min is None else max(value, self.min)
        return value if self.max is None else min(value, self.max)

    def adapt(self, value: float, measured: float, *, episodes: float) -> float:
        """Return the value of a schedule with a target after a step.

        Args:
            value: Value before.
            measured: Metric of the step.
            episodes: Trained episodes of the step.
        """
        assert self.target is not None
        if self.horizon is not None:
            return self.clamp(proportional_change(value, measured, target=self.target, share=episodes / self.horizon))
        change = self.step or 0.0
        return self.clamp(value + change if measured < self.target else value - change)


def _times_power(value: float, factor: float, exponent: int) -> float:
    """Multiply a value by a power, which is infinite if it exceeds the range of floats."""
    try:
        return value * factor**exponent
    except OverflowError:
        return value and math.copysign(math.inf, value)


def flat_keys(data: Mapping[str, Any], *, stop_at: frozenset[str] = frozenset(), prefix: str = "") -> dict[str, Any]:
    """Join nested keys with dots: ``{sampling: {temperature: …}}`` is ``{sampling.temperature: …}``.

    A mapping of steps, one whose keys are all in `stop_at`, a schedule with a misspelt key, and anything under a
    key that is not a section are values.

    >>> flat_keys({"sampling": {"temperature": {0: 1.4}}, "agent.max_turns": {"factor": 2}}, stop_at=FORM_KEYS)
    {'sampling.temperature': {0: 1.4}, 'agent.max_turns': {'factor': 2}}
    """
    found: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        is_section = isinstance(value, dict) and value and not is_by_steps(value) and key not in PLAIN_KEYS
        if is_section and not value.keys() <= stop_at and not (stop_at and has_form(value)):
            found |= flat_keys(value, stop_at=stop_at, prefix=f"{key}.")
        else:
            found[key] = value
    return found


FORM_KEYS = frozenset(ScheduleConfig.model_fields)
"""Keys of a schedule, which are not sections of a config."""


def with_stages(data: Mapping[Any, Any]) -> dict[str, Any]:
    """Return schedules by key; a stage, under its step, is a point of each of its keys.

    >>> with_stages({"sampling.top_p": {"factor": 0.9}, 0: {"agent": {"max_turns": 3}}, 5: {"agent.max_turns": 9}})
    {'sampling.top_p': {'factor': 0.9}, 'agent.max_turns': {0: 3, 5: 9}}

    Raises:
        ValueError: a key is in a stage and has a schedule of its own, or a value is not a schedule.
    """
    found = flat_keys({key: value for key, value in data.items() if not is_step(key)}, stop_at=FORM_KEYS)
    for key, value in found.items():
        if not isinstance(value, ScheduleConfig):
            check_form(key, value)
    points: dict[str, dict[int, Any]] = {}
    for step in sorted((key for key in data if is_step(key)), key=int):
        check_stage(step, data[step])
        for key, value in flat_keys(data[step]).items():
            check_stage_value(step, key, value)
            points.setdefault(key, {})[int(step)] = value
    if twice := sorted(points.keys() & found.keys()):
        raise ValueError(f"schedules sets {twice[0]} both in a stage and on its own: remove one of them")
    return {**found, **points}
