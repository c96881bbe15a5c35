"""Groups of episodes of one task, whose returns are compared, and the scheduler that keeps them running.

    task sampler ─► admission ──► one asyncio task per episode ──► complete groups ──► next_batch() ──► trainer
                     (staleness,    no lockstep, no barrier:        filtered,                             │
                      capacity)     groups end in any order         too stale dropped                     │
                        ▲                                                                                 │
                        └──────────────────────── set_version(v + 1) ◄────────────────────────────────────┘

A group is of one environment, and is played by that environment's runner, which also scores it as a whole where its
scorer compares episodes. What groups say about their tasks is handed
to the task sampler when a batch is complete, all at once and in the order of groups.

With `max_staleness` 0 a batch is exactly the groups that were started for it, and comes sorted by task order and
member, so nothing depends on which episode was faster. Sampling seeds follow from the run's seed and the group's
position.
"""

from __future__ import annotations

import asyncio
import math
import shlex
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentrl.errors import AgentRLError, EnvironmentFailure, Outcome, TrainingError, UsageError, boundary
from agentrl.observe.metrics import ENVIRONMENT_PREFIX
from agentrl.rollout.curriculum import GroupOutcome
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.scripted_policies import StoredExpert
from agentrl.rollout.task_order import SampledTask, TaskSampler
from agentrl.rollout.turns import derive_seed
from agentrl.rollout.waits import WaitKind
from agentrl.task import Task
from agentrl.trajectory import Trajectory

MAX_WASTED_BATCHES = 20
"""Batches' worth of groups that may be filtered out, or dropped as too stale, in a row before the run gives up."""

LEAST_FAILED_GROUPS = 4
"""Groups that must fail in a row before the run gives up, however small its batches."""

GREEDY, EXPERT = "greedy", "expert"
"""Names of extra rollouts: the policy at temperature 0, and experts (``expert-0``, …)."""


@dataclass(slots=True, kw_only=True)
class Group:
    """The episodes of one task, complete or still running."""

    position: int
    draw: SampledTask
    size: int
    members: dict[int, Trajectory] = field(default_factory=dict)
    """Finished episodes by member number."""
    extra_names: tuple[str, ...] = ()
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
        return [name for name, trajectory in self.extra_rollouts.items() if not trajectory.is_trainable]

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
        return [trajectory for trajectory in self.trajectories if trajectory.is_trainable]

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that sampled a token of the group; ``None`` when nothing was sampled."""
        versions = [v for trajectory in self.trainable if (v := trajectory.oldest_version) is not None]
        return min(versions, default=None)

    def staleness(self, version: int, adapters: Mapping[str, int]) -> int | None:
        """Return how many versions its oldest token is behind, each by the adapter that sampled it."""
        ages = [age for trajectory in self.trainable if (age := trajectory.staleness(version, adapters)) is not None]
        return max(ages, default=None)

    def outcome(self) -> GroupOutcome:
        """Count how often it solved its task so far."""
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
        adapter_versions: Gives the versions of several adapters, whose tokens are as stale as their own adapter says.
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
        adapter_versions: Callable[[], Mapping[str, int]] = dict,
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
        self._seed = seed
        self._keep = keep or (lambda group: True)
        self._least_members = least_members
        self._extra_runners = extra_runners or {}
        self._adapter_versions = adapter_versions
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
            if group.is_complete:  # of a run that was saved while the group was being scored
                self._start(self._finish(group), f"scoring group {group.id}")

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
                group.members[player] = await runner.run(
                    group.task, group_id=group.id, member=player, seed=seed, in_group=runner.scores_groups
                )
            else:
                extra, number = self._extra_runners[label][player], group.size + group.extra_names.index(player)
                group.extra_rollouts[player] = await extra.run(group.task, group_id=group.id, member=number, seed=seed)
        finally:
            self._places.release()
        if group.is_complete:
            await self._finish(group)

    async def _finish(self, group: Group) -> None:
        """Score a group whose episodes have all ended, where they are compared, and hand it over."""
        await self.runners[group.draw.environment].score_group(group.trajectories, group.task)
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
            + (f", then run: agentrl env check {shlex.quote(latest.environment)}" if is_environment else ""),
        )

    def _note_filtered(self) -> None:
        self._failed_in_a_row = 0
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row >= MAX_WASTED_BATCHES * self.batch:
            self._failure = TrainingError(
                f"{self._filtered_in_a_row} groups in a row were not worth training on",
                expected="groups whose episodes the advantage estimator tells apart, by their rewards before shaping",
                hint="take easier tasks, warm-start the policy (agentrl sft), or set algorithm.dynamic_sampling=false",
            )

    def _drop_stale(self) -> None:
        fresh: list[Group] = []
        for group in self._finished:
            age = group.staleness(self.version, self._adapter_versions())
            if age is not None and age > self.max_staleness:
                self._note_stale(age)
            else:
                fresh.append(group)
                self._stale_in_a_row = 0
        self._finished = fresh

    def _note_stale(self, age: int) -> None:
        self._counters.groups_stale += 1
        self._stale_in_a_row += 1
        if self._stale_in_a_row >= MAX_WASTED_BATCHES * self.batch:
            self._failure = TrainingError(
                f"{self._stale_in_a_row} groups in a row were too stale to train on",
                got=f"tokens that are {age} versions old at version {self.version}",
                expected=f"at most {self.max_staleness}",
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
                got=f"{self.group_size} episodes of the policy in each group",
                expected=state["group_size"],
                hint="set algorithm.group_size and algorithm.expert.members as they were",
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


HORIZON = "curriculum/turns"
"""The most turns that an episode of the step could have, where a horizon grows."""


def environment_metrics(groups: Sequence[Group], *, teaches: Callable[[Group], bool]) -> dict[str, float]:
    """Return success, reward, turns, tokens and horizon of each environment of several; of one the horizon alone.

    `teaches` says whether the estimator tells the episodes of a group apart.
    """
    labels = dict.fromkeys(group.draw.environment for group in groups)
    by_label = {label: [group for group in groups if group.draw.environment == label] for label in labels}
    tokens = sum(_tokens(found) for found in by_label.values())
    metrics = _horizon(HORIZON, groups)
    for label, found in sorted(by_label.items()):
        if label:
            metrics |= _of_one(f"{ENVIRONMENT_PREFIX}{label}", found, tokens, teaches)
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


def _of_one(name: str, groups: Sequence[Group], tokens: int, teaches: Callable[[Group], bool]) -> dict[str, float]:
    trained = _trained(groups)
    return {
        f"{name}/groups": float(len(groups)),
        f"{name}/zero_variance": float(sum(not teaches(group) for group in groups)),
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
