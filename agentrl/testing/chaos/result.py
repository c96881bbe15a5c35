"""Result of a campaign: faults, and their effects on runs and episodes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from agentrl.testing.chaos.check import Account


@dataclass(slots=True, kw_only=True)
class FaultRecord:
    """Injected fault and the run's reaction."""

    run: str
    target: str
    way: str
    time_s: float
    """Seconds since the start of the campaign."""
    detail: str = ""
    """Process, byte or file that the fault hit."""
    said: str = ""
    """First message of the run after the fault."""
    ended: str = ""
    """End of the run's process: ``went on`` if it survived the fault."""

    def __str__(self) -> str:
        what = ", ".join(filter(None, (f"{self.target}: {self.way}", self.detail)))
        return f"{self.time_s:7.1f} s  {self.run}  {what} -> {self.ended}" + (f": {self.said}" if self.said else "")


@dataclass(slots=True)
class CampaignResult:
    """Faults and findings of a campaign."""

    seed: int
    faults: list[FaultRecord] = field(default_factory=list)
    account: Account = field(default_factory=Account)
    hung: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def findings(self) -> dict[str, list[str]]:
        """Findings by kind."""
        account = self.account
        found = {"lost": account.lost, "duplicated": account.duplicated, "mislabelled": account.mislabelled}
        return {**found, "hung": self.hung, "unclear": self.unclear}

    @property
    def counts(self) -> dict[str, int]:
        """Number of findings by kind."""
        return {kind: len(found) for kind, found in self.findings.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the result in plain JSON types."""
        return {
            "seed": self.seed,
            "counts": self.counts,
            "episodes_trained": self.account.trained,
            "groups": dict(self.account.named),
            "findings": self.findings,
            "runs": self.runs,
            "faults": [asdict(fault) for fault in self.faults],
        }
