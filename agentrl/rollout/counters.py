"""What the runtime counts while it runs, and who is told about turns and endings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from agentrl.errors import Outcome
from agentrl.trajectory import Trajectory, Turn


class RolloutObserver:
    """Is told what happens in episodes; the default does nothing.

    Called in the event loop: be quick. What it raises must be an `AgentRLError`; a `UsageError` (a full disk) ends the
    episode and reaches whoever runs it.
    """

    def on_start(self, trajectory: Trajectory) -> None:
        """An attempt begins; the trajectory is empty."""

    def on_turn(self, trajectory: Trajectory, turn: Turn) -> None:
        """A turn is complete: its reward and timings are final."""

    def on_end(self, trajectory: Trajectory) -> None:
        """An attempt ended, whatever its outcome (one that is tried again, and a cancelled one, too)."""


@dataclass(slots=True, kw_only=True)
class RolloutCounters:
    """Running counts, readable at any time."""

    running: int = 0
    """Episodes in flight."""
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    """Attempts that ended, by outcome."""
    retries: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    """Tokens sent to the engine, repeated prefixes included."""
    answer_tokens: int = 0
    """Tokens sampled or forced."""
    invalid_answers: int = 0
    invalid_actions: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    groups_delivered: int = 0
    groups_failed: int = 0
    """Groups without a single episode that can train."""
    groups_stale: int = 0
    groups_filtered: int = 0

    def snapshot(self) -> dict[str, float]:
        """All counts by metric name."""
        counts = {name: float(getattr(self, name)) for name in self.__slots__ if name != "outcomes"}
        return counts | {f"outcome/{outcome}": float(count) for outcome, count in self.outcomes.items()}
