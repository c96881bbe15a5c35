"""Playing a panel: every episode once, several at a time, what is finished skipped, what the machinery failed again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from agentrl.evaluation.episode import EpisodeStore, EvaluatedEpisode
from agentrl.evaluation.panel import Slot
from agentrl.trajectory import Trajectory

Player: TypeAlias = Callable[[Slot, int], Awaitable[Trajectory]]
"""Plays one attempt, numbered from 0; never raises for what befalls the episode itself (that is its outcome)."""


async def play_all(
    panel_slots: Sequence[Slot],
    player: Player,
    *,
    concurrency: int,
    retries: int,
    store: EpisodeStore | None = None,
    on_episode: Callable[[EvaluatedEpisode], None] = lambda episode: None,
) -> list[EvaluatedEpisode]:
    """Play every slot that is not finished yet.

    Args:
        panel_slots: What to play.
        player: Plays one attempt.
        concurrency: Most episodes at once.
        retries: New attempts for an episode that the machinery failed.
        store: Where finished episodes are kept, and found.
        on_episode: Called after each episode, found ones included.

    Returns:
        One episode per slot, in the order of the slots.

    Raises:
        UsageError: the store cannot be written, or the player says that no episode can be played.
    """
    gate = asyncio.Semaphore(concurrency)

    async def settle(slot: Slot) -> EvaluatedEpisode:
        found = None if store is None else store.find(slot.task.id, slot.sample)
        if found is None:
            async with gate:
                found = await _play_with_retries(slot, player, retries)
            if store is not None and found.is_measured:
                store.add(found)
        on_episode(found)
        return found

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(settle(slot), name=f"{slot.task.id}/{slot.sample}") for slot in panel_slots]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the first one cancelled the others
    return [task.result() for task in tasks]


async def _play_with_retries(slot: Slot, player: Player, retries: int) -> EvaluatedEpisode:
    began = time.perf_counter()
    attempt = 0
    while True:
        trajectory = await player(slot, attempt)
        outcome = trajectory.outcome
        if attempt == retries or outcome is None or not outcome.is_retryable:
            break
        attempt += 1
    return EvaluatedEpisode(
        task_id=slot.task.id,
        sample=slot.sample,
        seconds=time.perf_counter() - began,
        attempts=attempt + 1,
        trajectory=trajectory,
    )
