"""Runner that plays single episodes and records how they end.

A `GroupScorer` scores the episodes of a group together: they are played with ``in_group``, and the caller calls
`EpisodeRunner.score_group` after the last one has ended. Only then is the observer notified of their end.

This module alone classifies errors, by the outcome of their type. After an infrastructure failure, the episode is
attempted again with the same task and seed; if all attempts fail, the failed trajectory is kept and does not train.
Only errors that the user must fix (`UsageError`) and cancellation by the caller leave `EpisodeRunner.run` as
exceptions; they are recorded too. Code of environments, loops, tools and scorers cannot cancel the caller: each attempt
runs in its own asyncio task.

`play_all` plays a list of episodes with bounded concurrency.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.agent_loop import AgentLoop, EpisodeEnd
from agentrl.errors import (
    AgentRLError,
    EnvironmentFailure,
    InfrastructureError,
    Outcome,
    PolicyError,
    RewardFailure,
    UsageError,
    described_error,
    is_addressed_to,
    raised_at,
    running_task,
    shorten,
)
from agentrl.errors.deadlines import CLOSING_S, async_boundary
from agentrl.errors.foreign import EPISODE_GRACE_S, await_or_abandon
from agentrl.reward import (
    EnvironmentReward,
    GroupScorer,
    Score,
    Scorer,
    checked_group_scores,
    checked_score,
    defined_in,
    no_group,
    weighted,
    with_role_rewards,
)
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import TASKS_PER_PASS, EnvPool
from agentrl.rollout.episode import RuntimeEpisode, outcome_of
from agentrl.rollout.events import RolloutCounters, RolloutObserver, episode_counters
from agentrl.rollout.policies import EpisodePolicy
from agentrl.rollout.roles.run_roles import RoleSetup, RunRoles
from agentrl.rollout.tools import TOOLSET_S, EpisodeTools, ToolLimits, list_tools
from agentrl.rollout.turns import TurnLog, derive_seed
from agentrl.rollout.waits import WaitKind, WaitTracker
from agentrl.sandbox import Sandbox
from agentrl.task import Task, checked_proposals
from agentrl.tool import Tool, Toolset
from agentrl.trajectory import Trajectory

logger = logging.getLogger(__name__)
LOGGED = 3
"""Number of failures of a kind that are logged one by one."""
_TENFOLDS = frozenset(10**power for power in range(1, 10))


class PolicyWrapper(Protocol):
    """Wrapper of the policy of each episode, such as `agentrl.rollout.few_shot.FewShotExamples`."""

    async def wrap(self, runner: EpisodeRunner, task: Task) -> EpisodePolicy:
        """Return the policy of an episode of `task`; the runner may play other episodes for it."""


class GroupRunner(Protocol):
    """Runner of the episodes of groups, as the scheduler uses it: an `EpisodeRunner`, or a simulated one."""

    waits: WaitTracker
    counters: RolloutCounters
    observer: RolloutObserver

    @property
    def scores_groups(self) -> bool:
        """True if the scorer compares the episodes of a group."""

    async def run(self, task: Task, *, group_id: str, member: int, seed: int, in_group: bool = False) -> Trajectory:
        """Play an episode; see `EpisodeRunner.run`."""

    async def score_group(self, trajectories: Sequence[Trajectory], task: Task) -> None:
        """Score a group whose episodes have ended; see `EpisodeRunner.score_group`."""


class EpisodeRunner:
    """Runner of episodes with one environment, loop, policy and scorer.

    The loop and the policies of roles are closed with the pool.

    Args:
        pool: Lends environments.
        loop: Controls each episode.
        policy: Answers in the episodes' conversations.
        limits: Budgets and deadlines.
        limits_in_force: Returns the limits of an episode that starts now, instead of `limits`.
        tools: The configured tools.
        scorer: Computes the return; the environment's own rewards by default.
        system_prompt: Replaces the environment's instructions.
        retries: Maximum number of new attempts after infrastructure failures.
        observer: Notified of starts, turns and ends.
        counters: Counts of events; several runners may share one.
        tool_limits: Rate limits and cached results of tools; several runners may share one.
        make_sandbox: Makes the sandbox of an episode whose tools need one.
        policy_wrapper: Wraps the policy of each episode, for instance to add examples to its prompts.
        roles: Setups of roles; roles without a setup use the run's tools and policy.
    """

    def __init__(
        self,
        *,
        pool: EnvPool,
        loop: AgentLoop,
        policy: EpisodePolicy,
        limits: EpisodeLimits | None = None,
        limits_in_force: Callable[[], EpisodeLimits] | None = None,
        tools: Sequence[Tool | Toolset] = (),
        scorer: Scorer | None = None,
        system_prompt: str | None = None,
        retries: int = 0,
        observer: RolloutObserver | None = None,
        counters: RolloutCounters | None = None,
        tool_limits: ToolLimits | None = None,
        make_sandbox: Callable[[], Sandbox] | None = None,
        policy_wrapper: PolicyWrapper | None = None,
        roles: Sequence[RoleSetup] = (),
    ) -> None:
        self.pool = pool
        self.loop = loop
        self.policy = policy
        self._limits, self._limits_in_force = limits or EpisodeLimits(), limits_in_force
        self.roles = RunRoles.find(loop, pool.roles, roles)
        self.tools = [*tools, *(self.roles.tools if self.roles else ())]
        self.scorer = scorer or EnvironmentReward()
        self.retries = retries
        self.waits = pool.waits
        self.counters = counters or RolloutCounters()
        self.observer = observer or RolloutObserver()
        self.tool_limits = tool_limits or ToolLimits(pool.waits.clock)
        self.make_sandbox = make_sandbox
        self.policy_wrapper = policy_wrapper
        self._unscored: set[str] = set()
        """Ids of the episodes of this runner whose groups have not been scored."""
        self.spec = pool.spec
        if system_prompt is not None:
            self.spec = dataclasses.replace(pool.spec, instructions=system_prompt, tool_instructions="")
        for setup in roles:
            if setup.policy is not None:
                pool.cleanup.push_async_callback(setup.policy.close)
        pool.cleanup.push_async_callback(loop.close)

    @property
    def limits(self) -> EpisodeLimits:
        """Limits of an episode that starts now."""
        return self._limits if self._limits_in_force is None else self._limits_in_force()

    def with_policy(
        self, policy: EpisodePolicy, counters: RolloutCounters | None = None, *, follows_schedules: bool = True
    ) -> EpisodeRunner:
        """Copy the runner with another policy and a new observer.

        Args:
            policy: Plays the episodes.
            counters: Counters of the copy; new ones by default.
            follows_schedules: False to use the limits of the config, as evaluations do.
        """
        other = copy.copy(self)
        if not follows_schedules:
            other._limits_in_force = None
        other.policy, other.counters, other.observer = policy, counters or RolloutCounters(), RolloutObserver()
        other._unscored = set()
        return other

    async def close(self, *, within_s: float = CLOSING_S) -> None:
        """Close the environments, the loop, the tools and the policies of roles. No episode may be running.

        Args:
            within_s: Seconds for the environments, and again for everything else; see `close_in_time`.
        """
        await self.pool.close(within_s=within_s)

    def can_play(self, task: Task) -> bool:
        """Return True: this runner can play any task."""
        return True

    @property
    def scores_groups(self) -> bool:
        """True if the scorer compares the episodes of a group."""
        return isinstance(self.scorer, GroupScorer)

    async def run(self, task: Task, *, group_id: str, member: int, seed: int, in_group: bool = False) -> Trajectory:
        """Play the task until an attempt ends without an infrastructure failure, or all attempts are used.

        Args:
            task: Task to play.
            group_id: Id of the group, whose members share the task.
            member: Number of the episode within the group.
            seed: Seed of all sampling of the episode; attempts and turns derive their seeds from it.
            in_group: The caller calls `score_group` once the group has ended.

        Raises:
            UsageError: an error that no new attempt can fix, or the scorer compares episodes and `in_group` is False.
            asyncio.CancelledError: the caller cancelled; the observer has received the trajectory.
        """
        if self.scores_groups and not in_group:
            raise no_group(self.scorer)
        one = Assignment(task=task, group_id=group_id, member=member, seed=seed)
        attempt = self._first_attempt(one)
        while True:
            trajectory = await self._run_attempt(one, attempt)
            if trajectory.outcome is None or not trajectory.outcome.is_retryable:
                return trajectory
            if attempt >= self.retries:
                return trajectory
            self.counters.retries += 1
            attempt += 1

    def _first_attempt(self, one: Assignment) -> int:
        """Return the number of an episode's first attempt."""
        return 0

    async def _run_attempt(self, one: Assignment, attempt: int) -> Trajectory:
        """Play one attempt of an episode."""
        trajectory = Trajectory(
            id=f"{one.id}.{attempt}",
            task_id=one.task.id,
            environment=self.spec.name,
            seed=one.task.seed,
            group_id=one.group_id,
            attempt=attempt,
            task_type=None if one.task.type is None else str(one.task.type),
        )
        await self._attempt(trajectory, one.task, derive_seed(one.seed, one.member, attempt))
        return trajectory

    async def _attempt(self, trajectory: Trajectory, task: Task, seed: int) -> None:
        self.counters.running += 1
        began = self.waits.clock()
        self.observer.on_start(trajectory)
        try:
            await _run_isolated(self._classify(trajectory, task, seed), f"episode {trajectory.id}")
        except EnvironmentFailure as error:
            self._fail(trajectory, error.outcome, error)
        except BaseException as error:  # recorded, then raised again
            trajectory.outcome, trajectory.error = Outcome.CANCELLED, str(error) or type(error).__name__
            trajectory.reward = None  # the episode ended and was scored although its task was cancelled
            raise
        finally:
            trajectory.metrics["seconds"] = self.waits.clock() - began
            self.counters.incidents.attempts += 1
            self.counters.running -= 1
            if self.scores_groups and _can_be_scored(trajectory):
                self._unscored.add(trajectory.id)
            else:
                self._announce_end(trajectory)
            trajectory.forget_messages()

    def _announce_end(self, trajectory: Trajectory) -> None:
        if trajectory.outcome is not None:
            self.counters.outcomes[trajectory.outcome] += 1
            seconds = trajectory.engine_s
            self.counters.engine_s += seconds
            self.counters.failed_engine_s += seconds if trajectory.outcome.is_infrastructure else 0.0
        self.observer.on_end(trajectory)

    async def _classify(self, trajectory: Trajectory, task: Task, seed: int) -> None:
        episode_counters.set(self.counters)
        try:
            trajectory.outcome = await self._play(trajectory, task, seed)
            if trajectory.outcome.is_trainable and not self.scores_groups:
                await self._score(trajectory, task)
        except AgentRLError as error:
            outcome = getattr(error, "outcome", None)
            if not isinstance(outcome, Outcome):
                raise
            self._fail(trajectory, outcome, error)

    async def _play(self, trajectory: Trajectory, task: Task, seed: int) -> Outcome:
        policy = self.policy if self.policy_wrapper is None else await self.policy_wrapper.wrap(self, task)
        async with self.pool.borrow(trajectory.id) as environment:
            limits = self.limits.for_task(task)
            turns = TurnLog(trajectory, limits, seed, self.waits, self.counters, self.observer)
            with self.waits.on(WaitKind.TOOLSET, trajectory.id, "the tools of toolsets", TOOLSET_S):
                configured = await list_tools(self.tools)
            tools = EpisodeTools(configured, turns, self.tool_limits, make_sandbox=self.make_sandbox)
            make_episode = RuntimeEpisode if self.roles is None else await self.roles.prepare_episode()
            episode = make_episode(
                task=task.copy(),  # the loop may change it
                spec=self.spec,
                environment=environment,
                policy=policy,
                loop=self.loop,
                tools=tools,
                turns=turns,
            )
            try:
                outcome = await self._run_loop(episode)
                if outcome.is_trainable:
                    await episode.add_final_reward()
            finally:
                try:
                    turns.close()
                finally:
                    await episode.close()
            self._read_info(trajectory, episode)
            return outcome

    async def _run_loop(self, episode: RuntimeEpisode) -> Outcome:
        attempt = running_task()
        try:
            with self.waits.on(WaitKind.LOOP, episode.turns.trajectory.id, type(self.loop).__name__):
                await _start_loop(self.loop, episode)
        except EpisodeEnd as end:
            return end.outcome
        except PolicyError as error:
            episode.turns.trajectory.error = str(error)
            return error.outcome
        except AgentRLError:
            raise
        except BaseException as error:
            if is_addressed_to(attempt, error):
                raise
            failure = EnvironmentFailure(
                f"agent loop {type(self.loop).__name__} failed (task {episode.task.id})",
                got=described_error(error),
            )
            definition = defined_in(self.loop)
            failure.subject = f"agent loop {type(self.loop).__name__}"
            raised = None if definition is None else raised_at(error, definition.file)
            if (place := raised or raised_at(error)) is not None:
                failure.location = place
                failure.add_hint(f"it was raised in {place}: {place.code}")
            if self.counters.incidents.count_of(failure.outcome, failure.subject, failure) < LOGGED:
                logger.exception("agent loop %s failed in %s", type(self.loop).__name__, episode.turns.trajectory.id)
            raise failure from error
        if not episode.turns.trajectory.turns:
            raise _never_sampled(self.loop, episode.task)
        return outcome_of(episode.last_result)

    def _read_info(self, trajectory: Trajectory, episode: RuntimeEpisode) -> None:
        trajectory.task_type = episode.info.get("task_type", trajectory.task_type)
        if "success" in episode.info:
            trajectory.success = bool(episode.info["success"])
        elif self.spec.success_threshold is not None:
            total = trajectory.environment_reward - episode.tool_reward
            trajectory.success = total >= self.spec.success_threshold
        if "proposals" in episode.info:
            trajectory.proposals = checked_proposals(self.spec.name, episode.info["proposals"])

    async def _score(self, trajectory: Trajectory, task: Task) -> None:
        what = f"scoring task {task.id}"
        deadline_s = self.limits.score_timeout_s
        began = self.waits.clock()
        with self.waits.on(WaitKind.SCORER, trajectory.id, type(self.scorer).__name__, deadline_s):
            async with async_boundary(RewardFailure, what, deadline_s=deadline_s):
                score = await checked_score(self.scorer, trajectory, task)
        _apply_score(trajectory, score, self.scorer, self.waits.clock() - began)

    async def score_group(self, trajectories: Sequence[Trajectory], task: Task) -> None:
        """Score the episodes of a group if the scorer compares them; episodes with infrastructure failures are skipped.

        If a group cannot be scored, all its episodes become infrastructure failures.

        Args:
            trajectories: All episodes of the group, including those that were played before the run was resumed.
            task: Task of the group.

        Raises:
            UsageError: an error that no new attempt can fix.
            BudgetSpent: the scorer's budget is used up.
        """
        found = [trajectory for trajectory in trajectories if _can_be_scored(trajectory)]
        if not self.scores_groups or not found:
            return
        try:
            await _run_isolated(self._score_together(found, task), f"scoring group {found[0].group_id}")
        except InfrastructureError as error:
            for trajectory in found:
                self._fail(trajectory, error.outcome, error)
        for trajectory in found:
            if trajectory.id in self._unscored:
                self._unscored.discard(trajectory.id)
            else:
                self.observer.on_start(trajectory)  # another process played this episode
            self._announce_end(trajectory)

    def _fail(self, trajectory: Trajectory, outcome: Outcome, error: AgentRLError) -> None:
        trajectory.outcome, trajectory.error, trajectory.reward = outcome, str(error), None
        if outcome.is_retryable:
            subject = f"environment {self.spec.name}" if outcome is Outcome.ENVIRONMENT_ERROR else outcome.value
            _log_failure(trajectory, self.counters.incidents.count_failure(outcome, subject, error))

    async def _score_together(self, trajectories: Sequence[Trajectory], task: Task) -> None:
        scorer = self.scorer
        assert isinstance(scorer, GroupScorer)
        episode_counters.set(self.counters)
        what, began = f"scoring a group of task {task.id}", self.waits.clock()
        with self.waits.on(WaitKind.GROUP_SCORER, trajectories[0].group_id, type(scorer).__name__):
            async with async_boundary(RewardFailure, what, deadline_s=None):
                scores = await checked_group_scores(scorer, trajectories, task)
        for trajectory, score in zip(trajectories, scores, strict=True):
            _apply_score(trajectory, score, scorer, self.waits.clock() - began)


def _log_failure(trajectory: Trajectory, count: int) -> None:
    """Log the first `LOGGED` failed attempts of a kind, then the 10th, the 100th, and so on."""
    if count <= LOGGED:
        more = ""
        if count == LOGGED:
            more = ". Later failures of this kind are counted, and logged at 10, 100, 1000 …"
        logger.warning("attempt %s: %s%s", trajectory.id, trajectory.error, more)
    elif count in _TENFOLDS:
        logger.warning(
            "%s attempts have failed in this way; the latest, %s: %s", f"{count:,}", trajectory.id, trajectory.error
        )


def _can_be_scored(trajectory: Trajectory) -> bool:
    return trajectory.outcome is not None and trajectory.outcome.is_trainable


def _apply_score(trajectory: Trajectory, score: Score, scorer: Scorer, seconds: float) -> None:
    """Set an episode's return: the score plus the rewards that count only for single roles.

    Args:
        trajectory: The episode.
        score: Its score.
        scorer: Scorer that gave it; the source of the whole score if that names no sources.
        seconds: Duration of the scoring.
    """
    if turns := trajectory.turns:
        turns[-1].timings.scoring += seconds
    trajectory.reward_components.update(score.components)
    score = with_role_rewards(score, scorer, trajectory.own_rewards)
    trajectory.reward = score.reward
    if score.reward is not None:
        trajectory.reward_sources = weighted(score.sources, 1)


async def _run_isolated(work: Coroutine[Any, Any, None], name: str) -> None:
    """Run `work` in a task of its own, so that user code can neither cancel the caller nor outlive it."""
    try:
        await await_or_abandon(work, name, grace_s=EPISODE_GRACE_S)
    except asyncio.CancelledError as error:
        if is_addressed_to(running_task(), error):
            raise
        raise EnvironmentFailure(f"{name} failed", got="code of the episode cancelled its task") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Episode to play."""

    task: Task
    group_id: str
    member: int
    seed: int

    @property
    def id(self) -> str:
        """Id of the episode's trajectories, without the attempt number."""
        return f"{self.group_id}/{self.member}"


async def play_all(
    runner: EpisodeRunner, assignments: Iterable[Assignment], *, concurrency: int
) -> AsyncIterator[Trajectory]:
    """Play all assignments, at most `concurrency` at a time; yield trajectories as episodes end.

    If the scorer compares episodes, those of one ``group_id`` are yielded together after the last one has ended.
    Leaving the loop early cancels the running episodes. A `UsageError` of an episode is raised.

    Raises:
        UsageError: the scorer compares episodes, and a group has only one.
    """
    assignments = list(assignments)
    groups = _Groups(runner, assignments)
    remaining = iter(assignments)
    running: set[asyncio.Task[list[Trajectory]]] = set()
    ended: asyncio.Queue[asyncio.Task[list[Trajectory]]] = asyncio.Queue()

    def on_end(episode: asyncio.Task[list[Trajectory]]) -> None:
        running.discard(episode)
        ended.put_nowait(episode)
        if not episode.cancelled():
            episode.exception()  # read here, because a caller that leaves early does not read it

    try:
        while True:
            starting = [*itertools.islice(remaining, min(TASKS_PER_PASS, concurrency - len(running)))]
            for one in starting:
                episode = asyncio.create_task(groups.play(one))
                running.add(episode)
                episode.add_done_callback(on_end)
            if not running and ended.empty():
                return
            if starting and ended.empty():  # there may be more to start
                await asyncio.sleep(0)
                continue
            for trajectory in (await ended.get()).result():
                yield trajectory
    finally:
        unfinished = list(running)
        for episode in unfinished:
            episode.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)


class _Groups:
    """Groups of assignments; if the scorer compares episodes, a group is held back until it is complete."""

    def __init__(self, runner: EpisodeRunner, assignments: Sequence[Assignment]) -> None:
        self._runner = runner
        self._left = Counter(one.group_id for one in assignments)
        self._found: dict[str, list[Trajectory]] = {group_id: [] for group_id in self._left}
        if runner.scores_groups and 1 in self._left.values():
            raise no_group(runner.scorer)

    async def play(self, one: Assignment) -> list[Trajectory]:
        """Play an episode; return it or, if the scorer compares episodes, its group once that is complete."""
        runner, group_id = self._runner, one.group_id
        trajectory = await runner.run(
            one.task, group_id=group_id, member=one.member, seed=one.seed, in_group=runner.scores_groups
        )
        if not runner.scores_groups:
            return [trajectory]
        self._found[group_id].append(trajectory)
        self._left[group_id] -= 1
        if self._left[group_id]:
            return []
        found = sorted(self._found.pop(group_id), key=lambda trajectory: trajectory.id)
        await runner.score_group(found, one.task)
        return found


def _never_sampled(loop: AgentLoop, task: Task) -> EnvironmentFailure:
    """Return the error for a loop that has ended without an answer of the policy."""
    failure = EnvironmentFailure(
        f"agent loop {type(loop).__name__} ended without an answer of the policy (task {task.id})",
        got="0 turns",
        expected="at least one `await conversation.generate()`",
        hint="return from run() only after the policy has answered",
    )
    failure.subject = f"agent loop {type(loop).__name__}"
    failure.location = defined_in(loop)
    return failure


def _start_loop(loop: AgentLoop, episode: RuntimeEpisode) -> Awaitable[None]:
    """Start a loop's `run`; raise `UsageError` if it is not asynchronous."""
    running: object = loop.run(episode)
    if not inspect.isawaitable(running):
        raise UsageError(
            f"agent loop {type(loop).__name__} is not asynchronous",
            got=f"run() returned {type(running).__name__} {shorten(running)}",
            expected="async def run(self, episode), without yield",
        )
    return running
