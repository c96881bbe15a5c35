"""The conformance check of an environment: `check_env` plays it and says which rules it keeps.

report = check_env("my_game:GuessNumber-v0")
assert report.passed, report
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.env import EnvironmentSpec
from agentrl.env_lookup import check_split, parse_env_name, resolve_environment
from agentrl.testing.env_rules import RULES
from agentrl.testing.env_subject import Broken, Missing, Subject

ENDLESS = 100
"""Steps after which play stops in environments that state no limit."""


class CheckStatus(enum.StrEnum):
    """What came out of a check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """The environment does not have what would be checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One rule."""

    check: str
    status: CheckStatus
    detail: str

    @property
    def passed(self) -> bool:
        """The rule is not broken."""
        return self.status is not CheckStatus.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvCheckReport:
    """What `check_env` found out."""

    environment: str
    rows: tuple[CheckRow, ...]

    @property
    def passed(self) -> bool:
        """No rule is broken."""
        return all(row.passed for row in self.rows)

    def __str__(self) -> str:
        width = max(len(row.check) for row in self.rows)
        lines = [f"{row.status:<8} {row.check:<{width}}  {row.detail}" for row in self.rows]
        return "\n".join([f"environment {self.environment}", *lines])


def check_env(
    environment: str | EnvironmentSpec,
    *,
    options: Mapping[str, Any] | None = None,
    split: str | None = None,
    episodes: int = 8,
) -> EnvCheckReport:
    """Check that an environment keeps the rules of its contract (`agentrl.testing.env_rules`).

    Args:
        environment: A name (``household``, ``my_game:GuessNumber-v0``, ``household/valid_seen``), or a spec.
        options: Of the environment, put over the spec's own.
        split: Whose tasks are played; the one in the name, else the spec's first.
        episodes: How many tasks are played.

    Raises:
        UsageError: no such environment or split, the options are wrong, or its package is not installed.
    """
    spec, named_split = _find(environment)
    if spec.extra is not None:
        spec.extra.load()
    chosen = check_split(spec, split or named_split or spec.splits[0])
    merged = {**spec.options, **(options or {})}
    source = spec.tasks(chosen, **merged)
    subject = Subject(
        spec=spec,
        options=merged,
        tasks=[source[index] for index in range(min(episodes, len(source)))],
        limit=spec.max_turns or ENDLESS,
    )
    return EnvCheckReport(environment=spec.name, rows=tuple(_check(rule, subject) for rule in RULES))


def _find(environment: str | EnvironmentSpec) -> tuple[EnvironmentSpec, str | None]:
    if isinstance(environment, EnvironmentSpec):
        return environment, None
    name, split = parse_env_name(environment)
    return resolve_environment(name), split


def _check(rule: Callable[[Subject], str], subject: Subject) -> CheckRow:
    """One row; what the environment raises breaks the rule, because nothing may escape from it."""
    check = rule.__name__.replace("_", " ")
    try:
        return CheckRow(check=check, status=CheckStatus.PASSED, detail=rule(subject))
    except Missing as missing:
        return CheckRow(check=check, status=CheckStatus.SKIPPED, detail=str(missing))
    except Broken as broken:
        return CheckRow(check=check, status=CheckStatus.FAILED, detail=str(broken))
    except Exception as error:
        return CheckRow(check=check, status=CheckStatus.FAILED, detail=f"{type(error).__name__}: {error}")
