"""Findings: what is wrong with a run, with its evidence and its remedy; and their order, the root cause first."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

SHOWN = 3
"""Maximum number of findings that a run or an evaluation shows at its end."""


class Severity(enum.StrEnum):
    """Severity of a finding."""

    CRITICAL = "critical"
    """The run cannot learn what it should."""
    SERIOUS = "serious"
    """The run learns less, or more slowly, than it could."""
    MINOR = "minor"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    """Config key to change.

    Example: ``ConfigChange(key="agent.max_turns", value=20, now=10)`` reads ``set agent.max_turns=20 (now 10)``.
    """

    key: str
    value: Any
    """New value; ``None`` for a higher one than the present one, which is unknown."""
    now: Any = None
    """Value in the config of the run; ``None`` if it is unknown."""

    def __str__(self) -> str:
        if self.value is None:
            return f"raise {self.key}"
        now = "" if self.now is None else f" (now {_value_text(self.now)})"
        return f"set {self.key}={_value_text(self.value)}{now}"


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.2g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleEpisode:
    """Stored episode that shows a problem."""

    id: str
    task_id: str
    step: int | None = None
    """Training step; ``None`` in an evaluation."""

    def view_command(self, folder: Path) -> str:
        """Return the command that shows the episode's task at its step."""
        step = [] if self.step is None else ["--step", str(self.step)]
        return shlex.join(["agentrl", "view", str(folder), "--task", self.task_id, *step, "--terminal"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with a run.

    Example: ``Finding(kind="truncated_turns", sentence="12 of 24 episodes ended because their turns ran out", changes=
    (ConfigChange(key="agent.max_turns", value=6, now=3),), count=12, of=24, weight=0.4)``.
    """

    kind: str
    """Name of the rule, or of the failure."""
    sentence: str
    """Description with counts."""
    advice: str = ""
    """Remedy, in addition to `changes`."""
    changes: tuple[ConfigChange, ...] = ()
    evidence: tuple[str, ...] = ()
    """Figures, steps and texts that show it."""
    example: ExampleEpisode | None = None
    count: int = 0
    """Number of cases among `of`."""
    of: int = 0
    file: str | None = None
    line: int | None = None
    weight: float = 0.0
    """Importance, up to 1: findings are listed in descending order."""
    causes: frozenset[str] = frozenset()
    """Kinds of findings that would explain this one."""
    because_of: str | None = None
    """Kind of the finding that explains this one."""
    is_current: bool = True
    """True if the newest step shows it, so that a running run warns."""

    @property
    def severity(self) -> Severity:
        """Severity by weight."""
        if self.weight >= 0.8:
            return Severity.CRITICAL
        return Severity.SERIOUS if self.weight >= 0.5 else Severity.MINOR

    @property
    def remedy(self) -> str:
        """Changes of the config, and the advice."""
        changes = " or ".join(map(str, self.changes))
        return "; ".join(filter(None, (changes, self.advice)))

    @property
    def text(self) -> str:
        """The finding in one line."""
        return "; ".join(filter(None, (self.sentence, self.remedy)))

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; `from_json` reads them."""
        record = {name: value for name, value in asdict(self).items() if name not in ("causes", "is_current")}
        return {"kind": self.kind, "severity": self.severity.value, "text": self.text} | record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Read the result of `to_json`; `KeyError` or `TypeError` if it is not one."""
        plain = {name: value for name, value in record.items() if name not in ("severity", "text")}
        plain["changes"] = tuple(ConfigChange(**change) for change in plain["changes"])
        plain["evidence"] = tuple(plain["evidence"])
        example = plain["example"]
        plain["example"] = None if example is None else ExampleEpisode(**example)
        return cls(**plain)


def rank(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Order findings by weight; those that another one explains come after all others, and name it."""
    ordered = sorted(findings, key=lambda finding: -finding.weight)
    kinds = {finding.kind for finding in ordered}
    roots = [finding for finding in ordered if not (finding.causes & kinds)]
    causes = [finding.kind for finding in (*roots, *ordered)]
    explained = [
        replace(finding, because_of=next(kind for kind in causes if kind in finding.causes))
        for finding in ordered
        if finding.causes & kinds
    ]
    return (*roots, *explained)


def top(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the worst of ranked findings that no other one explains."""
    roots = [finding for finding in findings if finding.because_of is None]
    return tuple((roots or findings)[:SHOWN])


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Format findings, one line each."""
    return [f"problem {number}: {finding}" for number, finding in enumerate(findings, 1)]
