"""Simulation of a run's rollouts in virtual time: the real scheduler with episodes that only sleep.

A simulated hour takes seconds, and shows what a staleness or a batch order would cost and drop:

    simulate(plan, steps=40, batch=16, group_size=4, max_staleness=2, train_s=2.0).steps_per_hour

The engine answers every request in the planned time, at any load; a plan from measured episodes therefore assumes the
load under which they were measured. Failures and retries are not simulated.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentrl.config.rollout import BatchOrder
from agentrl.errors import Outcome
from agentrl.rollout.events import RolloutCounters, RolloutObserver
from agentrl.rollout.groups import Group
from agentrl.rollout.scheduler import GroupScheduler
from agentrl.rollout.task_order import TaskSampler
from agentrl.rollout.waits import WaitKind, WaitTracker
from agentrl.task import SeedTasks, Task
from agentrl.trajectory import TokenSequence, Trajectory, Turn


class _TimeSkippingSelector(selectors.SelectSelector):
    """Selector that advances a clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; if nothing is, advance the clock by `timeout`."""
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock: all tasks wait and no timer is pending")
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock advances to the next timer whenever no callback is ready."""

    def __init__(self) -> None:
        self._clock = _TimeSkippingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._clock.now


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEpisode:
    """Durations of an episode's turns, and its result.

    Example: two turns, of which the second has a step of a minute: ``engine_s=(1.5, 2.0), outside_s=(0.1, 60.0)``.
    """

    engine_s: Sequence[float]
    """Seconds of the engine in each turn."""
    outside_s: Sequence[float]
    """Seconds of the environment, tools and scorer in each turn."""
    reward: float = 0.0
    success: bool | None = None


EpisodePlan: TypeAlias = Callable[[Task, int], PlannedEpisode]
"""Plan of an episode, by its task and the number of the member."""


class SimulatedRunner:
    """Runner whose episodes wait for the planned times and sample two tokens in each turn."""

    scores_groups = False

    def __init__(self, plan: EpisodePlan, clock: Callable[[], float]) -> None:
        self.waits = WaitTracker(clock)
        self.counters = RolloutCounters()
        self.observer = RolloutObserver()
        self.version = 0
        """Version of the engine's weights."""
        self.engine_busy_s = 0.0
        """Seconds in which the engine had a request."""
        self._plan = plan
        self._requests = 0
        self._busy_since = 0.0

    async def run(self, task: Task, *, group_id: str, member: int, seed: int, in_group: bool = False) -> Trajectory:
        """Play the planned episode."""
        planned, began = self._plan(task, member), self.waits.clock()
        trajectory = Trajectory(
            id=f"{group_id}/{member}.0", task_id=task.id, environment=task.environment, seed=seed, group_id=group_id
        )
        sequence = TokenSequence()
        trajectory.sequences.append(sequence)
        for index, (engine_s, outside_s) in enumerate(zip(planned.engine_s, planned.outside_s, strict=True)):
            await self._answer(sequence, trajectory.id, engine_s)
            sequence.turns.append(Turn(index=index, start=2 * index, end=2 * index + 2))
            with self.waits.on(WaitKind.ENVIRONMENT, trajectory.id, "a step"):
                await asyncio.sleep(outside_s)
        trajectory.outcome = Outcome.FINISHED
        trajectory.reward, trajectory.success = planned.reward, planned.success
        trajectory.metrics["seconds"] = self.waits.clock() - began
        return trajectory

    async def _answer(self, sequence: TokenSequence, who: str, seconds: float) -> None:
        first = self.version
        if not self._requests:
            self._busy_since = self.waits.clock()
        self._requests += 1
        with self.waits.on(WaitKind.ENGINE, who, "an answer"):
            await asyncio.sleep(seconds)
        self._requests -= 1
        if not self._requests:
            self.engine_busy_s += self.waits.clock() - self._busy_since
        sequence.extend_sampled([0, 0], logprobs=[0.0, 0.0], versions=[first, self.version])

    async def score_group(self, trajectories: Sequence[Trajectory], task: Task) -> None:
        """Do nothing: the plan contains the rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """Result of a simulation."""

    seconds: float
    """Virtual seconds of all steps."""
    steps: int
    engine_idle: float
    """Share of the time in which the engine had no request."""
    requests: float
    """Mean number of the engine's concurrent requests."""
    trainer_idle: float
    """Share of the time in which the trainer waited for episodes."""
    groups: Sequence[Group]
    """Groups that were trained, in order."""
    dropped: int
    """Number of groups that were too stale."""
    bias: Mapping[str, float]
    """Metrics of `agentrl.rollout.group_metrics.BiasMeter`."""

    @property
    def steps_per_hour(self) -> float:
        """Training steps in an hour."""
        return 3600 * self.steps / self.seconds


def simulate(
    plan: EpisodePlan,
    *,
    steps: int,
    batch: int,
    group_size: int,
    max_staleness: int,
    batch_order: BatchOrder = "windowed",
    max_concurrent: int = 10**6,
    train_s: float = 0.0,
    sync_s: float = 0.0,
    tasks: int = 10**6,
) -> SimulatedRun:
    """Simulate a run from its first step; the calling thread must not have a running event loop.

    A trainer step takes `train_s` seconds, and a weight sync, during which the engine answers, `sync_s`.
    """

    async def run() -> SimulatedRun:
        clock = asyncio.get_running_loop().time
        runner = SimulatedRunner(plan, clock)
        scheduler = GroupScheduler(
            {"": runner},
            TaskSampler({"": SeedTasks("simulation", size=tasks)}, seed=0),
            group_size=group_size,
            batch=batch,
            max_staleness=max_staleness,
            batch_order=batch_order,
            max_concurrent=max_concurrent,
        )
        groups = list[Group]()
        for version in range(1, steps + 1):
            groups += await scheduler.next_batch()
            await asyncio.sleep(train_s + sync_s)
            runner.version = version
            scheduler.set_version(version)
            if max_staleness:
                scheduler.start_episodes()
        seconds = clock()
        await scheduler.close()
        return SimulatedRun(
            seconds=seconds,
            steps=steps,
            engine_idle=1 - runner.engine_busy_s / seconds,
            requests=runner.waits.seconds[WaitKind.ENGINE] / seconds,
            trainer_idle=1 - steps * (train_s + sync_s) / seconds,
            groups=groups,
            dropped=runner.counters.groups_stale,
            bias=scheduler.bias.metrics(),
        )

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as loop:
        return loop.run(run())
