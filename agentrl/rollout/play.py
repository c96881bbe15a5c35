"""Plays a list of episodes with bounded concurrency: evaluation, and demonstrations for warm starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from agentrl.rollout.runner import EpisodeRunner
from agentrl.task import Task
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One episode to play."""

    task: Task
    group_id: str
    member: int
    seed: int
    """Decides the episode's sampling."""


async def play_all(
    runner: EpisodeRunner, assignments: Iterable[Assignment], *, concurrency: int
) -> AsyncIterator[Trajectory]:
    """Play all assignments, at most `concurrency` at a time; trajectories come as episodes end.

    Leaving the loop early cancels what runs.

    Raises:
        UsageError: an episode met something that the user must change.
    """
    remaining = iter(assignments)
    running: set[asyncio.Task[Trajectory]] = set()
    done: set[asyncio.Task[Trajectory]] = set()
    try:
        while True:
            for assignment in remaining:
                running.add(asyncio.create_task(_play(runner, assignment)))
                if len(running) >= concurrency:
                    break
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for episode in done:
                yield episode.result()
    finally:
        for episode in running:
            episode.cancel()
        await asyncio.gather(*running, *done, return_exceptions=True)


async def _play(runner: EpisodeRunner, assignment: Assignment) -> Trajectory:
    return await runner.run(
        assignment.task, group_id=assignment.group_id, member=assignment.member, seed=assignment.seed
    )
