"""Evaluating with an episode runner: choose the tasks, play what is not finished yet, draw the estimates."""

from __future__ import annotations

import time
from collections.abc import Callable

from agentrl.evaluation.episode import EpisodeStore, EvaluatedEpisode
from agentrl.evaluation.panel import Panel, Slot, choose_tasks, slots
from agentrl.evaluation.result import EvaluationResult, summarise
from agentrl.rollout.play import Assignment, play_all
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.seeds import derive_seed
from agentrl.task import TaskSource


def unwatched(_: EvaluatedEpisode) -> None:
    """Nobody is told about the episode."""


async def evaluate_panel(
    runner: EpisodeRunner,
    source: TaskSource,
    panel: Panel,
    *,
    concurrency: int,
    store: EpisodeStore | None = None,
    on_episode: Callable[[EvaluatedEpisode], None] = unwatched,
) -> EvaluationResult:
    """Play a panel with a runner; the same panel on a seeded engine gives the same episodes.

    Args:
        runner: Plays episodes, and retries what the machinery failed.
        source: The split's tasks.
        panel: How many of them, how often, under which seed.
        concurrency: Most episodes at once.
        store: Where finished episodes are kept, and found.
        on_episode: Called after each episode, found ones included.

    Raises:
        UsageError: nothing to play, more tasks than the source holds, a full disk, or something that no retry can mend.
    """
    began = time.perf_counter()
    tasks = choose_tasks(source, panel.n_tasks, panel.seed)
    chosen = slots(tasks, panel.samples)
    episodes: dict[Slot, EvaluatedEpisode] = {}
    for slot in chosen:
        found = None if store is None else store.find(slot.task.id, slot.sample)
        if found is not None:
            episodes[slot] = found
            on_episode(found)
    open_slots = {_assignment_id(slot): slot for slot in chosen if slot not in episodes}
    assignments = [_assignment(slot, panel.seed) for slot in open_slots.values()]
    async for trajectory in play_all(runner, assignments, concurrency=concurrency):
        slot = open_slots[trajectory.id.rpartition(".")[0]]
        episode = EvaluatedEpisode(task_id=slot.task.id, sample=slot.sample, trajectory=trajectory)
        episodes[slot] = episode
        if store is not None and episode.is_measured:
            store.add(episode)
        on_episode(episode)
    return summarise(panel, [episodes[slot] for slot in chosen], time.perf_counter() - began)


def _assignment(slot: Slot, seed: int) -> Assignment:
    return Assignment(
        task=slot.task,
        group_id=_group(slot),
        member=slot.sample,
        seed=derive_seed("evaluation", seed, slot.task.id),
    )


def _group(slot: Slot) -> str:
    return f"evaluation/{slot.task.id}"


def _assignment_id(slot: Slot) -> str:
    """What the runner calls all attempts at this episode, before the attempt's number."""
    return f"{_group(slot)}/{slot.sample}"
