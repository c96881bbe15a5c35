"""An expert that has played already: its episodes are members of the groups of the same tasks."""

from __future__ import annotations

from collections.abc import Iterable

from agentrl.task import Task
from agentrl.trajectory import NOT_SAMPLED, Source, Trajectory


class StoredExpert:
    """Shows the best episode of a task, the second best, and so on; one number of these for each such expert.

    Args:
        trajectories: Of one environment, in the policy's tokens; those without a valid end or a reward are left out.
        place: 0 for the best.
    """

    def __init__(self, trajectories: Iterable[Trajectory], *, place: int) -> None:
        self._place = place
        self._episodes: dict[tuple[str, int], list[Trajectory]] = {}
        for trajectory in trajectories:
            if trajectory.outcome is not None and trajectory.outcome.is_trainable and trajectory.reward is not None:
                self._episodes.setdefault((trajectory.task_id, trajectory.seed), []).append(trajectory)
        for episodes in self._episodes.values():
            episodes.sort(key=lambda trajectory: -(trajectory.reward or 0.0))

    def plays(self, task: Task) -> bool:
        """Whether there is an episode of this task and seed."""
        return len(self._episodes.get((task.id, task.seed), ())) > self._place

    async def run(self, task: Task, *, group_id: str, member: int, seed: int) -> Trajectory:
        """That episode as a member of a group; what somebody sampled is forced here."""
        return demonstrated(
            self._episodes[task.id, task.seed][self._place], id=f"{group_id}/{member}.0", group=group_id
        )


def demonstrated(trajectory: Trajectory, *, id: str, group: str) -> Trajectory:
    """An episode as somebody else's, who wrote what the policy of that time sampled.

    Args:
        trajectory: Is left as it is.
        id: Of the new one.
        group: Its group's id.
    """
    record = trajectory.to_record()
    for row in record["sequences"]:
        row["sources"] = [Source.FORCED if source == Source.SAMPLED else source for source in row["sources"]]
        row["logprobs"] = [None] * len(row["logprobs"])
        row["versions"] = [NOT_SAMPLED] * len(row["versions"])
    other = Trajectory.from_record(record)
    other.id, other.group_id = id, group
    return other
