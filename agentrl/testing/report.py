"""Report of the environment check."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


class CheckStatus(enum.StrEnum):
    """Result of a check."""

    PASSED = "passed"
    WARNED = "warned"
    """Something looks wrong, and may be meant."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """The environment does not have what would be checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One rule."""

    check: str
    status: CheckStatus
    detail: str
    figures: Mapping[str, float] = field(default_factory=dict)
    """Measured numbers by name."""
    mend: str = ""
    """The next step; empty where nothing is to be done."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """The rule is not broken."""
        return self.status is not CheckStatus.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvCheckReport:
    """Report of `check_env`."""

    environment: str
    split: str
    rows: tuple[CheckRow, ...]

    @property
    def passed(self) -> bool:
        """No rule is broken."""
        return all(row.passed for row in self.rows)

    @property
    def seconds(self) -> float:
        """Seconds that the rules took."""
        return sum(row.seconds for row in self.rows)

    def with_status(self, status: CheckStatus) -> tuple[CheckRow, ...]:
        """The rows of a status."""
        return tuple(row for row in self.rows if row.status is status)

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {
            "environment": self.environment,
            "split": self.split,
            "passed": self.passed,
            "seconds": round(self.seconds, 3),
            "rows": [asdict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        width = max((len(row.check) for row in self.rows), default=0)
        lines = [f"{row.status:<8} {row.check:<{width}}  {row.detail}" for row in self.rows]
        return "\n".join([f"environment {self.environment}", *lines])
