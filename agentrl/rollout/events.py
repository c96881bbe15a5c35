"""Events of a rollout: the observer of its episodes, and the counts of what has happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from agentrl.errors import Outcome
from agentrl.observe.incidents import Incidents
from agentrl.observe.progress import RolloutProgress
from agentrl.observe.trajectory_store import GroupEnd
from agentrl.trajectory import Trajectory, Turn


class RolloutObserver:
    """Observer of the events of episodes; the default does nothing.

    The event loop calls it, so methods must be quick. They may raise only `AgentRLError`; a `UsageError` (a full disk)
    ends the episode and reaches the caller of the runner.
    """

    def on_start(self, trajectory: Trajectory) -> None:
        """Handle the start of an attempt; the trajectory is empty."""

    def on_turn(self, trajectory: Trajectory, turn: Turn) -> None:
        """Handle a complete turn, whose reward and timings are final."""

    def on_end(self, trajectory: Trajectory) -> None:
        """Handle the end of an attempt, whatever its outcome, even if it is retried or cancelled."""

    def on_group_end(self, group_id: str, end: GroupEnd, episodes: Sequence[Trajectory]) -> None:
        """Handle the end of a group: it was trained on, or will never be; `episodes` are the ended ones."""


@dataclass(slots=True, kw_only=True)
class RolloutCounters:
    """Counts of a rollout, which can be read at any time."""

    running: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    retries: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    """Number of tokens sent to the engine, including repeated prefixes."""
    answer_tokens: int = 0
    """Number of sampled or forced tokens."""
    invalid_answers: int = 0
    invalid_actions: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    groups_delivered: int = 0
    groups_failed: int = 0
    """Number of groups with too few trainable episodes or a failed extra rollout."""
    groups_stale: int = 0
    groups_filtered: int = 0
    engine_s: float = 0.0
    """Seconds of answers, summed over the turns of all attempts that have ended."""
    failed_engine_s: float = 0.0
    """Part of `engine_s` of attempts with infrastructure failures."""
    discarded_engine_s: float = 0.0
    """Part of `engine_s` of complete episodes whose groups were dropped: failed, too stale, or filtered out."""
    judge_requests: int = 0
    """Number of answers of a judge's service."""
    judge_cached: int = 0
    """Number of verdicts that were cached, or that another episode had already requested."""
    judge_unreadable: int = 0
    """Number of answers that could not be read."""
    judge_tokens: int = 0
    """Number of tokens of questions and answers."""
    judge_without: int = 0
    """Number of episodes with only the environment's reward because the budget was spent."""
    judge_pairs: int = 0
    """Number of pairs of episodes that were compared in both orders."""
    judge_agreeing: int = 0
    """Number of pairs with the same winner, or a tie, in both orders."""
    judge_cost: float = 0.0
    """Cost by the prices in ``agent.judge.budget``."""
    judge_seconds: float = 0.0
    """Seconds summed over requests."""
    incidents: Incidents = field(default_factory=Incidents)
    """Failures and their locations."""

    def judge_counts(self) -> dict[str, float]:
        """Return the judge's counts, by their names without ``judge_``."""
        counts = {name: getattr(self, name) for name in self.__slots__ if name.startswith("judge_")}
        return {name.removeprefix("judge_"): float(count) for name, count in counts.items()}

    def progress(self) -> RolloutProgress:
        """Return the current counts of episodes, turns and tokens."""
        return RolloutProgress(episodes=self.running, turns=self.turns, tokens=self.answer_tokens)

    def snapshot(self) -> dict[str, float]:
        """Return all counts by metric name."""
        counts = {name: float(getattr(self, name)) for name in self.__slots__ if name not in ("outcomes", "incidents")}
        return counts | {f"outcome/{outcome}": float(count) for outcome, count in self.outcomes.items()}


episode_counters: ContextVar[RolloutCounters] = ContextVar("episode_counters")
"""Counters of the runner that plays or scores an episode in this context, for services that several runners share."""
