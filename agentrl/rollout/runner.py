"""Plays one episode, whatever happens, and says how it ended.

An error is classified here, once: by the outcome that its type carries. What the machinery failed is tried again with
a new attempt under the same task and seed; then the failed trajectory stands, and does not train. Only what the user
must change (`UsageError`) and cancellation leave `EpisodeRunner.run` as exceptions, recorded all the same.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack

from agentrl.agent_loop import AgentLoop, EpisodeEnd
from agentrl.env import StepResult
from agentrl.errors import AgentRLError, EnvironmentFailure, Outcome, PolicyError, async_boundary
from agentrl.reward import EnvironmentReward, Scorer
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.counters import RolloutCounters, RolloutObserver
from agentrl.rollout.environments import EnvironmentHost, HostedEnvironment
from agentrl.rollout.episode import RuntimeEpisode
from agentrl.rollout.seeds import derive_seed
from agentrl.rollout.speaker import Speaker
from agentrl.rollout.stall import WaitKind
from agentrl.rollout.turns import Recorders, TurnLog
from agentrl.task import Task
from agentrl.tool import Tool
from agentrl.trajectory import Trajectory

logger = logging.getLogger(__name__)


class EpisodeRunner:
    """Plays episodes of one kind: environment, loop, speaker, scorer.

    Args:
        host: Lends environments.
        loop: How the policy talks to them.
        speaker: Who the policy is.
        limits: Budgets and deadlines.
        tools: The configured tools.
        scorer: Computes the return; the environment's own rewards by default.
        system_prompt: Replaces the environment's instructions.
        retries: New attempts after infrastructure failures.
        observer: Is told about turns and endings.
        counters: Counts of everything; several runners may share one.
    """

    def __init__(
        self,
        *,
        host: EnvironmentHost,
        loop: AgentLoop,
        speaker: Speaker,
        limits: EpisodeLimits | None = None,
        tools: Sequence[Tool] = (),
        scorer: Scorer | None = None,
        system_prompt: str | None = None,
        retries: int = 0,
        observer: RolloutObserver | None = None,
        counters: RolloutCounters | None = None,
    ) -> None:
        self.host = host
        self.loop = loop
        self.speaker = speaker
        self.limits = limits or EpisodeLimits()
        self.tools = tools
        self.scorer = scorer or EnvironmentReward()
        self.retries = retries
        self.waits = host.waits
        self.counters = counters or RolloutCounters()
        self.observer = observer or RolloutObserver()
        self.spec = host.spec
        if system_prompt is not None:
            self.spec = dataclasses.replace(host.spec, instructions=system_prompt, tool_instructions="")

    async def run(self, task: Task, *, group_id: str, member: int, seed: int) -> Trajectory:
        """Play the task until an attempt is not failed by the machinery, or the attempts are used up.

        Args:
            task: What to play.
            group_id: Members of a group share the task.
            member: Number within the group.
            seed: Decides all sampling of the episode; attempts and turns derive their own from it.

        Raises:
            UsageError: something that no new attempt can mend.
            asyncio.CancelledError: the caller cancelled; the observer has been told of the trajectory.
        """
        for attempt in range(self.retries + 1):
            trajectory = Trajectory(
                id=f"{group_id}/{member}.{attempt}",
                task_id=task.id,
                environment=self.spec.name,
                seed=task.seed,
                group_id=group_id,
                attempt=attempt,
                task_type=task.type,
            )
            await self._attempt(trajectory, task, derive_seed(seed, member, attempt))
            if trajectory.outcome is None or not trajectory.outcome.is_retryable:
                break
            logger.warning("attempt %s: %s", trajectory.id, trajectory.error)
            self.counters.retries += attempt < self.retries
        return trajectory

    async def _attempt(self, trajectory: Trajectory, task: Task, seed: int) -> None:
        self.counters.running += 1
        began = self.waits.clock()
        self.observer.on_start(trajectory)
        try:
            await self._classify(trajectory, task, seed)
        except BaseException as error:  # recorded, then passed on
            trajectory.outcome, trajectory.error = Outcome.CANCELLED, str(error) or type(error).__name__
            raise
        finally:
            trajectory.metrics["seconds"] = self.waits.clock() - began
            self.counters.running -= 1
            if trajectory.outcome is not None:
                self.counters.outcomes[trajectory.outcome] += 1
            self.observer.on_end(trajectory)

    async def _classify(self, trajectory: Trajectory, task: Task, seed: int) -> None:
        try:
            trajectory.outcome = await self._play(trajectory, task, seed)
            await self._score(trajectory, task)
        except AgentRLError as error:
            outcome = getattr(error, "outcome", None)
            if not isinstance(outcome, Outcome):
                raise
            trajectory.outcome, trajectory.error = outcome, str(error)
            trajectory.reward = None

    async def _play(self, trajectory: Trajectory, task: Task, seed: int) -> Outcome:
        async with self.host.borrow(trajectory.id) as environment:
            stack = AsyncExitStack()
            recorders = Recorders(waits=self.waits, counters=self.counters, observer=self.observer)
            turns = TurnLog(trajectory, self.limits.for_task(task), recorders, seed)
            episode = self._episode(task, environment, turns, stack)
            try:
                outcome = await self._run_loop(episode)
            finally:
                try:
                    turns.close()
                finally:
                    await self.speaker.end(episode)
                    await self._close_tools(stack, trajectory.id)
            self._read_info(trajectory, episode)
            return outcome

    async def _close_tools(self, stack: AsyncExitStack, trajectory_id: str) -> None:
        """Leave the tools that the episode entered; a failure is logged, for the episode is over."""
        what = f"closing the tools of {trajectory_id}"
        try:
            with self.waits.on(WaitKind.TOOL, trajectory_id, what):
                async with async_boundary(EnvironmentFailure, what, deadline_s=self.limits.tool_timeout_s):
                    await stack.aclose()
        except AgentRLError as error:
            logger.warning("%s", error)

    def _episode(
        self, task: Task, environment: HostedEnvironment, turns: TurnLog, stack: AsyncExitStack
    ) -> RuntimeEpisode:
        return RuntimeEpisode(
            task=task,
            spec=self.spec,
            environment=environment,
            speaker=self.speaker,
            loop=self.loop,
            tools=self.tools,
            turns=turns,
            stack=stack,
        )

    async def _run_loop(self, episode: RuntimeEpisode) -> Outcome:
        try:
            await self.loop.run(episode)
        except EpisodeEnd as end:
            return end.outcome
        except PolicyError as error:
            episode.turns.trajectory.error = str(error)
            return error.outcome
        except AgentRLError:
            raise
        except Exception as error:
            logger.exception("agent loop %s failed in %s", type(self.loop).__name__, episode.turns.trajectory.id)
            raise EnvironmentFailure(
                f"agent loop {type(self.loop).__name__} failed (task {episode.task.id})",
                got=f"{type(error).__name__}: {error}",
            ) from error
        return _ending(episode.last_result)

    def _read_info(self, trajectory: Trajectory, episode: RuntimeEpisode) -> None:
        trajectory.task_type = episode.info.get("task_type", trajectory.task_type)
        if "success" in episode.info:
            trajectory.success = bool(episode.info["success"])
        elif self.spec.success_threshold is not None:
            total = sum(turn.reward for turn in trajectory.turns)
            trajectory.success = total >= self.spec.success_threshold

    async def _score(self, trajectory: Trajectory, task: Task) -> None:
        what = f"scoring task {task.id}"
        with self.waits.on(WaitKind.SCORER, trajectory.id, type(self.scorer).__name__):
            async with async_boundary(EnvironmentFailure, what, deadline_s=self.limits.score_timeout_s):
                score = await self.scorer.score(trajectory, task)
        if score.reward is not None and not math.isfinite(score.reward):
            raise EnvironmentFailure(
                f"reward of task {task.id} is {score.reward} (environment {self.spec.name})",
                expected="a finite number, or None when nothing can be said",
                hint=f"see agentrl env check {self.spec.name}",
            )
        trajectory.reward = score.reward
        trajectory.reward_components.update(score.components)


def _ending(result: StepResult | None) -> Outcome:
    truncated = result is not None and result.truncated and not result.terminated
    return Outcome.TRUNCATED_TURNS if truncated else Outcome.FINISHED
