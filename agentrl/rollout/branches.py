"""Groups of branching episodes (``agent.branch``): roots are played from the start, branches continue them.

    members 0 .. roots - 1 ─► played from the start
    the other members      ─► wait for their root, repeat its first turns, and sample the rest

Group size, tasks and seeds are those of ordinary groups. Each trajectory contains all of its turns, with the tokens,
log-probabilities and weight versions of the root in the shared turns. Staleness, recovery, filters and the trainer
therefore see ordinary episodes; only the estimator `agentrl.algorithms.tree_advantages.tree` reads
`Trajectory.branches_from`.

If a root ends before the branch point, its branches are full copies of it, without sampling, so that short roots have
the same weight as long ones. If a root failed, its branches are played from the start.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

from agentrl.config.environment import BranchConfig
from agentrl.rollout.events import RolloutCounters, RolloutObserver
from agentrl.rollout.groups import Group
from agentrl.rollout.journal_replay import SnapshotSupport
from agentrl.rollout.recorded_turns import EpisodeRecords, continue_from, repeatable_turns
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.waits import WaitKind, WaitTracker
from agentrl.task import Task
from agentrl.trajectory import Trajectory


def root_of(config: BranchConfig, member: int) -> int | None:
    """Return the member from which another one branches; ``None`` for a root."""
    return None if member < config.roots else (member - config.roots) % config.roots


def branch_turn(config: BranchConfig, member: int, root: Trajectory) -> int:
    """Return the number of turns that a member shares with its root, whose episode has ended."""
    point = (member - config.roots) // config.roots // config.children
    end = repeatable_turns(root)
    if config.every is not None:
        turn = (point + 1) * config.every
    elif config.turns is not None:
        turn = config.turns[point % len(config.turns)]
    else:
        candidates = [turn for turn in least_certain_turns(root) if turn < end]
        turn = candidates[point % len(candidates)] if candidates else end
    return min(turn, end)


def least_certain_turns(root: Trajectory) -> list[int]:
    """Return an episode's turns except the first, by decreasing mean of -log p over their tokens.

    The mean over many tokens estimates the policy's entropy.
    """
    found: dict[int, float] = {}
    for sequence in root.sequences:
        logprobs, mask = sequence.logprobs, sequence.loss_mask
        for turn in sequence.turns:
            own = logprobs[turn.start : turn.end][mask[turn.start : turn.end]]
            found[turn.index] = -float(own.mean()) if own.size else -math.inf
    order = [turn.index for turn in root.turns]
    places = sorted(range(1, len(order)), key=lambda place: -found[order[place]])
    return [place for place in places if found[order[place]] > -math.inf]


@dataclass(slots=True)
class _Branching:
    """State of a group whose episodes are being played."""

    pending: int = 0
    """Number of episodes of the group that have not ended."""
    roots: dict[int, asyncio.Future[Trajectory | None]] = field(default_factory=dict)
    """Ended roots by member; ``None`` for one that failed."""
    records: dict[int, EpisodeRecords] = field(default_factory=dict)
    """Records of the roots."""
    parents: dict[int, Trajectory | None] = field(default_factory=dict)
    """Roots of the branches that may start."""


class BranchRunner:
    """Runner of groups whose episodes branch.

    Args:
        runner: Plays the episodes.
        config: Number of roots, and the turns before which episodes branch.
    """

    def __init__(self, runner: EpisodeRunner, config: BranchConfig) -> None:
        self.waits: WaitTracker = runner.waits
        self.counters: RolloutCounters = runner.counters
        self.observer: RolloutObserver = runner.observer
        self._runner = runner
        self._config = config
        self._groups: dict[str, _Branching] = {}
        self._snapshots = SnapshotSupport()

    @property
    def scores_groups(self) -> bool:
        """True if the scorer compares the episodes of a group."""
        return self._runner.scores_groups

    def wait_to_start(self, group: Group, member: int) -> Awaitable[None] | None:
        """Return an awaitable to await before an episode starts: for a branch, the end of its root.

        Call it once per episode, before `run`.
        """
        branching = self._groups.setdefault(group.id, _Branching())
        branching.pending += 1
        root, ended = root_of(self._config, member), asyncio.get_running_loop().create_future()
        if root is None:
            branching.roots.setdefault(member, ended)
        elif root in group.members:
            branching.parents[member] = _usable(group.members[root])
        else:
            return self._wait_for_root(group, member, branching.roots.setdefault(root, ended))
        return None

    async def _wait_for_root(self, group: Group, member: int, root: asyncio.Future[Trajectory | None]) -> None:
        with self.waits.on(WaitKind.EXTRAS, f"{group.id}/{member}", "the episode that it branches from"):
            self._groups[group.id].parents[member] = await asyncio.shield(root)

    async def run(self, task: Task, *, group_id: str, member: int, seed: int, in_group: bool = False) -> Trajectory:
        """Play an episode from its start, or from a turn of its root; see `EpisodeRunner.run`."""
        branching = self._groups[group_id]
        try:
            if root_of(self._config, member) is None:
                return await self._play_root(
                    branching, task, group_id=group_id, member=member, seed=seed, in_group=in_group
                )
            runner = self._continuing_runner(branching, member)
            return await runner.run(task, group_id=group_id, member=member, seed=seed, in_group=in_group)
        finally:
            branching.pending -= 1
            if not branching.pending:
                self._groups.pop(group_id, None)

    async def _play_root(
        self, branching: _Branching, task: Task, *, group_id: str, member: int, seed: int, in_group: bool
    ) -> Trajectory:
        record = branching.records[member] = EpisodeRecords(self._snapshots)
        runner = continue_from(self._runner, None, 0, records=record)
        ended: Trajectory | None = None
        try:
            trajectory = await runner.run(task, group_id=group_id, member=member, seed=seed, in_group=in_group)
            ended = _usable(trajectory)
            return trajectory
        finally:
            if not branching.roots[member].done():
                branching.roots[member].set_result(ended)

    def _continuing_runner(self, branching: _Branching, member: int) -> EpisodeRunner:
        parent, root = branching.parents.pop(member), root_of(self._config, member)
        if parent is None or root is None:
            return self._runner
        turn = branch_turn(self._config, member, parent)
        return continue_from(self._runner, parent, turn, restores=branching.records.get(root))

    async def score_group(self, trajectories: Sequence[Trajectory], task: Task) -> None:
        """Score a group whose episodes have ended; see `EpisodeRunner.score_group`."""
        await self._runner.score_group(trajectories, task)


def _usable(root: Trajectory) -> Trajectory | None:
    """Return the root if it can be branched from; a root that cannot train is not stored for a resumed run."""
    return root if root.is_trainable else None


def branch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return metrics of the branches of a step; empty without branches.

    ``branch/share``: share of branches among the episodes; ``branch/turn``: mean number of turns that a branch shares
    with its root; ``branch/repeated``: share of branches that copy their whole root, because it ended early;
    ``branch/shared_tokens``: share of all sampled tokens that are repeated.
    """
    episodes = [trajectory for group in groups for trajectory in group.trainable]
    branches = [
        (trajectory, trajectory.branches_from) for trajectory in episodes if trajectory.branches_from is not None
    ]
    if not branches:
        return {}
    return {
        "branch/share": len(branches) / len(episodes),
        "branch/turn": math.fsum(point.turn for _, point in branches) / len(branches),
        "branch/repeated": sum(point.turn >= len(trajectory.turns) for trajectory, point in branches) / len(branches),
        "branch/shared_tokens": sum(one.repeated_tokens for one in episodes)
        / max(1, sum(one.sampled_tokens for one in episodes)),
    }
