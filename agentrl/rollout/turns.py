"""Turns of one episode: sampling seeds, and the log of turns that receive rewards and timings."""

from __future__ import annotations

import hashlib

from agentrl.errors import UsageError
from agentrl.rollout.budget import Budget, EpisodeLimits
from agentrl.rollout.events import RolloutCounters, RolloutObserver
from agentrl.rollout.waits import WaitTracker
from agentrl.trajectory import Trajectory, Turn


def derive_seed(*parts: int | str) -> int:
    """Derive a seed below 2^53 (exact in JSON) that depends on all parts and on their order.

    >>> derive_seed(0, 17, 3) == derive_seed(0, 17, 3), derive_seed(0, 17, 3) == derive_seed(0, 3, 17)
    (True, False)
    """
    digest = hashlib.blake2b("/".join(map(repr, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11


class TurnLog:
    """Log of an episode's turns, with its budget; its conversations share it, and it notifies the run's observer."""

    def __init__(
        self,
        trajectory: Trajectory,
        limits: EpisodeLimits,
        seed: int,
        waits: WaitTracker,
        counters: RolloutCounters,
        observer: RolloutObserver,
    ) -> None:
        self.trajectory = trajectory
        self.limits = limits
        self.waits = waits
        self.counters = counters
        self.budget = Budget(limits, waits.clock)
        self.state_key: str | None = None
        self.latest: Turn | None = None
        """Latest turn that trains."""
        self.acting: Turn | None = None
        """Turn whose actions and calls are carried out: the latest one, or the one that called a role."""
        self.is_over = False
        """True if the episode has ended; later answers are not recorded."""
        self._seed = seed
        self._observer = observer
        self._is_reported = True

    def begin_turn(self, *, is_counted: bool = True) -> int:
        """Report the latest turn, begin the next one, and return its sampling seed; may raise `EpisodeEnd`.

        Args:
            is_counted: The turn is the agent's, not that of a role of the environment.
        """
        index = self.budget.take_turn(is_counted=is_counted)
        self._report()
        return derive_seed(self._seed, index)

    def record(self, turn: Turn, *, prompt_tokens: int, answer_tokens: int, trained: bool = True) -> None:
        """Record a turn that was just sampled; if it is trained, it receives the following rewards and timings."""
        turn.state_key = self.state_key
        turn.timings.started = max(0.0, self.budget.elapsed_s - turn.timings.engine)
        self.acting = turn
        if trained:
            self._report()  # answers that are sampled concurrently are all reported
            self.latest, self._is_reported = turn, False
        else:
            self._observer.on_turn(self.trajectory, turn)
        counters = self.counters
        counters.turns += 1
        counters.prompt_tokens += prompt_tokens
        counters.answer_tokens += answer_tokens

    def require_latest(self) -> Turn:
        """Return the turn that an action belongs to; raise a `UsageError` if the policy has not answered yet."""
        turn = self.latest or self.acting
        if turn is None:
            raise UsageError("the agent loop acts before the policy has answered", hint="await generate() first")
        return turn

    def close(self) -> None:
        """End the episode: report its latest turn."""
        self._report()
        self.is_over = True

    def _report(self) -> None:
        """Report the latest turn to the observer as complete; until the next turn, actions still belong to it."""
        if self.latest is not None and not self._is_reported:
            self._observer.on_turn(self.trajectory, self.latest)
            self._is_reported = True

    def count_invalid(self) -> None:
        """Count an unusable answer and mark its turn as invalid; at the limit the episode ends."""
        self.counters.invalid_answers += 1
        self.add_metric("invalid_answers", 1)
        if self.acting is not None:
            self.acting.valid = False
        self.budget.count_invalid()

    def add_metric(self, name: str, value: float) -> None:
        """Add a value to one of the trajectory's metrics."""
        self.trajectory.metrics[name] = self.trajectory.metrics.get(name, 0.0) + value
