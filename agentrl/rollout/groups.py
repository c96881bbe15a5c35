"""Groups of episodes: a group has one task, and the returns of its episodes are compared. Metrics of groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.observe.metrics import ENVIRONMENT_PREFIX
from agentrl.observe.trajectory_record import trajectory_from_record, trajectory_record
from agentrl.rollout.curriculum import GroupOutcome
from agentrl.rollout.task_order import SampledTask
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
        """Id of the group, unique in the run."""
        return "-".join(filter(None, (str(self.position), self.draw.environment, self.task.id)))

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
            task_id=self.task.id,
            task_type=self.task.type,
            horizon=self.draw.horizon,
            episodes=len(self.trainable),
            tries=len(known),
            successes=sum(known),
        )

    def to_record(self) -> dict[str, Any]:
        """Return the group in plain JSON types; `from_record` needs its task, which the sampler finds by its place."""
        return {
            "position": self.position,
            "environment": self.draw.environment,
            "place": self.draw.place,
            "horizon": self.draw.horizon,
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


HORIZON = "curriculum/turns"
"""Metric name: maximum number of turns that the horizon allowed in the step."""


def environment_metrics(groups: Sequence[Group], *, has_signal: Callable[[Group], bool]) -> dict[str, float]:
    """Return success, reward, turns, tokens and horizon by environment; only the horizon if there is one environment.

    `has_signal` returns True if the advantage estimator can distinguish the episodes of a group.
    """
    labels = dict.fromkeys(group.draw.environment for group in groups)
    by_label = {label: [group for group in groups if group.draw.environment == label] for label in labels}
    tokens = sum(_tokens(found) for found in by_label.values())
    metrics = _horizon(HORIZON, groups)
    for label, found in sorted(by_label.items()):
        if label:
            metrics |= _metrics_of_one(f"{ENVIRONMENT_PREFIX}{label}", found, tokens, has_signal)
    return metrics


def extra_rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return success and reward of extra rollouts under ``greedy/`` and ``expert/``."""
    greedy = [group.extra_rollouts[GREEDY] for group in groups if GREEDY in group.extra_rollouts]
    experts = [trajectory for group in groups for trajectory in group.experts]
    return {**_scores(GREEDY, greedy), **_scores(EXPERT, experts)}


def _scores(name: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    return {
        **_mean(f"{name}/success", [float(t.success) for t in trajectories if t.success is not None]),
        **_mean(f"{name}/reward", [t.reward for t in trajectories if t.reward is not None]),
    }


def _metrics_of_one(
    name: str, groups: Sequence[Group], tokens: int, has_signal: Callable[[Group], bool]
) -> dict[str, float]:
    trained = _trainable(groups)
    return {
        f"{name}/groups": float(len(groups)),
        f"{name}/zero_variance": float(sum(not has_signal(group) for group in groups)),
        **_scores(name, trained),
        **_mean(f"{name}/turns", [float(len(t.turns)) for t in trained]),
        **_mean(f"{name}/tokens", [float(t.sampled_tokens) for t in trained]),
        f"{name}/token_share": _tokens(groups) / tokens if tokens else 0.0,
        **_horizon(f"{name}/horizon", groups),
    }


def _trainable(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trainable]


def _tokens(groups: Sequence[Group]) -> int:
    return sum(trajectory.sampled_tokens for trajectory in _trainable(groups))


def _horizon(name: str, groups: Sequence[Group]) -> dict[str, float]:
    turns = [group.draw.horizon for group in groups if group.draw.horizon is not None]
    return {name: float(max(turns))} if turns else {}


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: math.fsum(values) / len(values)} if values else {}
