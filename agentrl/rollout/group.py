"""Groups: episodes of one task, whose returns are compared with each other, and the metrics of a step's groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.observe.metrics import ENVIRONMENT_PREFIX
from agentrl.reward import rewards_differ
from agentrl.rollout.curriculum import GroupOutcome
from agentrl.rollout.task_order import SampledTask
from agentrl.task import Task
from agentrl.trajectory import Trajectory

GREEDY, EXPERT = "greedy", "expert"
"""Names of extra rollouts: the policy at temperature 0, and experts (``expert-0``, …)."""


@dataclass(slots=True, kw_only=True)
class Group:
    """The episodes of one task, complete or still running."""

    position: int
    """Of the group among all groups of the run."""
    draw: SampledTask
    """The task, and where it comes from."""
    size: int
    members: dict[int, Trajectory] = field(default_factory=dict)
    """Finished episodes by member number."""
    extra_names: tuple[str, ...] = ()
    """Names of the extra rollouts of its task: the greedy policy's, and experts'."""
    extra_rollouts: dict[str, Trajectory] = field(default_factory=dict)
    """Finished extra rollouts by name; they are not members, and count in no statistics of the policy."""

    @property
    def task(self) -> Task:
        """Task of all its episodes."""
        return self.draw.task

    @property
    def id(self) -> str:
        """Unique in the run."""
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
        """Names of extra rollouts that infrastructure failed, or that have no reward."""
        return [name for name, trajectory in self.extra_rollouts.items() if not _is_trainable(trajectory)]

    @property
    def experts(self) -> list[Trajectory]:
        """The episodes of experts."""
        return [self.extra_rollouts[name] for name in sorted(self.extra_rollouts) if name.startswith(EXPERT)]

    @property
    def trajectories(self) -> list[Trajectory]:
        """The finished episodes in member order, failed ones included."""
        return [self.members[member] for member in sorted(self.members)]

    @property
    def trainable(self) -> list[Trajectory]:
        """Episodes that can be trained on: not failed by infrastructure, and scored."""
        return [trajectory for trajectory in self.trajectories if _is_trainable(trajectory)]

    @property
    def returns_differ(self) -> bool:
        """True if some trainable episodes did better than others; if not, comparing them teaches nothing."""
        members = (*self.trainable, *self.experts)
        return rewards_differ([trajectory.reward for trajectory in members if trajectory.reward is not None])

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that sampled a token of the group; ``None`` when nothing was sampled."""
        versions = [v for trajectory in self.trainable if (v := trajectory.oldest_version) is not None]
        return min(versions, default=None)

    def outcome(self) -> GroupOutcome:
        """Count how often it solved its task so far."""
        told = [trajectory.success for trajectory in self.trainable if trajectory.success is not None]
        return GroupOutcome(
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
        """Return the group as plain JSON types; its task is found again by where it comes from."""
        return {
            "position": self.position,
            "environment": self.draw.environment,
            "place": self.draw.place,
            "horizon": self.draw.horizon,
            "members": [[member, trajectory.to_record()] for member, trajectory in sorted(self.members.items())],
            "beside": {name: trajectory.to_record() for name, trajectory in self.extra_rollouts.items()},
        }

    @classmethod
    def from_record(
        cls, record: Mapping[str, Any], *, draw: SampledTask, size: int, extra_names: tuple[str, ...] = ()
    ) -> Group:
        """Restore what `to_record` gave; extra rollouts that it lacks are played later."""
        members = {int(member): Trajectory.from_record(row) for member, row in record["members"]}
        return cls(
            position=record["position"],
            draw=draw,
            size=size,
            members=members,
            extra_names=extra_names,
            extra_rollouts={name: Trajectory.from_record(row) for name, row in record.get("beside", {}).items()},
        )


def _is_trainable(trajectory: Trajectory) -> bool:
    return trajectory.outcome is not None and trajectory.outcome.is_trainable and trajectory.reward is not None


HORIZON = "curriculum/turns"
"""The most turns that an episode of the step could have, where a horizon grows."""


def environment_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return success, reward, turns, tokens and horizon of each environment of several; of one the horizon alone."""
    labels = dict.fromkeys(group.draw.environment for group in groups)
    by_label = {label: [group for group in groups if group.draw.environment == label] for label in labels}
    tokens = sum(_tokens(found) for found in by_label.values())
    metrics = _horizon(HORIZON, groups)
    for label, found in sorted(by_label.items()):
        if label:
            metrics |= _of_one(f"{ENVIRONMENT_PREFIX}{label}", found, tokens)
    return metrics


def extra_rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return success and reward of extra rollouts under ``greedy/`` and ``expert/``."""
    greedy = [group.extra_rollouts[GREEDY] for group in groups if GREEDY in group.extra_rollouts]
    experts = [trajectory for group in groups for trajectory in group.experts]
    return {**_played(GREEDY, greedy), **_played(EXPERT, experts)}


def _played(name: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    return {
        **_mean(f"{name}/success", [float(t.success) for t in trajectories if t.success is not None]),
        **_mean(f"{name}/reward", [t.reward for t in trajectories if t.reward is not None]),
    }


def _of_one(name: str, groups: Sequence[Group], tokens: int) -> dict[str, float]:
    trained = _trained(groups)
    return {
        f"{name}/groups": float(len(groups)),
        f"{name}/zero_variance": sum(not group.returns_differ for group in groups) / len(groups),
        **_played(name, trained),
        **_mean(f"{name}/turns", [float(len(t.turns)) for t in trained]),
        **_mean(f"{name}/tokens", [float(t.sampled_tokens) for t in trained]),
        f"{name}/token_share": _tokens(groups) / tokens if tokens else 0.0,
        **_horizon(f"{name}/horizon", groups),
    }


def _trained(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trainable]


def _tokens(groups: Sequence[Group]) -> int:
    return sum(trajectory.sampled_tokens for trajectory in _trained(groups))


def _horizon(name: str, groups: Sequence[Group]) -> dict[str, float]:
    turns = [group.draw.horizon for group in groups if group.draw.horizon is not None]
    return {name: float(max(turns))} if turns else {}


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: math.fsum(values) / len(values)} if values else {}
