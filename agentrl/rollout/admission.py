"""When a group of episodes may start: the staleness rule, as a state machine of counts.

A group starts only while

    running + waiting + used < (max_staleness + version + 1) x batch

where *running* groups have episodes in flight, *waiting* ones are finished and not yet trained on, *used* ones have
been trained on, *version* is that of the trainer's weights and *batch* is the number of groups in a training step.
With `max_staleness` 0 exactly one batch starts per version: synchronous training.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Admission:
    """Counts groups through their lives: running, waiting, used; or gone without having been used."""

    batch: int
    max_staleness: int
    version: int = 0
    running: int = 0
    waiting: int = 0
    used: int = 0

    @property
    def limit(self) -> int:
        """Most groups that may have started by now and not be gone."""
        return (self.max_staleness + self.version + 1) * self.batch

    def may_start(self) -> bool:
        """Whether one more group may start."""
        return self.running + self.waiting + self.used < self.limit

    def start(self) -> None:
        """A group starts."""
        self.running += 1

    def finish(self) -> None:
        """A running group is complete and waits for the trainer."""
        self.running -= 1
        self.waiting += 1

    def fail(self) -> None:
        """A running group is complete and cannot be used; another may start in its place."""
        self.running -= 1

    def use(self, groups: int) -> None:
        """Waiting groups are handed to the trainer."""
        self.waiting -= groups
        self.used += groups

    def drop(self) -> None:
        """A waiting group is thrown away; another may start in its place."""
        self.waiting -= 1
