"""Keeps episodes running and hands complete groups to the trainer.

    task sampler ─► admission ──► one asyncio task per episode ──► complete groups ──► next_batch() ──► trainer
                     (staleness,    no lockstep, no barrier:        filtered,                             │
                      capacity)     groups end in any order         too stale dropped                     │
                        ▲                                                                                 │
                        └──────────────────────── set_version(v + 1) ◄────────────────────────────────────┘

A group is of one environment, and is played by that environment's runner. What groups say about their tasks is handed
to the task sampler when a batch is complete, all at once and in the order of groups.

With `max_staleness` 0 a batch is exactly the groups that were started for it, and comes sorted by task order and
member, so nothing depends on which episode was faster. Sampling seeds follow from the run's seed and the group's
position.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from agentrl.errors import AgentRLError, EnvironmentFailure, Outcome, TrainingError, UsageError, boundary
from agentrl.rollout.curriculum import GroupOutcome
from agentrl.rollout.group import Group
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.scripted_policies import StoredExpert
from agentrl.rollout.task_order import SampledTask, TaskSampler
from agentrl.rollout.turns import derive_seed
from agentrl.rollout.waits import WaitKind

MAX_WASTED_BATCHES = 20
"""Batches' worth of groups that may be filtered out, or dropped as too stale, in a row before the run gives up."""

LEAST_FAILED_GROUPS = 4
"""Groups that must fail in a row before the run gives up, however small its batches."""


class GroupScheduler:
    """Runs groups of episodes ahead of the trainer, as far as staleness and capacity allow.

    Args:
        runners: Play episodes, by the label of their environment; they share their waits and counters.
        tasks: Task order; owned by the scheduler from now on.
        group_size: Episodes per task.
        batch: Groups per training step.
        max_staleness: Maximum number of versions between sampling and training.
        max_concurrent: Maximum number of episodes in flight.
        seed: The run's seed.
        version: Version of the trainer's weights.
        keep: Decides whether a complete group is worth training on (dynamic sampling); others are replaced.
        least_members: Trainable episodes without which a complete group counts as failed: 2 where they are compared.
        extra_runners: Play the extra rollouts of each group, by the label of the environment and their name. A group
            fails with any of them.
    """

    def __init__(
        self,
        runners: Mapping[str, EpisodeRunner],
        tasks: TaskSampler,
        *,
        group_size: int,
        batch: int,
        max_staleness: int = 0,
        max_concurrent: int = 128,
        seed: int = 0,
        version: int = 0,
        keep: Callable[[Group], bool] | None = None,
        least_members: int = 1,
        extra_runners: Mapping[str, Mapping[str, EpisodeRunner | StoredExpert]] | None = None,
    ) -> None:
        self.tasks = tasks
        self.runners = runners
        shared = next(iter(runners.values()))
        self._waits, self._counters = shared.waits, shared.counters
        self.group_size = group_size
        self.max_concurrent = max_concurrent
        self.batch = batch
        self.max_staleness = max_staleness
        self.version = version
        self.used = 0
        """Groups that batches have taken."""
        self._seed = seed
        self._keep = keep or (lambda group: True)
        self._least_members = least_members
        self._extra_runners = extra_runners or {}
        self._places = asyncio.Semaphore(max_concurrent)
        self._unfinished = 0
        self._to_restart: deque[Group] = deque()
        self._running: dict[int, Group] = {}
        self._finished: list[Group] = []
        self._outcomes: list[GroupOutcome] = []
        self._episodes: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._failed_in_a_row = 0
        self._filtered_in_a_row = 0
        self._stale_in_a_row = 0
        self._closed = False
        self._changed = asyncio.Event()

    async def next_batch(self) -> list[Group]:
        """Return the next complete groups to train on, in task order; meanwhile start new episodes.

        Raises:
            UsageError: an episode hit an error that the user must fix.
            TrainingError: too many groups in a row failed (a batch, at least `LEAST_FAILED_GROUPS`), or were not worth
                training on or too stale (`MAX_WASTED_BATCHES` batches).
        """
        batch = self.batch
        with self._waits.on(WaitKind.GROUPS, "trainer", f"{batch} complete groups"):
            while True:
                self._changed.clear()
                self._drop_stale()
                self.start_episodes()
                if self._failure is not None:
                    raise self._failure
                if len(self._finished) >= batch:
                    break
                await self._changed.wait()
        taken, self._finished = self._finished[:batch], self._finished[batch:]
        self.used += batch
        self._counters.groups_delivered += batch
        outcomes, self._outcomes = self._outcomes, []
        self.tasks.learn(sorted(outcomes, key=lambda outcome: outcome.position))
        return sorted(taken, key=lambda group: group.position)

    def set_version(self, version: int) -> None:
        """The trainer has new weights, and the engine serves them: more may start. Call `start_episodes` to do so."""
        self.version = version

    def start_episodes(self) -> None:
        """Start as many groups as staleness and capacity allow; `next_batch` does so, too."""
        if self._closed or self._failure is not None:
            return
        while self._unfinished < self.max_concurrent and self._may_start():
            group = self._to_restart.popleft() if self._to_restart else self._next_group()
            self._running[group.position] = group
            for member in range(group.size):
                if member not in group.members:
                    self._start_episode(group, member)
            for name in group.missing_extras:
                self._start_episode(group, name)

    def _may_start(self) -> bool:
        """Apply the staleness rule; a group that failed or was dropped leaves its place to another."""
        started = len(self._running) + len(self._finished) + self.used
        return started < (self.max_staleness + self.version + 1) * self.batch

    def _next_group(self) -> Group:
        position = self.tasks.position
        with boundary(EnvironmentFailure, f"task {position} of the run"):
            draw = self.tasks.next()
        return Group(position=position, draw=draw, size=self.group_size, extra_names=self._extra_names(draw))

    def _extra_names(self, draw: SampledTask) -> tuple[str, ...]:
        """Return the names of a task's extra rollouts; stored experts do not have every task."""
        players = self._extra_runners.get(draw.environment, {})
        return tuple(name for name, player in players.items() if player.plays(draw.task))

    def _start_episode(self, group: Group, player: int | str) -> None:
        self._unfinished += 1
        episode = asyncio.create_task(self._play(group, player), name=f"episode {group.id}/{player}")
        self._episodes.add(episode)
        episode.add_done_callback(self._episode_done)

    def _episode_done(self, episode: asyncio.Task[None]) -> None:
        self._episodes.discard(episode)
        self._unfinished -= 1
        if episode.cancelled():
            error: BaseException | None = TrainingError(f"{episode.get_name()} was cancelled, but not by the run")
        else:
            error = episode.exception()
        if error is not None and not self._closed:
            self._failure = self._failure or error
        try:
            self.start_episodes()
        except AgentRLError as failed:
            self._failure = failed
        self._changed.set()

    async def _play(self, group: Group, player: int | str) -> None:
        with self._waits.on(WaitKind.CAPACITY, f"{group.id}/{player}", "a place among running episodes"):
            await self._places.acquire()
        try:
            seed = derive_seed(self._seed, "episode", group.position)
            label = group.draw.environment
            if isinstance(player, int):
                runner = self.runners[label]
                group.members[player] = await runner.run(group.task, group_id=group.id, member=player, seed=seed)
            else:
                extra, number = self._extra_runners[label][player], group.size + group.extra_names.index(player)
                group.extra_rollouts[player] = await extra.run(group.task, group_id=group.id, member=number, seed=seed)
        finally:
            self._places.release()
        if group.is_complete:
            self._complete(group)

    def _complete(self, group: Group) -> None:
        del self._running[group.position]
        counters = self._counters
        if self.tasks.wants_outcomes:
            self._outcomes.append(group.outcome())
        if len(group.trainable) < self._least_members or group.failed_extras:
            counters.groups_failed += 1
            self._note_failed(group)
        elif not self._keep(group):
            counters.groups_filtered += 1
            self._note_filtered()
        else:
            self._finished.append(group)
            self._failed_in_a_row = self._filtered_in_a_row = 0

    def _note_failed(self, group: Group) -> None:
        self._failed_in_a_row += 1
        if self._failed_in_a_row < max(self.batch, LEAST_FAILED_GROUPS):
            return
        trainable = {trajectory.id for trajectory in group.trainable}
        few = "no episode" if not trainable else f"fewer than {self._least_members} episodes"
        if group.failed_extras:
            name = group.failed_extras[0]
            few, latest = f"no episode of {name}", group.extra_rollouts[name]
        else:
            latest = next(t for t in reversed(group.trajectories) if t.id not in trainable)
        is_environment = latest.outcome is Outcome.ENVIRONMENT_ERROR
        self._failure = TrainingError(
            f"{self._failed_in_a_row} groups in a row have {few} to train on",
            got=f"{latest.outcome} in {latest.id}: {latest.error or 'no reward'}",
            hint="fix the reported error"
            + (f", then run: agentrl env check {latest.environment}" if is_environment else ""),
        )

    def _note_filtered(self) -> None:
        self._failed_in_a_row = 0
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row >= MAX_WASTED_BATCHES * self.batch:
            self._failure = TrainingError(
                f"{self._filtered_in_a_row} groups in a row were not worth training on",
                expected="groups whose returns differ",
                hint="take easier tasks, warm-start the policy (agentrl sft), or set algorithm.dynamic_sampling=false",
            )

    def _drop_stale(self) -> None:
        fresh: list[Group] = []
        for group in self._finished:
            oldest = group.oldest_version
            if oldest is not None and self.version - oldest > self.max_staleness:
                self._note_stale(oldest)
            else:
                fresh.append(group)
                self._stale_in_a_row = 0
        self._finished = fresh

    def _note_stale(self, oldest: int) -> None:
        self._counters.groups_stale += 1
        self._stale_in_a_row += 1
        if self._stale_in_a_row >= MAX_WASTED_BATCHES * self.batch:
            self._failure = TrainingError(
                f"{self._stale_in_a_row} groups in a row were too stale to train on",
                got=f"tokens of version {oldest} at version {self.version}",
                expected=f"a difference of at most {self.max_staleness}",
                hint="does the engine serve the trainer's current weights?",
            )

    async def close(self) -> None:
        """Cancel what runs and wait until it has ended."""
        self._closed = True
        for episode in list(self._episodes):
            episode.cancel()
        await asyncio.gather(*self._episodes, return_exceptions=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`: plain JSON types.

        Finished episodes that no batch has taken are in it; those in flight will start again under the same seeds.
        """
        unfinished = [*self._running.values(), *self._to_restart]
        return {
            "tasks": self.tasks.state_dict(),
            "tallies": [asdict(outcome) for outcome in self._outcomes],
            "version": self.version,
            "group_size": self.group_size,
            "finished": [group.to_record() for group in self._finished],
            "unfinished": [group.to_record() for group in sorted(unfinished, key=lambda group: group.position)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another scheduler was saved, before anything has started; the batch size may have changed."""
        if state["group_size"] != self.group_size:
            raise UsageError(
                "a run cannot go on with groups of another size",
                got=f"algorithm.group_size {self.group_size}",
                expected=state["group_size"],
            )
        self.tasks.load_state_dict(state["tasks"])
        self._outcomes = [GroupOutcome(**record) for record in state["tallies"]]
        self._finished = [self._restored(record) for record in state["finished"]]
        self._to_restart = deque(self._restored(record) for record in state["unfinished"])
        self.version = state["version"]
        self.used = self.version * self.batch  # each version used a batch, of whatever size

    def _restored(self, record: Mapping[str, Any]) -> Group:
        draw: SampledTask = self.tasks.again(record["environment"], record["place"], record["horizon"])
        return Group.from_record(record, draw=draw, size=self.group_size, extra_names=self._extra_names(draw))
