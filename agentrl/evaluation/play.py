"""Playing a panel: every episode once, several at a time; what is finished already is skipped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from agentrl.evaluation.episode import EpisodeStore, EvaluatedEpisode
from agentrl.evaluation.panel import Slot
from agentrl.trajectory import Trajectory

Player: TypeAlias = Callable[[Slot], Awaitable[Trajectory]]
"""Plays one episode; retries what the machinery failed, and never raises for what befalls the episode itself."""


def unwatched(_: EvaluatedEpisode) -> None:
    """Nobody is told about the episode."""


async def play_all(
    panel_slots: Sequence[Slot],
    player: Player,
    *,
    concurrency: int,
    store: EpisodeStore | None = None,
    on_episode: Callable[[EvaluatedEpisode], None] = unwatched,
) -> list[EvaluatedEpisode]:
    """Play every slot that is not finished yet.

    Args:
        panel_slots: What to play.
        player: Plays one episode.
        concurrency: Most episodes at once.
        store: Where finished episodes are kept, and found.
        on_episode: Called after each episode, found ones included.

    Returns:
        One episode per slot, in the order of the slots.

    Raises:
        UsageError: the store cannot be written, or the player says that no episode can be played.
    """
    gate = asyncio.Semaphore(concurrency)

    async def settle(slot: Slot) -> EvaluatedEpisode:
        episode = None if store is None else store.find(slot.task.id, slot.sample)
        if episode is None:
            async with gate:
                episode = await _play(slot, player)
            if store is not None and episode.is_measured:
                store.add(episode)
        on_episode(episode)
        return episode

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(settle(slot), name=f"{slot.task.id}/{slot.sample}") for slot in panel_slots]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the first one cancelled the others
    return [task.result() for task in tasks]


async def _play(slot: Slot, player: Player) -> EvaluatedEpisode:
    began = time.perf_counter()
    trajectory = await player(slot)
    seconds = time.perf_counter() - began
    return EvaluatedEpisode(task_id=slot.task.id, sample=slot.sample, seconds=seconds, trajectory=trajectory)
