"""The turns of one episode: budgets are checked before each, rewards and timings are added to the latest."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.errors import UsageError
from agentrl.rollout.budget import Budget, EpisodeLimits
from agentrl.rollout.counters import RolloutCounters, RolloutObserver
from agentrl.rollout.seeds import derive_seed
from agentrl.rollout.stall import Waits
from agentrl.trajectory import Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorders:
    """Who is told what happens, shared by all episodes of a run."""

    waits: Waits
    counters: RolloutCounters
    observer: RolloutObserver


class TurnLog:
    """Keeps the current turn of an episode; shared by its conversations.

    Args:
        trajectory: The episode's record.
        limits: Its budgets.
        recorders: Who is told.
        seed: Seed of the episode's sampling.
    """

    def __init__(self, trajectory: Trajectory, limits: EpisodeLimits, recorders: Recorders, seed: int) -> None:
        self.trajectory = trajectory
        self.limits = limits
        self.recorders = recorders
        self.budget = Budget(limits, recorders.waits.clock)
        self.state_key: str | None = None
        """Key of the environment's state now, where it has one."""
        self.latest: Turn | None = None
        self._seed = seed

    def begin(self) -> int:
        """Close the latest turn and open the next; the seed of its sampling.

        Raises:
            EpisodeEnd: a budget is spent.
        """
        index = self.budget.take_turn()
        self.close()
        return derive_seed(self._seed, index)

    def take(self, turn: Turn, *, prompt_tokens: int, answer_tokens: int) -> None:
        """Record the turn that was just taken; rewards and timings go to it from now on."""
        turn.state_key = self.state_key
        self.latest = turn
        counters = self.recorders.counters
        counters.turns += 1
        counters.prompt_tokens += prompt_tokens
        counters.answer_tokens += answer_tokens

    def require_latest(self) -> Turn:
        """The turn that an action belongs to.

        Raises:
            UsageError: the loop acts before the policy has spoken.
        """
        if self.latest is None:
            raise UsageError("the agent loop acts before the policy has answered", hint="await generate() first")
        return self.latest

    def close(self) -> None:
        """Tell the observer that the latest turn is complete; call it at the end, too."""
        if self.latest is not None:
            self.recorders.observer.on_turn(self.trajectory, self.latest)
            self.latest = None

    def count_invalid(self) -> None:
        """Count an unusable answer and mark its turn.

        Raises:
            EpisodeEnd: too many of them.
        """
        self.recorders.counters.invalid_answers += 1
        self.add_metric("invalid_answers", 1)
        if self.latest is not None:
            self.latest.valid = False
        self.budget.count_invalid()

    def add_metric(self, name: str, value: float) -> None:
        """Add to one of the trajectory's counts."""
        self.trajectory.metrics[name] = self.trajectory.metrics.get(name, 0.0) + value
