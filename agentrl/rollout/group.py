"""A group: episodes of one task, whose returns are compared with each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.curriculum.mixture import Draw
from agentrl.curriculum.tally import Tally
from agentrl.reward import rewards_differ
from agentrl.task import Task
from agentrl.trajectory import Trajectory

GREEDY, EXPERT = "greedy", "expert"
"""Who may play beside the members: the policy at temperature 0, and experts (``expert-0``, …)."""


@dataclass(slots=True, kw_only=True)
class Group:
    """The episodes of one task, complete or still running."""

    position: int
    """Of the group among all groups of the run."""
    draw: Draw
    """The task, and where it comes from."""
    size: int
    members: dict[int, Trajectory] = field(default_factory=dict)
    """Finished episodes by member number."""
    companions: tuple[str, ...] = ()
    """Who plays the task beside the members, by name."""
    beside: dict[str, Trajectory] = field(default_factory=dict)
    """Their finished episodes, which count in nothing that is said of the policy."""

    @property
    def task(self) -> Task:
        """What all its episodes are about."""
        return self.draw.task

    @property
    def id(self) -> str:
        """Unique in the run."""
        return "-".join(filter(None, (str(self.position), self.draw.environment, self.task.id)))

    @property
    def is_complete(self) -> bool:
        """Whether all episodes have ended."""
        return len(self.members) == self.size and not self.absent

    @property
    def absent(self) -> list[str]:
        """Companions whose episodes have not ended."""
        return [name for name in self.companions if name not in self.beside]

    @property
    def unguided(self) -> list[str]:
        """Companions whose episodes the machinery failed, or nobody could score."""
        return [name for name, trajectory in self.beside.items() if not _is_trainable(trajectory)]

    @property
    def experts(self) -> list[Trajectory]:
        """The episodes of experts."""
        return [self.beside[name] for name in sorted(self.beside) if name.startswith(EXPERT)]

    @property
    def trajectories(self) -> list[Trajectory]:
        """The finished episodes in member order, failed ones included."""
        return [self.members[member] for member in sorted(self.members)]

    @property
    def trainable(self) -> list[Trajectory]:
        """Those that say something about the policy: not failed by the machinery, and scored."""
        return [trajectory for trajectory in self.trajectories if _is_trainable(trajectory)]

    @property
    def returns_differ(self) -> bool:
        """Whether some trainable episodes did better than others; if not, comparing them teaches nothing."""
        members = (*self.trainable, *self.experts)
        return rewards_differ([trajectory.reward for trajectory in members if trajectory.reward is not None])

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that sampled a token of the group; ``None`` when nothing was sampled."""
        versions = [v for trajectory in self.trainable if (v := trajectory.oldest_version) is not None]
        return min(versions, default=None)

    def tally(self) -> Tally:
        """How often it solved its task, so far."""
        told = [trajectory.success for trajectory in self.trainable if trajectory.success is not None]
        return Tally(
            position=self.position,
            environment=self.draw.environment,
            task_id=self.task.id,
            task_type=self.task.type,
            horizon=self.draw.horizon,
            episodes=len(self.trainable),
            tries=len(told),
            successes=sum(told),
        )

    def to_record(self) -> dict[str, Any]:
        """The group as plain JSON types; its task is found again by where it comes from."""
        return {
            "position": self.position,
            "environment": self.draw.environment,
            "place": self.draw.place,
            "horizon": self.draw.horizon,
            "members": [[member, trajectory.to_record()] for member, trajectory in sorted(self.members.items())],
            "beside": {name: trajectory.to_record() for name, trajectory in self.beside.items()},
        }

    @classmethod
    def from_record(
        cls, record: Mapping[str, Any], *, draw: Draw, size: int, companions: tuple[str, ...] = ()
    ) -> Group:
        """Restore what `to_record` gave; who has not played yet will."""
        members = {int(member): Trajectory.from_record(row) for member, row in record["members"]}
        return cls(
            position=record["position"],
            draw=draw,
            size=size,
            members=members,
            companions=companions,
            beside={name: Trajectory.from_record(row) for name, row in record.get("beside", {}).items()},
        )


def _is_trainable(trajectory: Trajectory) -> bool:
    return trajectory.outcome is not None and trajectory.outcome.is_trainable and trajectory.reward is not None
