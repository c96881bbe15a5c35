"""Options of the code environment and of its tasks."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import UsageError
from agentrl.sandbox import SandboxSpec, read_spec

MAX_STEPS = 4
MAX_LEVEL = 3
SHOWN = 1
SECONDS = 6.0
MAX_SECONDS = 60.0


class Size(enum.StrEnum):
    """Size of generated functions."""

    TINY = "tiny"
    """One line over three numbers."""
    SMALL = "small"
    """Two to four steps over a list."""


class RewardKind(enum.StrEnum):
    """Reward of a graded solution."""

    ALL = "all"
    """1 if every hidden test passes, else 0."""
    SHARE = "share"
    """The share of hidden tests that pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOptions:
    """Checked options of the environment and its task source."""

    size: Size
    level: int
    files: Mapping[str, str] | None = field(hash=False)
    shown: int
    max_steps: int
    reward: RewardKind
    seconds: float
    sandbox: SandboxSpec = field(hash=False)


def parse_options(
    *,
    size: str = Size.SMALL,
    level: int = 0,
    files: Mapping[str, str] | None = None,
    shown: int = SHOWN,
    max_steps: int | None = None,
    reward: str = RewardKind.ALL,
    seconds: float = SECONDS,
    sandbox: Mapping[str, Any] | SandboxSpec | str = "local",
) -> CodeOptions:
    """Check the options of a config.

    Args:
        size: Size of generated functions: ``small``, or ``tiny`` for one line.
        level: Number of steps of generated functions: 1 to 3, or 0 for all.
        files: Split to JSONL file, in the format of MBPP or HumanEval; problems are generated if left out.
        shown: Number of a file's tests that the policy sees, if the file lists tests.
        max_steps: Maximum number of attempts; the last one is always graded. 4, or 1 for tiny functions.
        reward: ``all``, or ``share`` for the share of hidden tests that pass.
        seconds: Time limit of all tests of an attempt.
        sandbox: Sandbox back end: its name, or settings as in a config's ``agent.sandbox``.

    Raises:
        UsageError: a value is not allowed.
    """
    for what, value, known in (("size", size, Size), ("reward", reward, RewardKind)):
        if value not in list(known):
            raise UsageError(f"unknown {what} of code", got=repr(value), expected=" or ".join(known))
    if not 0 <= level <= MAX_LEVEL:
        raise UsageError("unknown level of code", got=level, expected=f"1 to {MAX_LEVEL}, or 0 for all")
    if shown < 0:
        raise UsageError("the option shown of code is negative", got=shown, expected="0 or more")
    if not 0 < seconds <= MAX_SECONDS:
        raise UsageError(
            "the option seconds of code is out of range", got=seconds, expected=f"more than 0, up to {MAX_SECONDS:g}"
        )
    steps = max_steps if max_steps is not None else 1 if size == Size.TINY and not files else MAX_STEPS
    if steps < 1:
        raise UsageError("the option max_steps of code is too small", got=steps, expected="at least 1")
    return CodeOptions(
        size=Size(size),
        level=level,
        files=dict(files) if files else None,
        shown=shown,
        max_steps=steps,
        reward=RewardKind(reward),
        seconds=seconds,
        sandbox=read_spec(sandbox),
    )
