"""Counts of failures of the user's code during rollouts: rewards, environments and tools, by subject and location."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agentrl.errors import AgentRLError, Outcome, SourceLocation

MAX_DISTINCT = 200
"""Maximum number of distinct failures, which bounds the memory if every message is different."""


@dataclass(slots=True, kw_only=True)
class Incident:
    """Failures with the same subject and location."""

    kind: str
    """``tool``, or the outcome of the episodes that the failure ended."""
    subject: str
    """Name of the reward function, environment or tool that failed."""
    cause: str
    """Exception of the first failure, with its text."""
    file: str | None = None
    line: int = 0
    count: int = 0


@dataclass(slots=True, kw_only=True)
class Incidents:
    """Counts of failures; several runners may share one."""

    attempts: int = 0
    """Number of attempts at episodes that have ended."""
    calls: Counter[str] = field(default_factory=Counter)
    """Number of calls of each tool."""
    found: dict[tuple[str, str, str], Incident] = field(default_factory=dict)

    def count_failure(self, outcome: Outcome, subject: str, error: AgentRLError) -> int:
        """Count an attempt that failed, and return how many failed in this way; `MAX_DISTINCT` if it is not counted.

        `subject` names the failed part if the error does not.
        """
        return self._count(outcome.value, error.subject or subject, error.reason, error.location)

    def count_of(self, outcome: Outcome, subject: str, error: AgentRLError) -> int:
        """Return how many attempts have failed in a way; see `count_failure`."""
        key = _key(outcome.value, error.subject or subject, error.reason, error.location)
        return self.found[key].count if key in self.found else 0

    def count_call(self, tool: str, cause: str | None = None, location: SourceLocation | None = None) -> None:
        """Count a call of a tool, and its failure if there was one."""
        self.calls[tool] += 1
        if cause is not None:
            self._count("tool", tool, cause, location)

    def _count(self, kind: str, subject: str, cause: str, location: SourceLocation | None) -> int:
        key = _key(kind, subject, cause, location)
        if key not in self.found and len(self.found) >= MAX_DISTINCT:
            return MAX_DISTINCT
        known = self.found.setdefault(key, Incident(kind=kind, subject=subject, cause=cause))
        known.count += 1
        if location is not None:
            known.file, known.line = location.file, location.line
        return known.count

    def worst(self) -> list[Incident]:
        """Return all failures, the most frequent first."""
        return sorted(self.found.values(), key=lambda incident: -incident.count)

    def to_record(self) -> dict[str, Any]:
        """Return the counts as plain JSON types."""
        found = [asdict(incident) for incident in self.found.values()]
        return {"attempts": self.attempts, "calls": dict(self.calls), "found": found}

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Add the counts of an earlier part of the same work, as returned by `to_record`."""
        self.attempts += record["attempts"]
        self.calls.update(record["calls"])
        for row in record["found"]:
            location = None if row["file"] is None else SourceLocation(row["file"], row["line"])
            key = _key(row["kind"], row["subject"], row["cause"], location)
            known = self.found.setdefault(key, Incident(**{**row, "count": 0}))
            known.count += row["count"]


def _key(kind: str, subject: str, cause: str, location: SourceLocation | None) -> tuple[str, str, str]:
    """Return what failures have in common that are counted together."""
    return kind, subject, cause.partition(":")[0] if location is None else str(location)
