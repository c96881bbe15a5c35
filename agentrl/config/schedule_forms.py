"""The forms of a schedule, and advice for one that stands in the place of another.

A config has four places for values that change by step: ``trainer.schedule``, one word; a key under ``schedules``; a
stage, which is a step under ``schedules``; and ``curriculum.horizon``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

BUDGETS = (
    "max_turns",
    "max_answer_tokens",
    "max_observation_tokens",
    "max_tokens",
    "max_seconds",
    "max_rejected_actions",
    "max_parse_failures",
)
"""Budgets of episodes, keys of ``agent``."""
PLAIN_KEYS = (
    *(f"sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p")),
    *(f"agent.{name}" for name in BUDGETS),
    *(f"algorithm.{name}" for name in ("kl_coef", "entropy_coef", "norm_length", "correction.cap")),
    *(f"algorithm.selection.{name}" for name in ("min_accuracy", "max_accuracy", "top_p")),
    *(f"trainer.{name}" for name in ("learning_rate", "max_grad_norm", "max_kl")),
)
"""Keys that may change by step and whose names are fixed."""
FORMS = (
    "give points ({0: 1.4, 500: 1.45}; with a line between them, {points: {0: 1.4, 500: 1.45}, shape: linear}), a "
    "factor ({factor: 0.985}), or a target ({target: 0.2, step: 1e-4, max: 0.005}); see docs/schedules.md"
)
"""What an error recommends in place of a value that is not a schedule."""
RATE = "trainer.learning_rate"
_COURSE = "trainer.schedule"
_COURSES = ("constant", "cosine")
_LINE = "{points: {0: A, 100: B}, shape: linear}"
_FOREIGN = frozenset({"from", "to", "start", "end", "initial", "final", "begin", "linear", "cosine", "exponential"})
"""Words of other libraries' schedules."""


def is_step(key: object) -> bool:
    """Return True for a step of a config, a number or its digits."""
    return isinstance(key, int) or (isinstance(key, str) and key.removeprefix("-").isdigit())


def is_by_steps(value: object) -> bool:
    """Return True for a mapping whose keys are all steps."""
    return isinstance(value, Mapping) and bool(value) and all(map(is_step, value))


def has_form(value: Mapping[Any, Any]) -> bool:
    """Return True for a mapping with points, or with the number of a factor or target."""
    return "points" in value or any(not isinstance(value.get(name, {}), Mapping) for name in ("factor", "target"))


def looks_like_schedule(value: object) -> bool:
    """Return True for a mapping of steps, of a schedule's keys, or of the words of other libraries.

    >>> [looks_like_schedule(value) for value in ({0: 1e-3}, {"factor": 0.9}, {"from": 1, "to": 2}, {"rank": 8}, 3)]
    [True, True, True, False, False]
    """
    if not isinstance(value, Mapping):
        return False
    return is_by_steps(value) or has_form(value) or bool(_FOREIGN & {str(key) for key in value})


def to_yaml(value: object) -> str:
    """Write a value in YAML's short form.

    >>> to_yaml({0: 0.001, "shape": "cosine"})
    '{0: 0.001, shape: cosine}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {to_yaml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_yaml, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def advise(key: str, value: object) -> str | None:
    """Return which form of a schedule a wrong value is, and where it stands; ``None`` if it looks like none.

    Args:
        key: The key that has the value, such as ``trainer.learning_rate``.
        value: The value.
    """
    if key == _COURSE:
        return _advise_course(value)
    if key == "schedules":
        return f"one word is the course of the learning rate: {_COURSE}={value}" if value in _COURSES else FORMS
    if key == RATE and value in (*_COURSES, "linear"):
        return _advise_course(value) if value == "linear" else f"a word is the course of it: {_COURSE}={value}"
    if key in PLAIN_KEYS and (isinstance(value, list) or looks_like_schedule(value)):
        return f"{advise_key(key, value)}; see docs/schedules.md"
    return None


def advise_key(key: str, value: object) -> str:
    """Return where values of a key belong that change by step."""
    is_form = isinstance(value, Mapping) and (is_by_steps(value) or has_form(value))
    form = to_yaml(value) if is_form else _LINE
    return f"values that change by step belong under schedules: schedules={{{key}: {form}}}"


def _advise_course(value: object) -> str:
    form = to_yaml(value) if is_by_steps(value) else _LINE
    meaning = "a line is" if value == "linear" else "values at steps belong under schedules:"
    return (
        f"one word is the course of the learning rate over the whole run, {_COURSE}=cosine; {meaning} "
        f"schedules={{{RATE}: {form}}}; see docs/schedules.md"
    )


def check_plain_value(key: str, value: object) -> None:
    """Check that an option, or a section of the curriculum, is not a schedule.

    Raises:
        ValueError: it is one; the message says where it belongs.
    """
    if not isinstance(value, Mapping) or not (is_by_steps(value) or has_form(value)):
        return
    if key.partition(".")[0] == "curriculum":
        raise ValueError(
            f"{key}: got {to_yaml(value)}, expected its keys: a turn limit by steps is curriculum.horizon={{turns: "
            "[10, 20], at_steps: [0, 100]}, or schedules={agent.max_turns: {0: 10, 100: 20}}; see docs/schedules.md"
        )
    raise ValueError(f"{key}: got {to_yaml(value)}, expected a value: {advise_key(key, value)}; see docs/schedules.md")


def check_options(section: str, function: str, options: Mapping[str, Any]) -> None:
    """Check that no option of a registered function is a mapping of steps; your own functions may take such mappings.

    Raises:
        ValueError: one is; the message says where it belongs.
    """
    for name, value in options.items() if ":" not in function else ():
        if is_by_steps(value):
            check_plain_value(f"{section}.{name}", value)


def check_form(key: str, value: object) -> None:
    """Check that the value of a key under ``schedules`` is a mapping, and no stage.

    Raises:
        ValueError: it is something else; the message says what stands where.
    """
    if key == _COURSE:
        word = value if value in _COURSES else "cosine"
        raise ValueError(f"{_COURSE} cannot change by step; set it on its own: {_COURSE}={word}")
    if not isinstance(value, Mapping):
        is_course = key == RATE and value in _COURSES
        course = f"one word is the course of the learning rate, {_COURSE}={value}; or " if is_course else ""
        raise ValueError(f"schedules.{key} is {value!r}, which is not a schedule: {course}{FORMS}")
    if key not in PLAIN_KEYS or not is_by_steps(value):
        return
    for step, inner in value.items():
        if isinstance(inner, Mapping):
            raise ValueError(
                f"schedules.{key} is {to_yaml(inner)} at step {step}, expected a value of {key}: the keys that change "
                f"at a step, a stage, belong under the step: schedules={{{step}: {to_yaml(inner)}}}"
            )


def check_stage(step: object, values: object) -> None:
    """Check that a stage is a mapping of keys.

    Raises:
        ValueError: it is a value; the message says what stands where.
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f"schedules.{step} is {to_yaml(values)}, expected the keys that change at step {step} (a stage), as in "
            f"{{{step}: {{sampling.temperature: 1.4}}}}; values of one key belong under that key, as in "
            "{sampling.temperature: {0: 1.4, 500: 1.45}}"
        )


def check_stage_value(step: object, key: str, value: object) -> None:
    """Check that a stage has a plain value for a key.

    Raises:
        ValueError: it has a schedule.
    """
    if key in PLAIN_KEYS and isinstance(value, Mapping):
        raise ValueError(
            f"schedules.{step}.{key} is {to_yaml(value)}, expected a value: a stage has the values from its step on, "
            f"and a schedule belongs under its key, outside of stages: schedules={{{key}: {to_yaml(value)}}}"
        )
