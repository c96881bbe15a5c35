"""A runner without episodes, and schedulers that are closed, for tests of groups."""

import asyncio

import pytest

from agentrl.errors import Outcome
from agentrl.rollout.events import RolloutCounters, RolloutObserver
from agentrl.rollout.scheduler import GroupScheduler
from agentrl.rollout.task_order import TaskSampler
from agentrl.rollout.waits import WaitTracker
from agentrl.task import SeedTasks
from agentrl.trajectory import TokenSequence, Trajectory, Turn, TurnTimings


class GroupEnds(RolloutObserver):
    """Keeps what became of each group, by its position."""

    def __init__(self):
        self.ends = {}

    def on_group_end(self, group_id, end, episodes):
        self.ends[int(group_id.partition("-")[0])] = (end, len(episodes))


class Player:
    """Plays episodes that are nothing but a decision; stands in for a runner.

    Args:
        decide: Gives the outcome and reward of an episode by (task id, member).
        pauses: Turns of the event loop that an episode takes, by (task id, member).
    """

    def __init__(self, decide=None, pauses=None):
        self.decide = decide or (lambda task_id, member: (Outcome.FINISHED, 1.0))
        self.pauses = pauses or (lambda task_id, member: 0)
        self.version = 0
        self.waits = WaitTracker()
        self.counters = RolloutCounters()
        self.observer = GroupEnds()
        self.running = self.most_running = 0
        self.seeds = {}
        self.blocked = None
        self.scores_groups = False
        self.scoring = None
        self.scored = []

    def can_play(self, task):
        return True

    async def score_group(self, trajectories, task):
        """Rank the members, if groups are scored; waits for `scoring`."""
        if not self.scores_groups:
            return
        if self.scoring is not None:
            await self.scoring.wait()
        found = [t for t in trajectories if t.outcome.is_trainable]
        self.scored.append((task.id, [t.id for t in found]))
        for place, trajectory in enumerate(found):
            trajectory.reward = float(place)

    async def run(self, task, *, group_id, member, seed, in_group=False):
        assert in_group == self.scores_groups
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.seeds[group_id, member] = seed
        version = self.version
        try:
            if self.blocked is not None:
                await self.blocked.wait()
            for _ in range(self.pauses(task.id, member)):
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        outcome, reward = self.decide(task.id, member)
        if isinstance(outcome, Exception):
            raise outcome
        trajectory = Trajectory(
            id=f"{group_id}/{member}.0", task_id=task.id, environment="w", seed=task.seed, group_id=group_id
        )
        sequence = TokenSequence()
        sequence.extend_sampled([1, 2], logprobs=[-1.0, -1.0], versions=[version, version + 1])
        sequence.turns.append(Turn(index=0, start=0, end=2, timings=TurnTimings(decode=2.0, tool=9.0)))
        trajectory.sequences.append(sequence)
        trajectory.outcome, trajectory.reward = outcome, reward
        return trajectory


@pytest.fixture
async def make():
    schedulers = []

    def build(player=None, *, group_size=2, batch=3, seed=0, size=1000, **options):
        tasks = TaskSampler({"": SeedTasks("w", size=size)}, seed=seed)
        scheduler = GroupScheduler(
            {"": player or Player()}, tasks, group_size=group_size, batch=batch, seed=seed, **options
        )
        schedulers.append(scheduler)
        return scheduler

    yield build
    for scheduler in schedulers:
        await scheduler.close()


def positions(groups):
    return [group.position for group in groups]
