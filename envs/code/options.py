"""The options of the code environment and of its tasks."""

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
MOST_SECONDS = 60.0


class Size(enum.StrEnum):
    """How large generated functions are."""

    TINY = "tiny"
    """One line over three numbers."""
    SMALL = "small"
    """Two to four steps over a list."""


class RewardKind(enum.StrEnum):
    """What a graded solution is rewarded by."""

    ALL = "all"
    """1 if every hidden test passes, else 0."""
    SHARE = "share"
    """The share of hidden tests that pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOptions:
    """What the environment and its task source are made with."""

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
    """Check options as they stand in a config.

    Args:
        size: Of generated functions: ``small``, or ``tiny`` for one line.
        level: How many steps generated functions take: 1 to 3, or 0 for all.
        files: Split to JSONL file, in the form of MBPP or HumanEval; problems are generated when left out.
        shown: How many of a file's tests the policy sees, where it has a list of them.
        max_steps: Attempts; the last one is graded in any case. 4, or 1 for tiny functions.
        reward: ``all``, or ``share`` for the share of hidden tests that pass.
        seconds: For all tests of an attempt.
        sandbox: What sandboxes are like: a back end's name, or what a config's ``agent.sandbox`` may hold.

    Raises:
        UsageError: a value is not allowed.
    """
    for what, value, known in (("size", size, Size), ("reward", reward, RewardKind)):
        if value not in list(known):
            raise UsageError(f"unknown {what} of code", got=repr(value), expected=" or ".join(known))
    if not 0 <= level <= MAX_LEVEL:
        raise UsageError("unknown level of code", got=level, expected=f"1 to {MAX_LEVEL}, or 0 for all")
    if shown < 0:
        raise UsageError("code cannot show fewer than no tests", got=shown, expected="0 or more")
    if not 0 < seconds <= MOST_SECONDS:
        raise UsageError("code's seconds are not allowed", got=seconds, expected=f"more than 0, up to {MOST_SECONDS:g}")
    steps = max_steps if max_steps is not None else 1 if size == Size.TINY and not files else MAX_STEPS
    if steps < 1:
        raise UsageError("code's max_steps is too small", got=steps, expected="at least 1")
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
