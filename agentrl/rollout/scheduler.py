"""Scheduler of episode groups. A group has one task, and the returns of its episodes are compared.

    task sampler ─► admission ──► one asyncio task per episode ──► complete groups ──► next_batch() ──► trainer
                     (staleness,    no lockstep, no barrier:        filtered,                             │
                      capacity)     groups end in any order         too stale dropped                     │
                        ▲                                                                                 │
                        └──────────────────────── set_version(v + 1) ◄────────────────────────────────────┘

The runner of a group's environment plays the group, and scores it as a whole if the scorer compares episodes. When a
batch is complete, the task sampler receives the outcomes of all ended groups at once, in the order of groups.

A windowed batch of version v contains every group that was started at version v - `max_staleness` or before, because
it would be too stale for the next batch. The others are the first finished groups in the order of their starts, which
leaves as few as possible to wait for later. No group is dropped because it is slow, so the trained groups are not
biased towards short episodes. A greedy batch contains the groups that end first.

With `max_staleness` 0 a batch consists of the groups that were started for it, sorted by task order and member, so the
speed of episodes has no effect. Sampling seeds are derived from the run's seed and the group's position.
"""

from __future__ import annotations

import asyncio
import shlex
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentrl.config.rollout import BatchOrder
from agentrl.config.step_settings import stage_label
from agentrl.errors import AgentRLError, EnvironmentFailure, Outcome, TrainingError, UsageError, boundary
from agentrl.errors.deadlines import async_boundary
from agentrl.observe.progress import LiveStatus
from agentrl.observe.trajectory_store import GroupEnd
from agentrl.rollout.curriculum import GroupOutcome
from agentrl.rollout.env_pool import TASKS_PER_PASS
from agentrl.rollout.finished_episodes import RecoveredEpisodes
from agentrl.rollout.group_metrics import BiasMeter
from agentrl.rollout.groups import Group
from agentrl.rollout.journal import JournalFolder
from agentrl.rollout.runner import EpisodeRunner, GroupRunner
from agentrl.rollout.scripted_policies import StoredExpert
from agentrl.rollout.task_order import SampledTask, TaskSampler
from agentrl.rollout.turns import derive_seed
from agentrl.rollout.waits import WaitKind

MAX_WASTED_BATCHES = 20
"""Number of consecutive batches whose groups are all filtered out or stale after which the run fails."""

GROUPS_PER_PASS = 64
"""Maximum number of groups that are measured in one pass of the event loop; each takes about 0.1 ms."""
MIN_FAILED_GROUPS = 4
"""Minimum number of consecutive failed groups after which the run fails, even if a batch is smaller."""


class GroupScheduler:
    """Scheduler that runs groups of episodes ahead of the trainer, as far as staleness and capacity allow.

    Args:
        runners: Runners by the label of their environment and, in later stages, its settings; they share waits and
            counters.
        tasks: Task order; the scheduler becomes its only user.
        group_size: Number of episodes per task.
        batch: Number of groups per training step.
        max_staleness: Maximum number of versions between sampling and training.
        batch_order: ``windowed`` waits for groups that would be too stale for a later batch; ``greedy`` does not.
        max_concurrent: Maximum number of episodes in flight.
        seed: Seed of the run.
        version: Version of the trainer's weights.
        keep: Returns True if a complete group is worth training on (dynamic sampling); other groups are replaced.
        min_members: Minimum number of trainable episodes of a group; a group with fewer fails. 2 if episodes are
            compared.
        extra_runners: Runners of the extra rollouts of each group, by the label of the environment and the rollout's
            name. A group fails if one of its extra rollouts fails.
        adapter_versions: Returns the current versions of several adapters; a token's age counts by its own adapter.
        wait_to_start: Returns an awaitable that a member waits for before it is played; ``None`` for no wait.
        keeps_finished: A resumed run trains on the finished episodes of the run before; otherwise it plays them again,
            because training needs their messages, which no checkpoint contains.
    """

    def __init__(
        self,
        runners: Mapping[str, GroupRunner],
        tasks: TaskSampler,
        *,
        group_size: int,
        batch: int,
        max_staleness: int = 0,
        batch_order: BatchOrder = "windowed",
        max_concurrent: int = 128,
        seed: int = 0,
        version: int = 0,
        keep: Callable[[Group], bool] | None = None,
        min_members: int = 1,
        extra_runners: Mapping[str, Mapping[str, EpisodeRunner | StoredExpert]] | None = None,
        adapter_versions: Callable[[], Mapping[str, int]] = dict,
        wait_to_start: Callable[[Group, int], Awaitable[None] | None] = lambda group, member: None,
        keeps_finished: bool = True,
    ) -> None:
        self.tasks = tasks
        self.runners = runners
        shared = next(iter(runners.values()))
        self._waits, self._counters = shared.waits, shared.counters
        self.group_size = group_size
        self.max_concurrent = max_concurrent
        self.batch = batch
        self.max_staleness = max_staleness
        self.batch_order = batch_order
        self.version = version
        self.used = 0
        self.bias = BiasMeter(tasks.environments)
        self._seed = seed
        self._keep = keep or (lambda group: True)
        self._min_members = min_members
        self._extra_runners = extra_runners or {}
        self._adapter_versions = adapter_versions
        self._wait_to_start = wait_to_start
        self._keeps_finished = keeps_finished
        self._places = asyncio.Semaphore(max_concurrent)
        self._unfinished = self._idle = 0
        self._to_restart: deque[Group] = deque()
        self._recovered = RecoveredEpisodes()
        self._running: dict[int, Group] = {}
        self._finished: list[Group] = []
        self._outcomes: list[GroupOutcome] = []
        self._episodes: set[asyncio.Task[None]] = set()
        self._fetching: asyncio.Task[None] | None = None
        self._misses_task = False
        self._continues = False
        """True while more episodes are going to start in the next pass of the event loop."""
        self._failure: BaseException | None = None
        self._failed_in_a_row = 0
        self._filtered_in_a_row = 0
        self._stale_in_a_row = 0
        self._closed = False
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Hook before the first batch, for schedulers whose clients start the episodes. Does nothing here."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the step that has ended, besides those of tasks and groups; none here."""
        return {}

    @property
    def live(self) -> LiveStatus | None:
        """State of live traffic; ``None`` here."""
        return None

    def _batch_words(self, batch: int) -> str:
        """Describe what `next_batch` waits for."""
        return f"{batch} complete groups"

    async def next_batch(self) -> list[Group]:
        """Return the next complete groups to train on, in task order; start new episodes meanwhile.

        Raises:
            UsageError: an episode had an error that the user must fix.
            TrainingError: too many groups in a row failed (a batch, at least `MIN_FAILED_GROUPS`), or were filtered
                out or too stale (`MAX_WASTED_BATCHES` batches).
        """
        batch = self.batch
        self._drop_stale()
        with self._waits.on(WaitKind.GROUPS, "trainer", self._batch_words(batch)):
            while True:
                self._changed.clear()
                self.start_episodes()
                if self._failure is not None:
                    raise self._failure
                if self._is_ready() and not (self._misses_task or self._continues):
                    break
                await self._changed.wait()
        taken = self._finished[:batch]
        for place, group in enumerate(taken, start=1):
            self._measure(group, trained=True)
            if place % GROUPS_PER_PASS == 0:
                await asyncio.sleep(0)  # nothing is taken yet, in case this is cancelled
        positions = {group.position for group in taken}
        self._finished = [group for group in self._finished if group.position not in positions]
        self.used += batch
        self._counters.groups_delivered += batch
        outcomes, self._outcomes = self._outcomes, []
        self.tasks.learn(sorted(outcomes, key=lambda outcome: outcome.position))
        taken.sort(key=lambda group: group.position)
        self.bias.end_step()
        return taken

    def _is_ready(self) -> bool:
        """Return True if the first finished groups form a batch after which no remaining group becomes too stale.

        Of the groups that must train within this batch and the next k ones, at most k batches may be left. More than a
        batch can therefore never be due at once, unless a resumed run has a smaller batch or `max_staleness`.
        """
        if len(self._finished) < self.batch:
            return False
        if self.batch_order == "greedy":
            return True
        self._finished.sort(key=lambda group: group.position)
        taken = Counter(group.start_version for group in self._finished[: self.batch])
        started = Counter(group.start_version for group in (*self._running.values(), *self._finished))
        for later in range(self.max_staleness):
            newest = self.version - self.max_staleness + later
            due, chosen = (sum(counts[v] for v in counts if v <= newest) for counts in (started, taken))
            if chosen < min(self.batch, due - later * self.batch):
                return False
        return True

    def set_version(self, version: int) -> None:
        """Record that the engine serves new weights; call `start_episodes` to start what that allows."""
        self.version = version

    def start_episodes(self) -> None:
        """Start as many groups as staleness and capacity allow; `next_batch` does this too, and raises its errors."""
        if self._closed or self._failure is not None or self._continues:
            return
        try:
            self._start_groups()
        except AgentRLError as error:
            self._failure = error

    def _start_groups(self) -> None:
        self._misses_task = False
        before = self._unfinished
        while self._unfinished - self._idle < self.max_concurrent and self._may_start():
            if self._unfinished - before >= TASKS_PER_PASS:
                self._continue_starting()
                break
            group = self._to_restart.popleft() if self._to_restart else self._next_group()
            if group is None:
                self._misses_task = True
                break
            self._running[group.position] = group
            group.is_scored = self._recovered.holds_group(group.id, group.size)
            for member in range(group.size):
                if member not in group.members and not self._recover_member(group, member):
                    self._start_episode(group, member)
            for name in group.missing_extras:
                self._start_episode(group, name)
            if group.is_complete:  # restored from a run that was saved while the group was being scored, or killed
                self._start(self._finish(group), f"scoring group {group.id}")
        if self._fetching is None and self.tasks.misses_tasks:
            self._fetching = asyncio.create_task(self._fetch_tasks(), name="fetching tasks")

    def _continue_starting(self) -> None:
        """Continue to start episodes in the next iteration of the event loop."""

        def go_on() -> None:
            self._continues = False
            self.start_episodes()
            self._changed.set()

        self._continues = True
        asyncio.get_running_loop().call_soon(go_on)

    async def _fetch_tasks(self) -> None:
        """Fetch the next tasks of remote sources; a failure ends the run, because tasks must not be skipped."""
        try:
            async with async_boundary(EnvironmentFailure, "fetching the next tasks", deadline_s=None):
                await self.tasks.fetch()
            self._fetching = None
            self.start_episodes()
        except Exception as error:
            self._failure = self._failure or error
        self._changed.set()

    def _may_start(self) -> bool:
        """Return True if staleness allows another group; a failed or dropped group no longer counts."""
        started = len(self._running) + len(self._finished) + self.used
        return started < (self.max_staleness + self.version + 1) * self.batch

    def _next_group(self) -> Group | None:
        """Draw the next task and create its group; ``None`` if the task must be fetched first."""
        position = self.tasks.position
        with boundary(EnvironmentFailure, f"task {position} of the run"):
            draw = self.tasks.next()
        if draw is None:
            return None
        return Group(
            position=position,
            draw=draw,
            size=self.group_size,
            start_version=self.version,
            extra_names=self._extra_names(draw),
        )

    def _extra_names(self, draw: SampledTask) -> tuple[str, ...]:
        """Return the names of a task's extra rollouts; stored experts may lack the task."""
        players = self._extra_runners.get(draw.settings, {})
        return tuple(name for name, player in players.items() if player.can_play(draw.task))

    def recover(self, episodes: RecoveredEpisodes, journals: JournalFolder | None = None) -> int:
        """Use the finished episodes of a killed run instead of playing them again; return how many may be used.

        Args:
            episodes: Episodes of the run, after `load_state_dict`. Those of newer weights than the checkpoint's and
                those of earlier groups are left out, as are incomplete groups whose scorer compares their episodes.
            journals: Journals of the episodes in flight, if the run has any; those of episodes that are not played
                again are removed.
        """
        unfinished = [group.id for group in self._to_restart]
        if not self._keeps_finished:
            episodes = RecoveredEpisodes()
        episodes.keep_groups_from(self.tasks.position, unfinished)
        finished = [(group.id, member) for group in self._to_restart for member in group.members]
        for group_id, member in finished:
            episodes.take(group_id, member)
        if journals is not None:
            journals.read(self.version)
            journals.keep_groups_from(self.tasks.position, unfinished)
            for group_id, member in finished:
                journals.forget(f"{group_id}/{member}")
        episodes.keep_versions_until(self.version, self._adapter_versions())
        self._recovered = episodes
        return len(episodes)

    def _recover_member(self, group: Group, member: int) -> bool:
        runner = self.runners[group.draw.settings]
        played_again = runner.scores_groups and not group.is_scored
        found = None if played_again else self._recovered.take(group.id, member)
        if found is None:
            return False
        if not self._recovered.are_stored:
            runner.observer.on_start(found)
            runner.observer.on_end(found)
        found.forget_messages()
        group.members[member] = found
        return True

    def _start_episode(self, group: Group, player: int | str) -> None:
        self._start(self._play(group, player), f"episode {group.id}/{player}")

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._unfinished += 1
        episode = asyncio.create_task(work, name=name)
        self._episodes.add(episode)
        episode.add_done_callback(self._episode_done)

    def _episode_done(self, episode: asyncio.Task[None]) -> None:
        self._episodes.discard(episode)
        self._unfinished -= 1
        if episode.cancelled():
            error: BaseException | None = TrainingError(f"{episode.get_name()} was cancelled from outside the run")
        else:
            error = episode.exception()
        if error is not None and not self._closed:
            self._failure = self._failure or error
        self.start_episodes()
        self._changed.set()

    async def _play(self, group: Group, player: int | str) -> None:
        waiting = self._wait_to_start(group, player) if isinstance(player, int) else None
        if waiting is not None:
            await self._without_place(waiting)
        with self._waits.on(WaitKind.CAPACITY, f"{group.id}/{player}", "a free slot for an episode"):
            await self._places.acquire()
        try:
            seed = derive_seed(self._seed, "episode", group.position)
            label = group.draw.settings
            if isinstance(player, int):
                runner = self.runners[label]
                group.members[player] = await runner.run(
                    group.task, group_id=group.id, member=player, seed=seed, in_group=runner.scores_groups
                )
            else:
                extra, number = self._extra_runners[label][player], group.size + group.extra_names.index(player)
                with self._waits.on(WaitKind.EXTRAS, f"{group.id}/{player}", f"the extra rollout {player}"):
                    group.extra_rollouts[player] = await extra.run(
                        group.task, group_id=group.id, member=number, seed=seed
                    )
        finally:
            self._places.release()
        if group.is_complete:
            await self._finish(group)

    async def _finish(self, group: Group) -> None:
        """Score a group whose episodes have all ended, if they are compared, and complete it; others may start."""
        runner = self.runners[group.draw.settings]
        if runner.scores_groups and not group.is_scored:
            await self._without_place(runner.score_group(group.trajectories, group.task))
        self._complete(group)

    async def _without_place(self, work: Awaitable[None]) -> None:
        """Await something without occupying one of the `max_concurrent` slots."""
        self._idle += 1
        try:
            self.start_episodes()
            await work
        finally:
            self._idle -= 1

    def _complete(self, group: Group) -> None:
        del self._running[group.position]
        counters = self._counters
        if self.tasks.wants_outcomes:
            self._outcomes.append(group.outcome())
        if len(group.trainable) < self._min_members or group.failed_extras:
            counters.groups_failed += 1
            counters.discarded_engine_s += group.engine_s
            self._measure(group, trained=False)
            self.record_end(group, GroupEnd.FAILED)
            self._note_failed(group)
        elif not self._keep(group):
            counters.groups_filtered += 1
            counters.discarded_engine_s += group.engine_s
            self.record_end(group, GroupEnd.FILTERED)
            self._note_filtered(group)
        else:
            self._failed_in_a_row = self._filtered_in_a_row = 0
            if self._is_fresh(group):
                self._finished.append(group)

    def record_end(self, group: Group, end: GroupEnd) -> None:
        """Notify the observer of the end of a group, with its reason."""
        episodes = group.trainable if end is GroupEnd.TRAINED else group.trajectories
        self.runners[group.draw.settings].observer.on_group_end(group.id, end, episodes)

    def _measure(self, group: Group, *, trained: bool) -> None:
        self.bias.add(group.position, group.draw.environment, group.trajectories, trained=trained)

    def _note_failed(self, group: Group) -> None:
        self._failed_in_a_row += 1
        if self._failed_in_a_row < max(self.batch, MIN_FAILED_GROUPS):
            return
        trainable = {trajectory.id for trajectory in group.trainable}
        few = "no episode" if not trainable else f"fewer than {self._min_members} episodes"
        if group.failed_extras:
            name = group.failed_extras[0]
            few, latest = f"no episode of {name}", group.extra_rollouts[name]
        else:
            latest = next(t for t in reversed(group.trajectories) if t.id not in trainable)
        is_environment = latest.outcome is Outcome.ENVIRONMENT_ERROR
        check = f", then run: agentrl env check {shlex.quote(latest.environment)}" if is_environment else ""
        nothing = f"{self._failed_in_a_row} groups in a row have {few} to train on"
        incidents = self._counters.incidents
        one = next((one for one in incidents.worst() if one.kind == latest.outcome and one.file is not None), None)
        if one is None and latest.outcome and latest.outcome.is_trainable and latest.reward is None:
            self._failure = TrainingError(
                nothing,
                got=f"None from every reward function for {latest.id}: none of them applies to its task",
                expected="a number from at least one function for most tasks",
                hint="return 0, not None, for a wrong answer",
            )
            return
        if one is None:
            got = f"{latest.outcome} in {latest.id}: {latest.error or 'no reward'}"
            self._failure = TrainingError(nothing, got=got, hint=f"fix the reported error{check}")
            return
        self._failure = TrainingError(
            f"{one.subject} failed in {one.count} of {incidents.attempts} attempts",
            got=f"{one.cause.removeprefix('got ')} ({one.file} line {one.line})",
            hint=f"{nothing}; fix the reported error{check}",
        )
        self._failure.subject = one.subject

    def _note_filtered(self, group: Group) -> None:
        self._failed_in_a_row = 0
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row >= MAX_WASTED_BATCHES * self.batch:
            rewards = [trajectory.reward or 0.0 for trajectory in group.trainable]
            self._failure = TrainingError(
                f"{self._filtered_in_a_row} groups in a row were not worth training on",
                got=f"rewards from {min(rewards):g} to {max(rewards):g} in the latest of them",
                expected="groups whose episodes the advantage estimator can distinguish, by rewards before shaping "
                "(algorithm.dynamic_sampling), and whose share of solved episodes algorithm.selection accepts, if set",
                hint="use tasks of another difficulty, warm-start the policy (agentrl sft), or change these keys",
            )

    def _drop_stale(self) -> None:
        self._finished = [group for group in self._finished if self._is_fresh(group)]

    def _is_fresh(self, group: Group) -> bool:
        """Return True if a complete group is not too stale to train on; count it otherwise."""
        age = group.staleness(self.version, self._adapter_versions())
        if age is not None and age > self.max_staleness:
            self._measure(group, trained=False)
            self._counters.discarded_engine_s += group.engine_s
            self.record_end(group, GroupEnd.STALE)
            self._note_stale(age)
            return False
        self._stale_in_a_row = 0
        return True

    def _note_stale(self, age: int) -> None:
        self._counters.groups_stale += 1
        self._stale_in_a_row += 1
        if self._stale_in_a_row >= MAX_WASTED_BATCHES * self.batch:
            self._failure = TrainingError(
                f"{self._stale_in_a_row} groups in a row were too stale to train on",
                got=f"tokens that are {age} versions old at version {self.version}",
                expected=f"at most {self.max_staleness}",
                hint="check that the engine serves the trainer's current weights",
            )

    async def close(self) -> None:
        """Cancel running episodes and wait until they have ended."""
        self._closed = True
        work = [*self._episodes, *([] if self._fetching is None else [self._fetching])]
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    def record_left_over(self) -> None:
        """Notify the observer of the groups that no batch has taken; call it after the last batch."""
        for group in sorted(self._untaken_groups(), key=lambda group: group.position):
            self.record_end(group, GroupEnd.LEFT_OVER)

    def _untaken_groups(self) -> list[Group]:
        return [*self._finished, *self._running.values(), *self._to_restart]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict` in plain JSON types.

        It contains finished episodes that no batch has taken. Episodes in flight will restart with the same seeds.
        """
        unfinished = [*self._running.values(), *self._to_restart]
        return {
            "tasks": self.tasks.state_dict(),
            "tallies": [asdict(outcome) for outcome in self._outcomes],
            "version": self.version,
            "bias": self.bias.state_dict(),
            "group_size": self.group_size,
            "finished": [group.to_record() for group in self._finished],
            "unfinished": [group.to_record() for group in sorted(unfinished, key=lambda group: group.position)],
        }

    async def fetch_saved(self, state: Mapping[str, Any]) -> None:
        """Fetch the tasks of a saved state from remote sources, so that `load_state_dict` does not block."""
        groups = [*state["finished"], *state["unfinished"]]
        await self.tasks.fetch_draws(
            [(stage_label(record["environment"], record.get("stage", 0)), record["place"]) for record in groups]
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state before anything has started; the batch size may have changed."""
        if state["group_size"] != self.group_size:
            raise UsageError(
                "a run cannot resume with another group size",
                got=f"{self.group_size} episodes of the policy in each group",
                expected=state["group_size"],
                hint="set algorithm.group_size and algorithm.expert.members to their previous values",
            )
        self.tasks.load_state_dict(state["tasks"])
        self._outcomes = [GroupOutcome(**record) for record in state["tallies"]]
        self._finished = [self._restore(record) for record in state["finished"]]
        self._to_restart = deque(self._restore(record) for record in state["unfinished"])
        if not self._keeps_finished:
            self._play_again([*self._finished, *self._to_restart])
        self.version = state["version"]
        self.bias.load_state_dict(state["bias"])
        self.used = self.version * self.batch  # each version used one batch, whatever its size

    def _play_again(self, groups: Sequence[Group]) -> None:
        """Restart groups without their finished episodes."""
        for group in groups:
            group.members.clear()
            group.extra_rollouts.clear()
        self._finished, self._to_restart = [], deque(sorted(groups, key=lambda group: group.position))

    def _restore(self, record: Mapping[str, Any]) -> Group:
        place = (record["environment"], record["place"], record["horizon"], record.get("stage", 0))
        draw = self.tasks.redraw(*place, task=record.get("task"))
        return Group.from_record(record, draw=draw, size=self.group_size, extra_names=self._extra_names(draw))
