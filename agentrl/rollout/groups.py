"""Groups of episodes: several episodes of one task, whose returns are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import Outcome
from agentrl.observe.trajectory_record import trajectory_from_record, trajectory_record
from agentrl.rollout.curriculum import GroupOutcome
from agentrl.rollout.task_order import SampledTask, task_record
from agentrl.task import Task
from agentrl.trajectory import Trajectory

GREEDY, EXPERT = "greedy", "expert"
"""Names of extra rollouts: the policy at temperature 0, and experts (with numbers: ``expert-0``, …)."""


@dataclass(slots=True, kw_only=True)
class Group:
    """Group of the episodes of one task, complete or still running."""

    position: int
    draw: SampledTask
    size: int
    start_version: int = 0
    """Version of the weights when the group was started; all its tokens are of this version or newer ones."""
    members: dict[int, Trajectory] = field(default_factory=dict)
    """Finished episodes by member number."""
    is_scored: bool = False
    """True if the run scored all members before it was killed."""
    extra_names: tuple[str, ...] = ()
    extra_rollouts: dict[str, Trajectory] = field(default_factory=dict)
    """Finished extra rollouts by name; they are not members and not part of the policy's statistics."""

    @property
    def task(self) -> Task:
        """Task of all episodes."""
        return self.draw.task

    @property
    def id(self) -> str:
        """Id of the group, unique in the run; a resumed run may draw the task of a position in another stage."""
        return "-".join(filter(None, (str(self.position), self.draw.settings, self.task.id)))

    @property
    def is_complete(self) -> bool:
        """True if all episodes have ended."""
        return len(self.members) == self.size and not self.missing_extras

    @property
    def missing_extras(self) -> list[str]:
        """Names of extra rollouts that have not ended."""
        return [name for name in self.extra_names if name not in self.extra_rollouts]

    @property
    def failed_extras(self) -> list[str]:
        """Names of extra rollouts that have an infrastructure failure or no reward."""
        return [name for name, trajectory in self.extra_rollouts.items() if not trajectory.is_trainable]

    @property
    def experts(self) -> list[Trajectory]:
        """Episodes of experts, in the order of their names."""
        return [self.extra_rollouts[name] for name in sorted(self.extra_rollouts) if name.startswith(EXPERT)]

    @property
    def trajectories(self) -> list[Trajectory]:
        """Finished episodes in member order, including failed ones."""
        return [self.members[member] for member in sorted(self.members)]

    @property
    def trainable(self) -> list[Trajectory]:
        """Episodes that can be trained on: scored, and without an infrastructure failure."""
        return [trajectory for trajectory in self.trajectories if trajectory.is_trainable]

    @property
    def engine_s(self) -> float:
        """Seconds in which the engine answered in the trainable episodes."""
        return math.fsum(trajectory.engine_s for trajectory in self.trainable)

    def staleness(self, version: int, adapters: Mapping[str, int]) -> int | None:
        """Return how many versions the group's oldest token is behind; versions are counted per adapter."""
        ages = [age for trajectory in self.trainable if (age := trajectory.staleness(version, adapters)) is not None]
        return max(ages, default=None)

    def outcome(self) -> GroupOutcome:
        """Count the successes of the group's episodes."""
        known = [trajectory.success for trajectory in self.trainable if trajectory.success is not None]
        return GroupOutcome(
            position=self.position,
            environment=self.draw.environment,
            order=self.draw.order,
            task_id=self.task.id,
            task_type=self.task.type,
            horizon=self.draw.horizon,
            episodes=len(self.trainable),
            tries=len(known),
            successes=sum(known),
            finished=sum(trajectory.outcome is Outcome.FINISHED for trajectory in self.trainable),
            proposals=[proposal for trajectory in self.trainable for proposal in trajectory.proposals],
        )

    def to_record(self) -> dict[str, Any]:
        """Return the group in plain JSON types.

        `from_record` needs its task, which the sampler finds by its place; a task of a `ProposedTasks` is stored.
        """
        return {
            "position": self.position,
            "environment": self.draw.environment,
            "place": self.draw.place,
            "horizon": self.draw.horizon,
            "stage": self.draw.stage,
            **({"task": task_record(self.task)} if self.draw.is_proposed else {}),
            "start_version": self.start_version,
            "members": [[member, trajectory_record(trajectory)] for member, trajectory in sorted(self.members.items())],
            "beside": {name: trajectory_record(trajectory) for name, trajectory in self.extra_rollouts.items()},
        }

    @classmethod
    def from_record(
        cls, record: Mapping[str, Any], *, draw: SampledTask, size: int, extra_names: tuple[str, ...] = ()
    ) -> Group:
        """Restore a group from `to_record`; missing extra rollouts are played later."""
        members = {int(member): trajectory_from_record(row) for member, row in record["members"]}
        return cls(
            position=record["position"],
            draw=draw,
            size=size,
            start_version=record["start_version"],
            members=members,
            extra_names=extra_names,
            extra_rollouts={name: trajectory_from_record(row) for name, row in record["beside"].items()},
        )
