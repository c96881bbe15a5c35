"""A group: episodes of one task, whose returns are compared with each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.task import Task
from agentrl.trajectory import Trajectory


@dataclass(slots=True, kw_only=True)
class Group:
    """The episodes of one task, complete or still running."""

    position: int
    """Place of the task in the run's endless task order."""
    task: Task
    size: int
    members: dict[int, Trajectory] = field(default_factory=dict)
    """Finished episodes by member number."""

    @property
    def id(self) -> str:
        """Unique in the run."""
        return f"{self.position}-{self.task.id}"

    @property
    def is_complete(self) -> bool:
        """Whether all episodes have ended."""
        return len(self.members) == self.size

    @property
    def trajectories(self) -> list[Trajectory]:
        """The finished episodes in member order, failed ones included."""
        return [self.members[member] for member in sorted(self.members)]

    @property
    def trainable(self) -> list[Trajectory]:
        """Those that say something about the policy: not failed by the machinery, and scored."""
        return [
            trajectory
            for trajectory in self.trajectories
            if trajectory.outcome is not None and trajectory.outcome.is_trainable and trajectory.reward is not None
        ]

    @property
    def returns_differ(self) -> bool:
        """Whether some trainable episodes did better than others; if not, comparing them teaches nothing."""
        return len({trajectory.reward for trajectory in self.trainable}) > 1

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that sampled a token of the group; ``None`` when nothing was sampled."""
        versions = [v for trajectory in self.trainable if (v := trajectory.oldest_version) is not None]
        return min(versions, default=None)

    def to_record(self) -> dict[str, Any]:
        """The group as plain JSON types; the task is found again by its position."""
        members = [[member, trajectory.to_record()] for member, trajectory in sorted(self.members.items())]
        return {"position": self.position, "members": members}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], *, task: Task, size: int) -> Group:
        """Restore what `to_record` gave."""
        members = {int(member): Trajectory.from_record(row) for member, row in record["members"]}
        return cls(position=record["position"], task=task, size=size, members=members)
